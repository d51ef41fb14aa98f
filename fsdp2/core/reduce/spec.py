"""Decisions before a reduction is bound: its settings, where to divide, where rows lie.

flat   [ rows of A | rows of B | pad | marks ]      A, B: members of a reduction
Run    └────── split into views ─┘
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions
from fsdp2.core.custom_collectives import ReduceScatter
from fsdp2.core.device.buffers import Strided, row_major
from fsdp2.core.device.collectives import ReduceKind
from fsdp2.core.device.streams import OnStream
from fsdp2.core.layout.layout import COLLECTIVE_ALIGN_BYTES, Slot, Transport
from fsdp2.core.params.param import ShardedParam, compute_dtype
from fsdp2.core.pieces import round_up


@dataclass(frozen=True)
class ReductionSpec:
    """The settings of a reduction's steps.

    Attributes:
        grad_dtype: dtype of autograd's gradients; ``result_dtype`` of the sharded ``.grad``.
        factor: the user's divide factor; collectives only sum if ``sum_only``.
        hook: called with the flat reduced gradient; so is ``average``, over copies of the model.
        comm: the user's reduce-scatter.
        keep: whether gradients' memory is kept for the next step.
        codec: name of the format of encoded gradients; ``between_codec`` for sums between nodes.
        feedback: whether the rounding errors of a message are added to the next one.
        kin: if the codec rounds neighbors together, what its gradients' neighbors have in common
            (`ShardedParam.differs_over`).
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
    codec: str | None = None
    between_codec: str | None = None
    rotate: bool = False
    feedback: bool = False
    average: Callable[[torch.Tensor], bool] | None = None
    kin: Hashable = ()

    @property
    def casts(self) -> bool:
        """Whether gradients are of another dtype than the sums."""
        return self.reduce_dtype != self.result_dtype


def reduction_spec(
    options: GroupOptions,
    param: ShardedParam,
    offload: CPUOffloadPolicy | None,
    device: torch.device,
) -> ReductionSpec:
    grad = compute_dtype(options, param)
    reduce = param.grad_dtype
    if reduce.is_floating_point:  # a complex gradient cast to a real dtype would lose half of it
        reduce = options.precision.reduce_dtype or reduce
    codec, rotate = None if param.exact else options.wire.reduce, options.wire.rotate
    kin: Hashable = ()
    if codec is not None:
        from fsdp2.core.codecs.codec import (
            ALONE,
            check_coded,  # who needs none loads none
        )

        check_coded(param.name, (grad, reduce), codec)
        if rotate or codec not in ALONE:
            # Model-parallel ranks must round equal gradients alike: no neighbor in a message may
            # differ.
            kin = param.differs_over
    between = None if param.exact else options.wire.between_reduce
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
        codec=codec,
        between_codec=between,
        rotate=codec is not None and rotate,
        feedback=codec is not None and options.wire.feedback,
        average=options.average,
        kin=kin,
    )


def is_direct(spec: ReductionSpec, slot: Slot, transport: Transport) -> bool:
    """Whether a gradient is reduced from where it is, one of several in a launch."""
    # Whether it is cast first or not, the collective's pieces are multiples of 16 bytes.
    itemsize = min(spec.reduce_dtype.itemsize, spec.grad_dtype.itemsize)
    built_in = spec.comm is None and spec.codec is None
    gathered_so = built_in and transport is Transport.COALESCED
    return gathered_so and slot.in_order and slot.even and slot.aligned(itemsize)


# ---- where to divide


@dataclass(frozen=True)
class Division:
    """The point at which a reduction divides: before the collectives, inside them, after them."""

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
    alone: bool = False,
    empty: bool = False,
) -> Division:
    """Choose where to divide by the user's ``factor``, or to average over ``size`` and ``copies``.

    fp32 and bf16 have range to spare, and divide inside the collective where the backend can.
    Others (fp16) split the factor about evenly before and after the sum, so that neither the sum
    overflows nor the addends vanish. ``alone``, gradients are divided once, if at all.
    """
    whole = float(size * copies) if factor is None else factor
    if alone or empty:
        return Division(None, _SUM, _SUM, None if empty or whole == 1 else whole)
    if dtype in _AVERAGE:
        if sum_only:
            return Division(None, _SUM, _SUM, whole if whole != 1 else None)
        # Averages of averages: the mean over both axes, because all shard groups are of one size.
        if factor is None:
            return Division(None, ReduceKind(average=True), ReduceKind(average=True), None)
        # As an average, which needs no premultiplied sum.
        if factor == size:
            return Division(None, ReduceKind(average=True), _SUM, None)
        if premultiplies and size > 1:
            return Division(None, ReduceKind(average=False, factor=factor), _SUM, None)
        return Division(None, _SUM, _SUM, factor)
    # A power of two is exact in any floating-point dtype
    before = 2.0 ** math.ceil(math.log2(whole) / 2) if whole > 1 else 1.0
    after = whole / before
    return Division(before if before != 1.0 else None, _SUM, _SUM, after if after != 1.0 else None)


# ---- views in few calls


class Run(NamedTuple):
    """Consecutive views in a flat tensor that differ only in dim 0.

    They have a ``place`` together, ``None``: the tensor itself; ``sizes`` of each in dim 0, unless
    the run is a single view.
    """

    place: Strided | None
    sizes: tuple[int, ...] | None


SHORTEST_RUN = 3
"""A view costs 0.8 µs; one that a split makes 0.3, after 1.3 for the first (torch 2.13, CPU)."""


def runs(shapes: Sequence[tuple[int, ...]], starts: Sequence[int]) -> list[Run]:
    """The fewest calls that make contiguous views of ``shapes`` from ``starts``, in elements.

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
            place = row_major(shape, starts[indices[0]])
            planned.append(Run(place, sizes if len(sizes) > 1 else None))
    return planned


# ---- the flat result


@dataclass(frozen=True)
class FlatPlan:
    """A flat result; lengths and offsets in elements.

    Attributes:
        payload: length of the members' rows, which begin at ``starts``.
        rows_width: length of all rows, filled up to what collectives want; ``width`` with marks.
        marks_start: where marks begin (`PresenceMarks`); ``None``: they are not in it.
        marks_width: numbers that a rank receives: one per member, and padding; 0 with one rank.
        shape: in which it is made.
        runs: of the views of the members' rows.
    """

    payload: int
    starts: list[int]
    rows_width: int
    width: int
    marks_start: int | None
    marks_width: int
    shape: tuple[int, ...]
    runs: list[Run]


def lay_flat(
    slots: Sequence[Slot],
    rank: int,
    dtype: torch.dtype,
    sent: bool,
    needs_flat: bool,
    all_direct: bool,
    carries_marks: bool,
    between: bool = False,
) -> FlatPlan:
    """Lay the result out, shared by several ranks if ``sent``.

    It ``needs_flat`` if it is used in any other form than the members' rows. ``all_direct``: the
    collective writes the rows of each member separately. ``carries_marks``: marks need no separate
    collective. If it is ``between`` nodes, marks are there even if rows are empty.
    """
    starts = [*itertools.accumulate((slot.shard_numel for slot in slots), initial=0)]
    payload = starts.pop()
    multiple = max(COLLECTIVE_ALIGN_BYTES // dtype.itemsize, 1)
    rows_width = width = round_up(payload, multiple) if sent else payload
    marks_start, marks_width = None, 0
    if payload and sent and all_direct and not needs_flat:
        # Apart, as one more tensor of the launch (decision 20), so that rows need no flat tensor.
        marks_width = round_up(len(slots), multiple)
    elif between or (payload and (sent or needs_flat)):
        marks_start = payload if carries_marks else rows_width
        width = round_up(marks_start + len(slots), multiple)
        marks_width = width - marks_start
    shapes = [slot.local_shape(rank) for slot in slots]
    inner = shapes[0][1:]
    if all_direct and not needs_flat and payload == width and all(s[1:] == inner for s in shapes):
        # Made in the shape of the rows together: they are one split of it, no view in between.
        sizes = tuple(shape[0] for shape in shapes)
        shape, planned = (sum(sizes), *inner), [Run(None, sizes if len(sizes) > 1 else None)]
    else:
        shape, planned = (width,), runs(shapes, starts)
    return FlatPlan(payload, starts, rows_width, width, marks_start, marks_width, shape, planned)
