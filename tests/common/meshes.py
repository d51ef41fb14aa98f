"""Meshes of more than one dim, and training on them in steps of several micro-batches.

    mesh("replicate", "shard", shape=(2, 2))      made once in each process
    train_micro(model, steps, before=…)           ours or torch's, on this rank's part
    train_plain(model, steps, parts=…)            one process, every part in turn

Sums over two ranks have one order only, so on axes of at most two ranks ours and torch's agree to
the bit, whatever the number of axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.common import parity
from tests.common.models import DIM

Before = Callable[[Any, int, bool], None]  # (model, number of the micro-batch, is it the last)
Part = tuple[int, int]  # this rank's position among those that see different data; their number

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


@functools.cache
def mesh(*names: str, shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh of all ranks, made once: its process groups serve all tests of this process."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def unshared_mesh(name: str) -> DeviceMesh:
    """All ranks in one dim, a mesh of one test alone: other meshes' groups were not made for it."""
    world = dist.group.WORLD
    assert world is not None
    return DeviceMesh.from_group(world, "cpu", mesh_dim_names=(name,))


@contextmanager
def more_groups_on_some() -> Iterator[None]:
    """While this is active, the first half of the ranks have made one process group more."""
    everyone = list(range(dist.get_world_size()))
    first, second = everyone[: len(everyone) // 2], everyone[len(everyone) // 2 :]
    early = dist.get_rank() in first
    if early:
        extra = dist.new_group(first, use_local_synchronization=True)
    try:
        yield
    finally:
        if not early:
            extra = dist.new_group(second, use_local_synchronization=True)
        dist.barrier(extra)  # a rank that is still connecting would find its peer gone
        dist.destroy_process_group(extra)


def hsdp_mesh(replicate: int, shard: int) -> DeviceMesh:
    return mesh("replicate", "shard", shape=(replicate, shard))


class Flags(NamedTuple):
    """What one micro-batch's backward communicates."""

    sync: bool = True
    all_reduce: bool = True

    def set_on(self, model: Any) -> None:
        model.set_requires_gradient_sync(self.sync)
        model.set_requires_all_reduce(self.all_reduce)


def flags_in_turn(*flags: Flags) -> Before:
    """For `train_micro`: the flags of each micro-batch."""

    def before(model: Any, number: int, last: bool) -> None:
        flags[number].set_on(model)

    return before


def micro_batches(
    inputs: int, outputs: int, *, micro: int = 1, steps: int = 3, rows: int = 8
) -> list[list[tuple[Tensor, Tensor]]]:
    """Steps of `micro` batches each."""
    flat = parity.regression_batches(inputs, outputs, rows=rows, steps=steps * micro)
    return [flat[i * micro : (i + 1) * micro] for i in range(steps)]


def train_micro(
    model: nn.Module,
    steps: Sequence[Sequence[Any]],
    *,
    loss: parity.Loss = parity.regression_loss,
    before: Before | None = None,
    part: Part | None = None,
    make_optimizer: parity.MakeOptimizer = parity.adamw,
) -> list[parity.Step]:
    """Trains a sharded model on this rank's part of every micro-batch."""
    rank, size = part or (dist.get_rank(), dist.get_world_size())
    optimizer = make_optimizer(model.parameters())
    done = []
    for micros in steps:
        total = torch.zeros(())
        for number, batch in enumerate(micros):
            if before is not None:
                before(model, number, number == len(micros) - 1)
            value = loss(model, parity.my_part(batch, rank, size))
            value.backward()
            value = value.detach()
            total += value.to_local() if isinstance(value, DTensor) else value  # replicated
        grads = parity.full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        done.append(parity.Step(parity.over_ranks(total), grads, parity.full_params(model)))
    return done


def train_plain(
    model: nn.Module,
    steps: Sequence[Sequence[Any]],
    *,
    loss: parity.Loss = parity.regression_loss,
    before: Before | None = None,
    parts: int | None = None,
    divide: float | None = None,
    mixed: bool = False,
    make_optimizer: parity.MakeOptimizer = parity.adamw,
) -> list[parity.Step]:
    """Trains a plain model, each part of every micro-batch in turn; gradients are averaged.

    `divide` is what sums over parts are divided by instead of their number.
    """
    parts = parts or dist.get_world_size()
    optimizer = make_optimizer(model.parameters())
    done = []
    for micros in steps:
        total = torch.zeros(())
        for number, batch in enumerate(micros):
            if before is not None:
                before(model, number, number == len(micros) - 1)
            for rank in range(parts):
                value = loss(
                    parity.Bf16(model) if mixed else model, parity.my_part(batch, rank, parts)
                )
                value.backward()
                total += value.detach()
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= parts if divide is None else divide
        grads = parity.full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        done.append(parity.Step(total / parts, grads, parity.full_params(model)))
    return done


def specs(model: nn.Module) -> dict[str, Any]:
    """Where every parameter lies, and what this rank holds of it."""
    found = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), name
        where = param.device_mesh
        found[name] = (
            [repr(placement) for placement in param.placements],  # split factors too
            param.placements,
            where.mesh.tolist(),
            where.mesh_dim_names,
            tuple(param.shape),
            param.stride(),
            param.to_local().detach().clone(),
        )
    return found


def like_torch(
    scenario: Callable[[ModuleType], Any], tolerance: parity.Tolerance | None = None
) -> Any:
    """Runs a scenario with ours and with torch's FSDP2; the same bits unless a tolerance is given.

    Returns what ours returned.
    """
    ours, torchs = scenario(parity.OURS), scenario(parity.TORCH)
    if tolerance is None:
        parity.assert_equal(ours, torchs, "torch")
    else:
        parity.assert_close(ours, torchs, tolerance, "torch")
    return ours


# -- tensor parallelism ---------------------------------------------------------------------------


class ParallelBlock(nn.Module):
    """Norm, up, down and a residual; inputs [batch, length, DIM], the length perhaps sharded."""

    is_unit = True

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class ParallelModel(nn.Module):
    """An embedding, blocks, a norm and a head, with a plan for each kind of parallelism."""

    def __init__(self, blocks: int = 2, hidden: int = 2 * DIM, vocab: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, DIM)
        self.blocks = nn.ModuleList(ParallelBlock(hidden) for _ in range(blocks))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: ParallelModel, tp: DeviceMesh, kind: str) -> ParallelModel:
    """`linears`: only those of the blocks. `uneven`: the same, where DTensor has to know the whole.
    `sequence`: all, norms on pieces of the sequence. `loss`: as `sequence`, and the logits stay
    sharded, for `loss_parallel`."""
    if kind in ("linears", "uneven"):
        up = ColwiseParallel(use_local_output=kind == "linears")
        for block in model.blocks:
            parallelize_module(block, tp, {"up": up, "down": RowwiseParallel()})
        return model
    pieces = Shard(1)
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=pieces),
            "down": RowwiseParallel(output_layouts=pieces),
        }
        # The residual is added to local pieces.
        parallelize_module(block, tp, plan)
    whole = kind == "sequence"
    root = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=pieces),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=pieces,
            output_layouts=Replicate() if whole else Shard(-1),
            use_local_output=whole,
        ),
    }
    parallelize_module(model, tp, root)
    return model


def parallel_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """As `language_loss`, for logits that may be a DTensor, sharded over the vocabulary."""
    logits = model(ids[:, :-1])
    targets = ids[:, 1:].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets)
