"""A reduction bound: its transport chosen, its operations made and written down in programs.

    members of a group that have equal specs ──> bind_reduction
    bind_reduction     dtypes and division ──> layout of the flat result ──> transport
    _reduction         all operations in their order

The order of operations is decided here and nowhere else (decision 6).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

from fsdp2.core.device.collectives import Collectives, collectives_of
from fsdp2.core.device.comm_memory import OwnComm
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.device.streams import ALL_REDUCE, COMPUTE, REDUCE
from fsdp2.core.layout.layout import GroupLayout, Slot
from fsdp2.core.params.gradients import Gradients
from fsdp2.core.reduce.levels import Pieces, context_between, cross_nodes
from fsdp2.core.reduce.presence_marks import PresenceMarks
from fsdp2.core.reduce.program import (
    BEHIND,
    REDUCE_SCATTER,
    SUM_OF_REPLICAS,
    Op,
    PartialSums,
    Program,
)
from fsdp2.core.reduce.reduction import ReduceContext, Reduction, Way, allocation, reduce_direct
from fsdp2.core.reduce.result import ending
from fsdp2.core.reduce.rows import plan_flat
from fsdp2.core.reduce.spec import ReductionSpec, plan_division
from fsdp2.core.reduce.transport import (
    free_input,
    reduce_adopted,
    reduce_custom,
    reduce_empty,
    reduce_joined,
    reduce_local,
    reduce_packed,
)

T = TypeVar("T")


def bind_reduction(
    gradients: Gradients,
    slots: Sequence[Slot],
    direct: int,
    spec: ReductionSpec,
    collectives: Collectives,
    replicas: Collectives | None,
    kernels: Kernels,
    layout: GroupLayout | None = None,
    pieces: Pieces | None = None,
) -> Reduction:
    """The reduction of members that are reduced alike.

    The first ``direct`` members are reduced from where their gradients are, or from where they are
    cast to; the others are packed. ``layout`` is that of the group, if all members are of one;
    ``pieces``, what of the rows this rank keeps, with masters sharded over two levels.
    """
    collectives = collectives_of(spec.reduce_dtype, collectives)
    rank, size = collectives.rank, collectives.size
    empty = not any(slot.shard_numel for slot in slots)
    if pieces is not None and empty:
        # Nothing crosses nodes: rows are empty, and so are pieces, whose shapes `.grad` has.
        slots, rank, pieces = pieces.of(slots), pieces.collectives.rank, None
    if replicas is not None:
        alike = replicas.size == 1 or empty
        replicas = None if alike else collectives_of(spec.reduce_dtype, replicas)
    whole = (replicas, spec.hook, spec.average, pieces)  # they take the result as one tensor
    needs_flat = any(part is not None for part in whole)
    alone = size == 1 and not needs_flat and not spec.to_host
    if alone:  # nothing travels: a gradient of the result's dtype becomes ``.grad`` as it is
        gradients.keep_apart()  # autograd's, of memory of their own
        spec = replace(spec, reduce_dtype=spec.result_dtype, keep=False)
    if spec.codec is not None or spec.between_codec is not None:  # each rank sums by itself
        spec = replace(spec, sum_only=True)
    transport, carries_marks = transport_of(spec, slots, direct, size, alone)
    rows = (rank, spec.reduce_dtype, size > 1, needs_flat, direct == len(slots), carries_marks)
    flat = _once(
        layout,
        ("flat result", tuple(slot.index for slot in slots), rows),
        lambda: plan_flat(slots, *rows),
    )
    copies = 1 if replicas is None else replicas.size
    if pieces is not None:
        copies = pieces.collectives.size
    where = (spec.reduce_dtype, size, spec.factor, collectives.premultiplies, copies)
    facts = (*where, spec.sum_only, alone, not flat.payload)
    division = _once(layout, ("division", facts), lambda: plan_division(*facts))
    marks = None
    if flat.marks_width:
        staged = spec.reduce_dtype if flat.marks_start is None else spec.grad_dtype
        dtypes, small = (spec.reduce_dtype, staged), spec.hook is not None
        marks = PresenceMarks(size, flat, dtypes, small, kernels)
    context = ReduceContext(
        slots, direct, spec, division, flat, marks, carries_marks, alone, collectives, kernels
    )
    return _reduction(gradients, context, transport(context), replicas, pieces)


def _once(layout: GroupLayout | None, key: Hashable, make: Callable[[], T]) -> T:
    """Share a fact with equal groups; a reduction by itself shares nothing."""
    return make() if layout is None else layout.once(key, make)


def hand_over(former: Sequence[Reduction], made: Sequence[Reduction]) -> None:
    """Give residuals of error feedback to the reductions that replace ``former`` ones."""
    fed = [(r.members, feedback) for r in former if (feedback := r.way.feedback) is not None]
    if fed:
        for reduction in made:
            if reduction.way.feedback is not None:
                reduction.way.feedback.take_over(reduction.members, fed)


# ---- the order of operations


def _reduction(
    gradients: Gradients,
    context: ReduceContext,
    way: Way,
    replicas: Collectives | None,
    pieces: Pieces | None,
) -> Reduction:
    """Make the operations around a transport's, and write all down in programs; sums are
    all-reduced over ``replicas``, or scattered between nodes as ``pieces`` say, if given.
    """
    spec, kernels, marks = context.spec, context.kernels, context.marks
    kind = context.division.replicas
    averages = spec.average is not None and marks is not None
    shared = replicas is not None or pieces is not None or averages
    lane = COMPUTE if context.alone else REDUCE
    if shared or spec.hook is not None:
        lane = ALL_REDUCE
    last = context  # of the collective that leaves the sums
    if pieces is not None:
        last = context_between(pieces, context.slots, spec, kind, kernels)
    kept, hold, final = ending(gradients, context, last, lane)

    staged = [*way.ops]
    if marks is not None:
        # Before gradients are staged, because packing puts the job's marks into the rows.
        staged.insert(0, Op(COMPUTE, "mark", marks.mark, seeks=True))
        if not context.carries_marks:
            scatter = context.collectives.bind_reduce_scatter(context.division.kind)
            sum_marks = functools.partial(marks.reduce, scatter)
            staged.append(Op(REDUCE, REDUCE_SCATTER, sum_marks))
    if way.staging is not None:  # where lanes are several, `PendingReduction` frees it
        staged.append(Op(BEHIND, "release", functools.partial(free_input, way.staging)))
    sums = PartialSums(kernels)
    copies: list[Op] = []  # what several reductions may share
    if shared:
        copies.append(Op(ALL_REDUCE, "add", sums.add))
    if replicas is not None:
        axis = replicas
        copies.append(Op(ALL_REDUCE, SUM_OF_REPLICAS, lambda job: axis.all_reduce(job.flat, kind)))
    if pieces is not None:
        assert marks is not None
        copies += cross_nodes(last, marks, hold.run)

    # A transport that adopts allocates nothing; between nodes, kept memory is for pieces
    new = allocation(context)
    begin = [hold if pieces is None else new]
    full = Program([*([] if way.adopts else begin), *staged, *copies, *final])
    partial = full
    if shared:  # partial sums are never in memory that is kept
        partial = Program([new, *staged, Op(REDUCE, "keep", sums.keep)])
    return Reduction(gradients, context, way, sums, kept, full, partial)


# ---- which transport


def transport_of(
    spec: ReductionSpec, slots: Sequence[Slot], direct: int, size: int, alone: bool
) -> tuple[Callable[[ReduceContext], Way], bool]:
    """The transport of a reduction's gradients, and whether it carries marks."""
    if alone and spec.grad_dtype == spec.result_dtype:
        return reduce_adopted, True
    if size == 1:
        return reduce_local, True
    if not any(slot.shard_numel for slot in slots):
        return reduce_empty, True
    if spec.codec is not None:
        from fsdp2.core.reduce.coded import reduce_coded  # who does not use it does not load it

        return reduce_coded, False
    if spec.comm is not None:  # fsdp2's collectives sum, as usual, in memory of their own
        return reduce_custom, isinstance(spec.comm, OwnComm)
    if not direct:
        return reduce_packed, True
    in_place = direct == len(slots) and spec.grad_dtype == spec.reduce_dtype
    return (reduce_direct if in_place else reduce_joined), True
