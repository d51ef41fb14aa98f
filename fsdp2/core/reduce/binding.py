"""A reduction bound: its transport chosen, its operations made and written down in programs.

    members of a group that have equal specs ──> bind_reduction
    bind_reduction     dtypes and division ──> layout of the flat result ──> transport
    _reduction         all operations in their order, up to the sums
    _ending            from the sums to ``.grad``:

    flat   [ rows of A | rows of B | marks ]    reduce dtype
             ── hook ── divide ── average ──> the same
    result [ rows of A | rows of B | marks ]    the gradient's dtype, where that is another one
             ── to host ──> the same in CPU memory, where gradients are offloaded

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
from fsdp2.core.reduce.reduction import (
    BEHIND,
    HOST,
    REDUCE_SCATTER,
    SUM_OF_REPLICAS,
    Job,
    KeptGradients,
    Op,
    PartialSums,
    PresenceMarks,
    Program,
    ReduceContext,
    Reduction,
    Step,
    allocation,
    deliver,
    deliver_missed,
    views_of,
)
from fsdp2.core.reduce.spec import ReductionSpec, lay_flat, plan_division
from fsdp2.core.reduce.transport import (
    context_between,
    cross_nodes,
    free_input,
    reduce_adopted,
    reduce_coded,
    reduce_custom,
    reduce_empty,
    reduce_local,
    reduce_scattered,
)

T = TypeVar("T")

Transport = Callable[[ReduceContext], list[Op]]
"""Makes what a collective reads, and returns the operations up to the rows, where they belong."""


def bind_reduction(
    gradients: Gradients,
    slots: Sequence[Slot],
    direct: int,
    spec: ReductionSpec,
    collectives: Collectives,
    replicas: Collectives | None,
    kernels: Kernels,
    layout: GroupLayout | None = None,
    between: Collectives | None = None,
) -> Reduction:
    """The reduction of members that are reduced alike.

    The first ``direct`` members are reduced from where their gradients are, or from where they are
    cast to; the others are packed. ``layout`` is that of the group, if all members are of one, with
    pieces if masters are sharded over two levels; ``between``, the ranks that share rows.
    """
    collectives = collectives_of(spec.reduce_dtype, collectives)
    rank, size = collectives.rank, collectives.size
    empty = not any(slot.shard_numel for slot in slots)
    if between is not None:
        assert layout is not None
        assert layout.pieces is not None
        pieces = {slot.index: slot for slot in layout.pieces.slots}
        kept = [pieces[slot.index] for slot in slots]
        if empty:  # nothing crosses nodes: so are pieces, whose shapes `.grad` has
            slots, rank, between = kept, between.rank, None
    if replicas is not None:
        alike = replicas.size == 1 or empty
        replicas = None if alike else collectives_of(spec.reduce_dtype, replicas)
    whole = (replicas, spec.hook, spec.average, between)  # they take the result as one tensor
    needs_flat = any(part is not None for part in whole)
    alone = size == 1 and not needs_flat and not spec.to_host
    if alone:  # nothing travels: a gradient of the result's dtype becomes ``.grad`` as it is
        gradients.keep_apart()  # autograd's, of memory of their own
        spec = replace(spec, reduce_dtype=spec.result_dtype, keep=False)
    if spec.codec is not None or spec.between_codec is not None:  # each rank sums by itself
        spec = replace(spec, sum_only=True)
    transport, carries_marks = transport_of(spec, slots, size, alone)
    rows = (rank, spec.reduce_dtype, size > 1, needs_flat, direct == len(slots), carries_marks)
    flat = _once(
        layout,
        ("flat result", tuple(slot.index for slot in slots), rows),
        lambda: lay_flat(slots, *rows),
    )
    copies = 1 if replicas is None else replicas.size
    if between is not None:
        copies = between.size
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
    crossing = None
    if between is not None:
        crossing = context_between(between, kept, spec, division.replicas, kernels)
    return _reduction(gradients, context, transport, replicas, crossing)


def _once(layout: GroupLayout | None, key: Hashable, make: Callable[[], T]) -> T:
    """Share a fact with equal groups; a reduction by itself shares nothing."""
    return make() if layout is None else layout.once(key, make)


def hand_over(former: Sequence[Reduction], made: Sequence[Reduction]) -> None:
    """Give residuals of error feedback to the reductions that replace ``former`` ones."""
    fed = [(r.members, feedback) for r in former if (feedback := r.context.feedback) is not None]
    if fed:
        for reduction in made:
            if reduction.context.feedback is not None:
                reduction.context.feedback.take_over(reduction.members, fed)


# ---- the order of operations


def _reduction(
    gradients: Gradients,
    context: ReduceContext,
    transport: Transport,
    replicas: Collectives | None,
    crossing: ReduceContext | None,
) -> Reduction:
    """Make the operations around a transport's, and write all down in programs; sums are
    all-reduced over ``replicas``, or scattered between nodes in another context, if given.
    """
    spec, kernels, marks = context.spec, context.kernels, context.marks
    kind = context.division.replicas
    averages = spec.average is not None and marks is not None
    shared = replicas is not None or crossing is not None or averages
    lane = COMPUTE if context.alone else REDUCE
    if shared or spec.hook is not None:
        lane = ALL_REDUCE
    last = crossing or context  # of the collective that leaves the sums
    kept, hold, final = _ending(gradients, context, last, lane)

    staged = transport(context)
    if marks is not None:
        # Before gradients are staged, because packing puts the job's marks into the rows.
        staged.insert(0, Op(COMPUTE, "mark", marks.mark, seeks=True))
        if not context.carries_marks:
            scatter = context.collectives.bind_reduce_scatter(context.division.kind)
            sum_marks = functools.partial(marks.reduce, scatter)
            staged.append(Op(REDUCE, REDUCE_SCATTER, sum_marks))
    if context.staging is not None:  # where lanes are several, `PendingReduction` frees it
        staged.append(Op(BEHIND, "release", functools.partial(free_input, context.staging)))
    sums = PartialSums(kernels)
    copies: list[Op] = []  # what several reductions may share
    if shared:
        copies.append(Op(ALL_REDUCE, "add", sums.add))
    if replicas is not None:
        axis = replicas
        copies.append(Op(ALL_REDUCE, SUM_OF_REPLICAS, lambda job: axis.all_reduce(job.flat, kind)))
    if crossing is not None:
        assert marks is not None
        copies += cross_nodes(last, marks, hold.run)

    # Adopted gradients are the output, for which nothing is allocated; between nodes, kept memory
    # is for pieces
    new = allocation(context)
    begin = [] if transport is reduce_adopted else [hold if crossing is None else new]
    full = Program([*begin, *staged, *copies, *final])
    partial = full
    if shared:  # partial sums are never in memory that is kept
        partial = Program([new, *staged, Op(REDUCE, "keep", sums.keep)])
    return Reduction(gradients, context, sums, kept, full, partial)


def _ending(
    gradients: Gradients, context: ReduceContext, last: ReduceContext, lane: int
) -> tuple[KeptGradients | None, Op, list[Op]]:
    """The operations after the sums, on ``lane``; the host delivers what is copied to it.

    ``last`` is the context of the last collective. Returns the memory that is kept, the operation
    that gives sums their memory, and the operations.
    """
    spec, kernels, marks, alone = context.spec, context.kernels, context.marks, context.alone
    shape, dtype, after = last.flat.shape, spec.result_dtype, context.division.after
    views = functools.partial(views_of, last.flat.runs)
    hook, mean, marks_of_sums = spec.hook, spec.average, last.marks
    ops: list[Op] = []

    def add(name: str, run: Step, lane: int = lane, seeks: bool = False) -> None:
        ops.append(Op(lane, name, run, seeks))

    # Memory: kept, if it is free, or new
    kept, hold = None, allocation(last)
    if spec.keep:
        make = kernels.bind_empty(shape, dtype, "kept gradient")
        if spec.to_host:
            make = functools.partial(kernels.host_empty, shape, dtype, spec.pin)
        kept = KeptGradients(gradients, make, views)
    # Offloaded gradients are kept in CPU memory; sums on the device come and go.
    on_device = None if spec.to_host else kept
    new_sums = hold.run

    def hold_flat(job: Job) -> None:
        if on_device is None or not on_device.hold(job):
            new_sums(job)
        else:
            job.flat, job.outputs = on_device.flat, on_device.rows

    def call_hook(job: Job) -> None:  # whose result is nobody's
        assert hook is not None
        hook(job.flat)

    def divide(job: Job) -> None:
        assert after is not None
        for sums in job.outputs if alone else (job.flat,):  # alone, rows lie in no flat tensor
            kernels.divide(sums, after)

    def average(job: Job) -> None:
        """Average in place over copies of the model that the mesh lacks (decision 31), marks too.

        A copy whose own gradient does not count gets exactly those that the others have: where it
        had one and they had none, the average is zero, and an optimizer would step only here.
        """
        assert mean is not None
        assert marks_of_sums is not None
        if not mean(job.flat):
            job.present = marks_of_sums.present(job)

    def cast(job: Job) -> None:
        assert job.result is not None
        kernels.copy(job.result, job.flat)
        job.outputs = views(job.result) if job.kept is None else job.kept.rows

    def to_host(job: Job) -> None:  # which delivers what arrives
        if kept is not None and kept.hold(job):
            kernels.to_host(kept.flat, job.to_deliver())
            return
        source = job.to_deliver()
        target = kernels.host_empty(shape, source.dtype, spec.pin)
        kernels.to_host(target, source)
        job.outputs = views(target)

    if spec.casts:
        new_result = kernels.bind_empty(shape, dtype, "sharded gradient")

        def hold_result(job: Job) -> None:
            if on_device is not None and on_device.hold(job):
                job.result = on_device.flat
            else:
                job.result = new_result()

        add("allocate result" if on_device is None else "hold result", hold_result, COMPUTE)
    elif on_device is not None:
        hold = Op(COMPUTE, "hold flat", hold_flat)
    if hook is not None:
        if marks is not None:  # before a hook that may lose marks
            add("fetch", marks.fetch, seeks=True)
        add("hook", call_hook)
    if after is not None:
        add("divide", divide)
    if mean is not None and marks_of_sums is not None:  # divided sums cannot overflow
        add("average", average)
    if spec.casts:
        add("cast", cast)
    if spec.to_host:
        add("to host" if kept is None else "hold on host", to_host)
    give = functools.partial(deliver, gradients, kernels)
    add("deliver", give, HOST if spec.to_host else lane)
    if marks is not None:
        add("fetch", marks.fetch, seeks=True)
        missed = functools.partial(deliver_missed, gradients, marks, kernels)
        add("deliver missed", missed, HOST, seeks=True)
    if kept is not None:  # where lanes are several, `PendingReduction` does it before the host
        add("give back", kept.give_back, HOST, seeks=not spec.to_host)
        add("give back", kept.give_back, BEHIND)
    return kept, hold, ops


# ---- which transport


def transport_of(
    spec: ReductionSpec, slots: Sequence[Slot], size: int, alone: bool
) -> tuple[Transport, bool]:
    """The transport of a reduction's gradients, and whether it carries marks."""
    if alone and spec.grad_dtype == spec.result_dtype:
        return reduce_adopted, True
    if size == 1:
        return reduce_local, True
    if not any(slot.shard_numel for slot in slots):
        return reduce_empty, True
    if spec.codec is not None:
        return reduce_coded, False
    if spec.comm is not None:  # fsdp2's collectives sum, as usual, in memory of their own
        return reduce_custom, isinstance(spec.comm, OwnComm)
    return reduce_scattered, True
