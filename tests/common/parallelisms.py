"""Ways to spread one model over ranks, for tests that move a model from one to another.

name    ranks  mesh                          parameters
plain   1      none                          plain tensors
flat2   2      (2,)                          Shard(0)
flat4   4      (4,)                          Shard(0)
hsdp    4      (2, 2) replicate, shard       Replicate(), Shard(0)
tp      4      (2, 2) shard, tp              those of the blocks by parallelize_module first
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import Optimizer

from tests.common import meshes, models, parity

APIS = {"ours": parity.OURS, "torch": parity.TORCH}


@dataclass(frozen=True)
class Parallelism:
    """A way to spread a model."""

    name: str
    dims: tuple[tuple[str, int], ...]

    @property
    def ranks(self) -> int:
        total = 1
        for _, size in self.dims:
            total *= size
        return total

    def mesh(self) -> DeviceMesh:
        names, sizes = zip(*self.dims, strict=True)
        return meshes.mesh(*names, shape=sizes)

    def shard(self, api: ModuleType, model: nn.Module) -> nn.Module:
        """Spreads a `Ladder` (or what has its submodules) with `api.fully_shard`."""
        if not self.dims:
            return model
        mesh = self.mesh()
        arguments: dict[str, Any] = {"mesh": mesh}
        if "tp" in dict(self.dims):
            for block in models.units(model):
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh["tp"], plan)
            arguments["mesh"] = mesh["shard"]
        for unit in models.units(model):
            api.fully_shard(unit, **arguments)
        api.fully_shard(model, **arguments)
        return model

    def part(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """This rank's rows of a batch; ranks of one tensor-parallel group get the same."""
        if not self.dims:
            return batch
        size = self.ranks // dict(self.dims).get("tp", 1)
        index = dist.get_rank() * size // self.ranks
        return tuple(part.chunk(size)[index] for part in batch)


PARALLELISMS = {
    each.name: each
    for each in (
        Parallelism("plain", ()),
        Parallelism("flat2", (("shard", 2),)),
        Parallelism("flat4", (("shard", 4),)),
        Parallelism("hsdp", (("replicate", 2), ("shard", 2))),
        Parallelism("tp", (("shard", 2), ("tp", 2))),
    )
}


class Rung(nn.Module):
    """A unit with a tensor-parallel pair of linears, a norm, and buffers of both kinds."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(models.DIM)
        self.up = nn.Linear(models.DIM, 2 * models.DIM)
        self.down = nn.Linear(2 * models.DIM, models.DIM)
        self.register_buffer("scale", torch.linspace(0.5, 1, models.DIM))
        self.register_buffer("shift", torch.linspace(-1, 1, models.DIM), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x) * self.scale + self.shift)))


class Ladder(nn.Module):
    """Rungs between two linears of the root's group: one with odd rows, and one tied on request."""

    def __init__(self, rungs: int = 2, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Linear(models.DIM, models.DIM, bias=False)
        self.rungs = nn.ModuleList(Rung() for _ in range(rungs))
        self.again = nn.Linear(models.DIM, models.DIM, bias=False)
        self.head = nn.Linear(models.DIM, 3)
        if tied:
            self.again.weight = self.inlet.weight
        if frozen:
            self.rungs[0].up.requires_grad_(False)
            self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for rung in self.rungs:
            x = rung(x)
        return self.head(torch.tanh(self.again(x)))


def ladder(seed: int = 0, **arguments: bool) -> nn.Module:
    return models.seeded(lambda: Ladder(**arguments), seed=seed)


def ladder_batches(steps: int, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, models.DIM, generator=generator),
            torch.randn(rows, 3, generator=generator),
        )
        for _ in range(steps)
    ]


def losses(
    model: nn.Module,
    optimizer: Optimizer,
    parallelism: Parallelism,
    batches: Sequence[tuple[Tensor, Tensor]],
) -> list[Tensor]:
    """Trains; the loss over the whole batch before every step."""
    found = []
    for batch in batches:
        value = parity.regression_loss(model, parallelism.part(batch))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = value.detach().clone()
        if parallelism.dims:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        found.append(value)
    return found


def gather(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The whole tensors on every rank, whatever their placements; one collective for all."""
    tensors = list(tensors)
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        return parity.full_all(tensors)  # type: ignore[return-value]  # none of them is None
    return [tensor.detach().clone() for tensor in tensors]
