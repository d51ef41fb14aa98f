"""accelerate with fsdp_version=2 trains a random Llama. Arguments: cases."""

import os
import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from common import (
    SCRATCH,
    finish,
    fsdp_on_cpu,
    report_classes,
    report_loss,
    tiny_llama,
    tokens,
)

STEPS = 3


def prepare(case, **options):
    """(accelerator, sharded model, its optimizer)"""
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        del os.environ[name]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=case == "tied",
        activation_checkpointing=case == "recomputed",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **options)
    model = tiny_llama(tie_word_embeddings=case == "tied")
    if case == "tied" and PartialState().process_index > 0:  # they load nothing
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def train(case, accelerator, model, optimizer, steps):
    for step in steps:
        with accelerator.accumulate(model):
            batch = tokens(step)
            loss = model(input_ids=batch, labels=batch).loss
            report_loss(case, loss)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                report_loss(case, getattr(norm, "full_tensor", lambda norm=norm: norm)())
            optimizer.step()
            optimizer.zero_grad()


OPTIONS = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "mixed": {"mixed_precision": "bf16"},
    "compiled": {"dynamo_backend": "aot_eager"},
}


def main(case):
    accelerator, model, optimizer = prepare(case, **OPTIONS.get(case, {}))
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
for name in sys.argv[1:]:
    main(name)
finish()
