"""One rank that goes the ways of many: what a single GPU can show of a backend and its streams.

A process group of size 1 gathers what it has, and reduces to that; fsdp2 would not even call it.
`among_several()` makes it call: coalesced gathers, reduce-scatters, all-reduces. A model then must
train as if it were not sharded, however late its lanes are: `late_lanes`, and `Late` in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.core.device import streams
from fsdp2.core.device.backends import traits_of
from fsdp2.core.device.buffers import TransientBuffer
from fsdp2.core.device.collectives import GroupCollectives, ReduceKind
from fsdp2.core.device.streams import ALL_GATHER, ALL_REDUCE, COMPUTE, REDUCE, DeviceStreams, Lane
from fsdp2.sharding import assembly
from tests.common.parity import Bf16

DIM, HIDDEN, OUT, STEPS = 64, 128, 8, 4
NUMELS = (8, 64, 1000)
ALIGN = 256  # bytes, as of slots
FACTOR = 4.0  # to divide by: exact

Pause = Callable[[], None]
"""Keeps the current stream busy."""


# ---- collectives alone, in lanes


@contextmanager
def _lane(lanes: DeviceStreams, lane: Lane, pause: Pause) -> Iterator[None]:
    """Behind COMPUTE, and COMPUTE behind it; late."""
    lanes.wait(lane, lanes.record(COMPUTE, ""), "")
    with lanes.on(lane):
        pause()
        yield
    lanes.wait(COMPUTE, lanes.record(lane, ""), "")


def _values(dtype: torch.dtype, device: torch.device, start: int) -> list[Tensor]:
    """Multiples of `FACTOR` that all dtypes have."""
    return [
        (torch.arange(start, start + n, device=device) % 50 * int(FACTOR)).to(dtype) for n in NUMELS
    ]


def _buffer(dtype: torch.dtype, device: torch.device) -> tuple[TransientBuffer, list[int]]:
    """A buffer for tensors of `NUMELS`, allocated anew, and where each begins."""
    starts, end = [], 0
    for n in NUMELS:
        starts.append(end)
        end += -(-n * dtype.itemsize // ALIGN) * ALIGN
    buffer = TransientBuffer(end, device, "test")
    return buffer, starts


def _views(buffer: TransientBuffer, starts: list[int], dtype: torch.dtype) -> list[Tensor]:
    return [buffer.view(dtype, at, (n,)) for at, n in zip(starts, NUMELS, strict=True)]


def check_gathers(group: Any, device: torch.device, dtype: torch.dtype, pause: Pause) -> None:
    """One tensor and many, from elsewhere and in place, into memory that comes and goes."""
    collectives, lanes = GroupCollectives(group, device, True), DeviceStreams(device)
    buffer, starts = _buffer(dtype, device)
    views, own = (_views(buffer, starts, dtype) for _ in range(2))
    for start, inputs in enumerate((None, own)):
        buffer.release()
        buffer.acquire()
        shards = _values(dtype, device, start)
        if inputs is not None:
            torch._foreach_copy_(own, shards)
        with _lane(lanes, ALL_GATHER, pause):
            assert collectives.bind_all_gather_many(views, inputs or shards)() is None
        for view, shard in zip(views, shards, strict=True):
            assert torch.equal(view, shard)
    whole, shard = torch.zeros(NUMELS[-1], dtype=dtype, device=device), shards[-1]
    with _lane(lanes, ALL_GATHER, pause):
        assert collectives.all_gather(whole, shard) is None
    assert torch.equal(whole, shard)
    assert collectives.exchange([7, -1]) == [[7, -1]]


def check_reductions(group: Any, device: torch.device, dtype: torch.dtype, pause: Pause) -> None:
    """Each kind, out of memory that comes and goes, into views of one tensor."""
    collectives, lanes = GroupCollectives(group, device, True), DeviceStreams(device)
    replicas = GroupCollectives(group, device, True)
    kinds = [ReduceKind(average=True), ReduceKind(average=False)]
    if collectives.premultiplies:
        kinds.append(ReduceKind(average=False, factor=FACTOR))
    buffer, starts = _buffer(dtype, device)
    views = _views(buffer, starts, dtype)
    for start, kind in enumerate(kinds):
        grads = _values(dtype, device, start)
        expected = [grad / (kind.factor or 1) for grad in grads]
        buffer.release()
        buffer.acquire()
        torch._foreach_copy_(views, grads)
        flat = torch.zeros(sum(NUMELS), dtype=dtype, device=device)
        outputs = list(flat.split_with_sizes(NUMELS))
        one = torch.zeros_like(grads[-1])
        with _lane(lanes, REDUCE, pause):
            assert collectives.bind_reduce_scatter_many(kind)(outputs, views) is None
            assert collectives.bind_reduce_scatter(kind)(one, views[-1]) is None
        for output, rows in zip((*outputs, one), (*expected, expected[-1]), strict=True):
            assert torch.equal(output, rows), kind.op
        summed = torch.cat(grads)
        with _lane(lanes, ALL_REDUCE, pause):
            assert replicas.all_reduce(summed, kind) is None
        assert torch.equal(summed, torch.cat(expected)), kind.op


# ---- a model


class Several(int):
    """The number 1, which compares as 2 would."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return other is self or other == 2

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __gt__(self, other: Any) -> bool:
        return other < 2


SEVERAL = Several(1)


class _Collectives(GroupCollectives):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.size = SEVERAL


@contextmanager
def among_several() -> Iterator[None]:
    """Groups of one rank that `fully_shard` makes inside communicate."""
    with mock.patch.object(assembly, "GroupCollectives", _Collectives):
        yield


@contextmanager
def late_lanes(pause: Pause) -> Iterator[None]:
    """Whatever is issued on a side lane inside runs late: who does not wait for it comes first."""
    enter = streams._OnStream.__enter__

    def late(self: Any) -> None:
        enter(self)
        pause()

    with mock.patch.object(streams._OnStream, "__enter__", late):
        yield


class Late(torch.autograd.Function):
    """The identity, late in forward and in backward: a side lane that does not wait comes first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pause: Pause) -> Tensor:
        ctx.pause = pause
        pause()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.pause()
        return grads[0], None


class Block(nn.Module):
    def __init__(self, pause: Pause) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.pause = pause

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(Late.apply(x, self.pause)))))


class Model(nn.Module):
    """Every parameter is whole pieces of 16 bytes, in bf16 too: all can travel coalesced."""

    def __init__(self, pause: Pause) -> None:
        super().__init__()
        self.inlet = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(pause) for _ in range(4))
        self.outlet = nn.Linear(DIM, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


CASES = ("fp32", "mixed", "replicated", "divided", "kept")


def mesh_shape(case: str) -> tuple[int, ...]:
    return (1, 1) if case == "replicated" else (1,)


def _sharded(model: Any, case: str, mesh: DeviceMesh) -> Any:
    arguments: dict[str, Any] = {"mesh": mesh}
    if case == "mixed":
        arguments["mp_policy"] = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with among_several():
        for unit in (*model.blocks, model):
            fsdp2.fully_shard(unit, **arguments)
    if case == "divided":
        for unit in (*model.blocks, model):
            unit.set_gradient_divide_factor(FACTOR)
    if case == "kept":
        model.set_tuning(keep_gradients=True)
    model.set_tuning(pack_below=0)  # small parameters stand for large ones
    coalesces = traits_of(mesh.get_group(mesh.ndim - 1), next(model.parameters()).device).coalesces
    expected = "coalesced" if coalesces else "packed"
    assert {report.transport for report in fsdp2.report(model).groups} == {expected}
    return model


def train(case: str, device: torch.device, mesh: DeviceMesh | None, pause: Pause) -> list[Any]:
    """Gradients, loss and parameters of every step."""
    torch.manual_seed(0)
    model: Any = Model(pause).to(device)
    if mesh is not None:
        _sharded(model, case, mesh)
    run = Bf16(model) if mesh is None and case == "mixed" else model
    # One tensor at a time, whether it is a DTensor or not.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    seen = []
    for step in range(STEPS):
        x = torch.randn(16, DIM, generator=torch.Generator().manual_seed(step)).to(device)
        loss = run(x).float().square().mean()
        loss.backward()
        if mesh is None and case == "divided":
            for param in model.parameters():
                param.grad /= FACTOR
        grads = [_local(param.grad) for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen.append([loss.detach().clone(), *grads, *map(_local, model.parameters())])
    return [[tensor.cpu() for tensor in each] for each in seen]


def _local(tensor: Any) -> Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    rows: Tensor = local.detach().clone()
    return rows
