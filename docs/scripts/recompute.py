import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

import fsdp2

gpu = torch.cuda.is_available()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if gpu
    else torch.device("cpu")
)
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
kept = {}  # bytes of each storage that a forward leaves for backward


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.LayerNorm(64),
            nn.Linear(64, 256),
            nn.GELU(),
            nn.Linear(256, 64),
        )

    def forward(self, x):
        return x + super().forward(x)


def keep(tensor):
    if not isinstance(tensor, nn.Parameter) and not isinstance(
        tensor._base, nn.Parameter
    ):
        kept[tensor.untyped_storage().data_ptr()] = (
            tensor.untyped_storage().nbytes()
        )
    return tensor


def keep_products(context, operator, *args, **kwargs):
    if operator != torch.ops.aten.addmm.default:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if not context.is_recompute:
        _bias, rows, weight = args
        # bytes of its output
        kept[len(kept)] = len(rows) * weight.size(1) * rows.itemsize
    return CheckpointPolicy.MUST_SAVE


def train(setting, blocks=(), around=False, **options):
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(
        nn.Embedding(256, 64),
        *(Block() for _ in range(4)),
        nn.Linear(64, 256),
    )
    model.to(device)
    for i in range(1, 5):
        if i in blocks and not around:
            model[i] = checkpoint_wrapper(model[i], **options)
        fsdp2.fully_shard(model[i])
        if i in blocks and around:
            model[i] = checkpoint_wrapper(model[i], **options)
    fsdp2.fully_shard(model)
    torch.manual_seed(1 + dist.get_rank())  # different data on every rank
    tokens = torch.randint(256, (8, 64), device=device)
    with fsdp2.trace("step.json") as trace:
        with torch.autograd.graph.saved_tensors_hooks(
            keep, lambda tensor: tensor
        ):
            loss = nn.functional.cross_entropy(
                model(tokens).flatten(0, 1), tokens.flatten()
            )
        loss.backward()
    if dist.get_rank() == 0:
        gathers = len(trace.timeline.on("all-gather"))
        print(
            f"{setting:26}{sum(kept.values()):9,} bytes {gathers:3} all-gathers  loss {loss:.3f}"
        )
    kept.clear()


train("nothing is recomputed")
train("every block", blocks=[1, 2, 3, 4])
train("every block, around units", blocks=[1, 2, 3, 4], around=True)
train("every second block", blocks=[2, 4])
products = partial(create_selective_checkpoint_contexts, keep_products)
train("all except products", blocks=[1, 2, 3, 4], context_fn=products)
dist.destroy_process_group()
