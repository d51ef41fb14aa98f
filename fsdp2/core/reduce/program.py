"""What a reduction is to do, decided when it is bound.

    GroupOptions, ShardedParam ──> ReductionSpec    dtypes, factors, whose collectives
    ReductionSpec              ──> Division         where to divide: before, inside, after
    shapes of the rows         ──> [Run, Run, …]    in how few calls views of them are made
    what is needed of them     ──> Program          the steps, by lane, in their order

`fsdp2.core.reduce.reduction` has the steps themselves, and runs them (decision 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions
from fsdp2.core.custom_collectives import ReduceScatter
from fsdp2.core.device.buffers import contiguous_strides
from fsdp2.core.device.collectives import ReduceKind
from fsdp2.core.device.streams import OnStream
from fsdp2.core.layout.layout import Slot, Transport
from fsdp2.core.params.param import ShardedParam, compute_dtype


@dataclass(frozen=True)
class ReductionSpec:
    """What sets a reduction's steps.

    Attributes:
        grad_dtype: dtype of autograd's gradients.
        reduce_dtype: dtype of the collectives.
        result_dtype: dtype of the sharded ``.grad``.
        factor: the user's divide factor.
        sum_only: whether the collectives must only sum.
        hook: called with the flat reduced gradient.
        to_host: whether the result is copied to CPU memory.
        pin: whether that memory is page-locked.
        comm: the user's reduce-scatter.
        device: where its buffers are.
        keep: whether gradients' memory is kept for the next step.
    """

    grad_dtype: torch.dtype
    reduce_dtype: torch.dtype
    result_dtype: torch.dtype
    factor: float | None = None
    sum_only: bool = False
    hook: Callable[[torch.Tensor], None] | None = None
    to_host: bool = False
    pin: bool = False
    comm: ReduceScatter | None = field(default=None, hash=False)  # it need not be hashable
    device: torch.device | None = None
    keep: bool = False


def reduction_spec(
    options: GroupOptions,
    param: ShardedParam,
    offload: CPUOffloadPolicy | None,
    device: torch.device,
) -> ReductionSpec:
    """What sets the steps of one parameter's reduction.

    Args:
        options: what the user chose.
        param: the parameter.
        offload: where shards and gradients live in CPU memory apart from the device.
        device: where gradients are reduced.
    """
    grad = compute_dtype(options, param)
    reduce = param.grad_dtype
    if reduce.is_floating_point:  # a complex gradient cast to a real dtype would lose half of it
        reduce = options.precision.reduce_dtype or reduce
    comm = options.reduce_scatter
    hook = options.all_reduce_hook
    if hook is not None and options.all_reduce_hook_stream is not None:
        hook = OnStream(hook, options.all_reduce_hook_stream)
    return ReductionSpec(
        grad_dtype=grad,
        reduce_dtype=reduce,
        result_dtype=param.grad_dtype,
        factor=options.divide_factor,
        sum_only=options.sum_only,
        hook=hook,
        to_host=offload is not None,
        pin=offload is not None and offload.pin_memory,
        comm=comm,
        device=device,
        keep=options.keep_gradients,
    )


def is_direct(spec: ReductionSpec, slot: Slot, transport: Transport) -> bool:
    """Whether a gradient is reduced from where it is, one of several in a launch.

    Args:
        spec: what sets its reduction's steps.
        slot: the parameter's place in the layout.
        transport: how it is gathered.
    """
    itemsize = min(spec.reduce_dtype.itemsize, spec.grad_dtype.itemsize)
    gathered_so = spec.comm is None and transport is Transport.COALESCED
    return gathered_so and slot.in_order and slot.even and slot.aligned(itemsize)


# ---- where to divide


@dataclass(frozen=True)
class Division:
    """Where a reduction divides: before the collectives, inside them, after them."""

    before: float | None
    kind: ReduceKind
    replicas: ReduceKind
    after: float | None


_AVERAGE = (torch.float32, torch.bfloat16)
_SUM = ReduceKind(average=False)


def plan_division(
    dtype: torch.dtype,
    size: int,
    factor: float | None,
    premultiplies: bool,
    copies: int = 1,
    sum_only: bool = False,
) -> Division:
    """Choose where to divide.

    fp32 and bf16 have range to spare and divide inside the collective where the backend can.
    Others (fp16) split the factor about evenly before and after the sum, so that neither the sum
    overflows nor the addends vanish.

    Args:
        dtype: the reduction's dtype.
        size: ranks of the shard axis.
        factor: the user's divide factor; ``None`` averages over both axes.
        premultiplies: whether the backend has a premultiplied sum (NCCL has).
        copies: ranks of the replicate axis.
        sum_only: whether the collectives must only sum.
    """
    whole = float(size * copies) if factor is None else factor
    if dtype in _AVERAGE:
        if sum_only:
            return Division(None, _SUM, _SUM, whole if whole != 1 else None)
        if factor is None:
            return Division(None, ReduceKind(average=True), ReduceKind(average=True), None)
        if factor == size:
            return Division(None, ReduceKind(average=True), _SUM, None)
        if premultiplies and size > 1:
            return Division(None, ReduceKind(average=False, factor=factor), _SUM, None)
        return Division(None, _SUM, _SUM, factor)
    before = 2.0 ** math.ceil(math.log2(whole) / 2) if whole > 1 else 1.0
    after = whole / before
    return Division(before if before != 1.0 else None, _SUM, _SUM, after if after != 1.0 else None)


# ---- views of rows in a flat tensor

Strided = tuple[tuple[int, ...], tuple[int, ...], int]
"""Of a view in a flat tensor: shape; strides and start, in elements."""


class Run(NamedTuple):
    """Views that lie one behind the other in a flat tensor and differ in dim 0 alone.

    Attributes:
        shape: of all of them together.
        place: the same, in a flat tensor of more; ``None`` where the tensor is made in ``shape``.
        sizes: of each in dim 0, or ``None`` where the run is a single view.
    """

    shape: tuple[int, ...]
    place: Strided | None
    sizes: tuple[int, ...] | None

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each view."""
        first, *inner = self.shape
        return [(size, *inner) for size in self.sizes or (first,)]


SHORTEST_RUN = 3
"""A view costs 0.8 µs; one that a split makes 0.3, after 1.3 for the first (torch 2.13, CPU)."""


def runs(shapes: Sequence[tuple[int, ...]], starts: Sequence[int]) -> list[Run]:
    """The fewest calls that make contiguous views of ``shapes``, in this order.

    Args:
        shapes: of each view, one dim at least.
        starts: where each begins, in elements.

    Example: shapes (2, 4), (6, 4), (2, 4) and (5,) from 0, 8, 32 and 40 are two runs, one of sizes
    (2, 6, 2) over (10, 4) from 0, and one over (5,) from 40.
    """
    found: list[list[int]] = []
    behind = -1
    for index, (shape, start) in enumerate(zip(shapes, starts, strict=True)):
        if start == behind and shape[1:] == shapes[found[-1][0]][1:]:
            found[-1].append(index)
        else:
            found.append([index])
        behind = start + math.prod(shape)
    planned: list[Run] = []
    for run in found:
        together = [run] if len(run) >= SHORTEST_RUN else [[index] for index in run]
        for indices in together:
            sizes = tuple(shapes[index][0] for index in indices)
            shape = (sum(sizes), *shapes[indices[0]][1:])
            place = (shape, contiguous_strides(shape), starts[indices[0]])
            planned.append(Run(shape, place, sizes if len(sizes) > 1 else None))
    return planned


def whole_run(shapes: Sequence[tuple[int, ...]]) -> Run | None:
    """The run of views that are all of a tensor; ``None`` where they differ beyond dim 0.

    Args:
        shapes: of each view, one dim at least.

    Example: (2, 4), (6, 4) and (2, 4) are the parts, of sizes (2, 6, 2), of a tensor of (10, 4).
    """
    inner = shapes[0][1:]
    if any(shape[1:] != inner for shape in shapes):
        return None
    sizes = tuple(shape[0] for shape in shapes)
    return Run((sum(sizes), *inner), None, sizes if len(sizes) > 1 else None)


# ---- the steps


S = TypeVar("S")


class Program(Generic[S]):
    """Steps by where they run; ``host`` steps run when everything else has.

    Attributes:
        inline: all of them, for where all lanes are one; and what is to do behind them there.
        seeking: the program of a job that lacks a gradient which another rank may have.
    """

    __slots__ = ("all_reduce", "compute", "host", "inline", "reduce", "seeking")

    def __init__(
        self,
        compute: Iterable[S],
        reduce: Iterable[S] = (),
        all_reduce: Iterable[S] = (),
        host: Iterable[S] = (),
        behind: Iterable[S] = (),
    ) -> None:
        self.compute = tuple(compute)
        self.reduce = tuple(reduce)
        self.all_reduce = tuple(all_reduce)
        self.host = tuple(host)
        self.inline = self.compute + self.reduce + self.all_reduce + self.host + tuple(behind)
        self.seeking: Program[S] = self
