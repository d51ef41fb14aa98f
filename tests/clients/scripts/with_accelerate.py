"""accelerate trains a random Llama, by FSDP2, and in cases `one_…` by FSDP1. Arguments: cases."""

import os

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from common import (
    SCRATCH,
    fsdp1_on_cpu,
    fsdp_on_cpu,
    language_loss,
    report_classes,
    report_loss,
    run,
    tiny_llama,
)

STEPS = 3
VERSIONS = {
    1: {"sharding_strategy": "FULL_SHARD", "use_orig_params": True, "sync_module_states": False},
    2: {"reshard_after_forward": True, "state_dict_type": "SHARDED_STATE_DICT"},
}


def version_and_way(case):
    return (1, case.removeprefix("one_")) if case.startswith("one_") else (2, case)


def prepare(case):
    """(accelerator, sharded model, its optimizer); FSDP1 in bf16 also of a model loaded so."""
    version, way = version_and_way(case)
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        del os.environ[name]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=way == "tied",
        activation_checkpointing=way == "recomputed",
        **VERSIONS[version],
    )
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=2 if version == 1 or way == "accumulated" else 1,
        mixed_precision="bf16" if way in ("mixed", "upcast") else None,
        dynamo_backend="aot_eager" if way == "compiled" else None,
    )
    if version == 1:
        fsdp1_on_cpu()
    model = tiny_llama(tie_word_embeddings=way == "tied")
    if way == "upcast":
        model = model.to(torch.bfloat16)
    if way == "tied" and PartialState().process_index > 0:  # they load nothing
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def train(case, accelerator, model, optimizer, steps):
    version, _ = version_and_way(case)
    for step in steps:
        with accelerator.accumulate(model):
            loss = language_loss(model, step)
            report_loss(case, loss)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5 if version == 2 else 1e9)
                if version == 2:  # FSDP1's differs by a rounding
                    report_loss(case, norm)
            optimizer.step()
            optimizer.zero_grad()


def main(case):
    accelerator, model, optimizer = prepare(case)
    report_classes(case, model)
    train(case, accelerator, model, optimizer, range(STEPS + (case == "accumulated")))
    if case == "resumed":
        folder = os.path.join(SCRATCH, "checkpoint")
        accelerator.save_state(folder)
        train(case, accelerator, model, optimizer, range(STEPS, 2 * STEPS))
        accelerator, model, optimizer = prepare(case)
        accelerator.load_state(folder)
        train(case, accelerator, model, optimizer, range(STEPS, 2 * STEPS))
        full = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            report_loss(case, sum(value.double().abs().sum() for value in full.values()))


fsdp_on_cpu()
run(main)
