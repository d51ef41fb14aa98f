"""Wire formats with tensor parallelism: weights that its ranks have in common stay equal.

A codec rounds neighbors together. Neighbors that differ between ranks of tensor parallelism would
round a weight differently that these ranks have in common.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import checkpoint
from fsdp2.core.layout.mesh import local_of
from tests.common import meshes, models, parity
from tests.common.workers import ranks

WIDTH = 26  # no multiple of a block
MESH = partial(meshes.mesh, "data", "model", shape=(2, 2))
FORMATS: list[dict[str, Any]] = [
    {},
    {"reduce": "fp32"},
    {"reduce": "bf16", "feedback": True},
    {"reduce": "bf16", "rotate": True},
    {"reduce": "int8"},
    {"reduce": "int8", "rotate": True},
    {"reduce": "int4", "feedback": True},
    {"reduce": "int4", "feedback": True, "rotate": True},
    {"gather": "int8"},
    {"gather": "int4", "reduce": "int8"},
    {"gather": "int8", "differences": True},
    {"gather": "int4", "differences": True, "reduce": "int4", "feedback": True, "rotate": True},
]
names = [" ".join(f"{key}={value}" for key, value in each.items()) or "none" for each in FORMATS]


class Block(nn.Module):
    """Sharded, replicated and plain weights in one unit."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.same = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.same(self.down(self.up(x).relu()))


def make(hidden: int, formats: dict[str, Any], seed: int = 0) -> nn.Module:
    mesh = MESH()
    model = models.seeded(lambda: nn.Sequential(Block(hidden), Block(hidden)), seed=seed)
    for block in model:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(block, mesh["model"], plan)
        fsdp2.fully_shard(block, mesh=mesh["data"])
    fsdp2.fully_shard(model, mesh=mesh["data"])
    if formats:
        model.set_wire_format(**formats, exact_below=0)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    data = MESH().get_local_rank("data")
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + data)
        x = torch.randn(8, WIDTH, generator=generator)
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def in_common(model: nn.Module) -> dict[str, Tensor]:
    """This rank's rows of each parameter that ranks of tensor parallelism have in common."""
    return {
        name: param.to_local().detach().clone()
        for name, param in model.named_parameters()
        if isinstance(param, DTensor) and param.placements[1:] in ((), (Replicate(),))
    }


def equal_over_ranks(tensors: dict[str, Tensor]) -> bool:
    """Whether ranks of tensor parallelism have the same bits."""
    group = MESH()["model"].get_group()
    mine = torch.cat([each.flatten() for each in tensors.values()])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine, group=group)
    return torch.equal(*both)


@ranks(4)
@pytest.mark.parametrize("hidden", [50, 51], ids=["even", "uneven"])
@pytest.mark.parametrize("formats", FORMATS, ids=names)
def test_weights_in_common_are_equal_to_the_bit(
    tmp_path: Path, formats: dict[str, Any], hidden: int
) -> None:
    model = make(hidden, formats)
    optimizer = parity.adamw(model.parameters())
    train(model, optimizer, range(3))
    assert len(in_common(model)) == 6  # of each block a replicated bias, a plain weight and bias
    assert equal_over_ranks(in_common(model))
    checkpoint.save(tmp_path, model, optimizer, step=3)
    train(model, optimizer, range(3, 6))
    other = make(hidden, formats, seed=1)
    its = parity.adamw(other.parameters())
    checkpoint.load(tmp_path, other, its)
    assert equal_over_ranks(in_common(other))
    train(other, its, range(3, 6))
    assert equal_over_ranks(in_common(other))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local_of(one), local_of(two))
