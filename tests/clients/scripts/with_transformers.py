"""transformers' own fully_shard path: models sharded while they are loaded. Arguments: cases."""

import os
import sys

import torch
import torch.distributed as dist
from common import SCRATCH, finish, rank, report_classes, report_loss, tiny_llama, tokens
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

STEPS = 3


def load(case):
    """Save a random model on rank 0, and load it sharded on both."""
    folder = os.path.join(SCRATCH, case)
    if rank() == 0:
        tiny_llama(tie_word_embeddings=case == "tied").save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(fsdp_size=2, fsdp_mixed_precision=case == "mixed")
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=config)


def train(case, model, steps):
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    for step in steps:
        batch = tokens(step)
        loss = model(input_ids=batch, labels=batch).loss
        report_loss(case, loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def with_adapters(model):
    """LoRA on a model that is sharded already: the adapters stay whole on every rank."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def main(case):
    model = load(case)
    report_classes(case, model)
    train(case, with_adapters(model) if case == "lora" else model, range(STEPS))
    if case == "plain":
        folder = os.path.join(SCRATCH, "saved")
        model.save_pretrained(folder)
        dist.barrier()
        config = DistributedConfig(fsdp_size=2)
        model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
        train(case, model, range(STEPS, 2 * STEPS))


dist.init_process_group("gloo")
for name in sys.argv[1:]:
    main(name)
finish()
