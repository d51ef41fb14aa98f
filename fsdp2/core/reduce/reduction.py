"""From unsharded gradients to sharded ``.grad``: everything that runs in the backward of a steady
unit.

    Reduction.collect       take the gradients that autograd left on the unsharded parameters
    reduce_on_lanes         run its program, each operation on its lane (`binding` has the order)
    PendingReduction        jobs, and events after reduce-scatter and all, until COMPUTE has waited

If all lanes are one, as on a CPU, everything has ended when the launch returns (`reduce_inline`):
nothing is pending. `transport` has what copies gradients before the collective reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from fsdp2.core.device.buffers import TransientBuffer
from fsdp2.core.device.collectives import Collectives, Work
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.device.streams import ALL_REDUCE, COMPUTE, REDUCE, Event, Streams
from fsdp2.core.errors import coded
from fsdp2.core.layout.layout import Slot
from fsdp2.core.params.gradients import Gradients
from fsdp2.core.params.param import ShardedParam
from fsdp2.core.progress import communication_error
from fsdp2.core.reduce.program import (
    COLLECTIVES,
    REDUCE_SCATTER,
    Job,
    KeptGradients,
    Op,
    PartialSums,
    PresenceMarks,
    Program,
    Step,
)
from fsdp2.core.reduce.spec import Division, FlatPlan, ReductionSpec, Run

if TYPE_CHECKING:  # who does not use it does not load it
    from fsdp2.core.reduce.feedback import Feedback

# ---- how gradients travel


@dataclass(eq=False)
class ReduceContext:
    """The facts to which a transport is bound, and what it makes besides its operations.

    Attributes:
        direct: how many of the first members are reduced directly from their gradients, or from
            where they are cast to; the others are packed.
        marks: which ranks had a gradient; ``None`` on a single rank.
        carries_marks: whether marks use the same collective, which may not change them in other
            ways than a sum.
        alone: whether nothing is communicated: gradients are only divided.
        staging: the input of the collective, if gradients are copied to a buffer of fsdp2.
        feedback: rounding errors of messages, if kept.
    """

    slots: Sequence[Slot]
    direct: int
    spec: ReductionSpec
    division: Division
    flat: FlatPlan
    marks: PresenceMarks | None
    carries_marks: bool
    alone: bool
    collectives: Collectives
    kernels: Kernels
    staging: TransientBuffer | None = None
    feedback: Feedback | None = None


def views_of(planned: Sequence[Run], flat: torch.Tensor) -> list[torch.Tensor]:
    """The views of runs in a flat tensor, by two calls per run or fewer."""
    views: list[torch.Tensor] = []
    for place, sizes in planned:
        view = flat if place is None else flat.as_strided(*place)
        if sizes is None:
            views.append(view)
        else:
            views += view.split_with_sizes(sizes)
    return views


def allocation(context: ReduceContext) -> Op:
    """Allocate the output of a collective, on COMPUTE."""
    flat, dtype = context.flat, context.spec.reduce_dtype
    new = context.kernels.bind_empty(flat.shape, dtype, "reduce-scatter output")
    planned = flat.runs

    def allocate(job: Job) -> None:
        job.flat = flat = new()
        job.outputs = views_of(planned, flat)

    return Op(COMPUTE, "allocate", allocate)


def stage_direct(context: ReduceContext) -> Step:
    """Give gradients the dtype and the shapes that the collective takes."""
    spec, dtype = context.spec, context.spec.grad_dtype
    pieces = pieces_of(context)

    def stage(job: Job) -> None:
        for grad in job.grads:
            if grad.dtype is not dtype or not grad.is_contiguous():
                unify(job, spec)
                job.grads = [grad.contiguous() for grad in job.grads]
                break
        if pieces:
            pairs = zip(pieces, job.grads, strict=True)
            job.grads = [grad.view(shape) for shape, grad in pairs]

    return stage


def pieces_of(context: ReduceContext) -> list[tuple[int, ...]]:
    """Shapes of gradients as consecutive parts of one piece, where some backends compare rows."""
    slots, size = context.slots[: context.direct], context.collectives.size
    if not any(slot.dim for slot in slots):
        return []
    return [(size * slot.piece[0], *slot.piece[1:]) for slot in slots]


def unify(job: Job, spec: ReductionSpec) -> torch.dtype:
    """Give all gradients one dtype: autograd's, or the reduction's where any differs."""
    for grad in job.grads:
        if grad.dtype != spec.grad_dtype:
            job.grads = [grad.to(spec.reduce_dtype) for grad in job.grads]
            return spec.reduce_dtype
    return spec.grad_dtype


def scatter_each(context: ReduceContext) -> Step:
    """Bind what reduces and scatters each member's gradient, and marks, in one launch."""
    scatter = context.collectives.bind_reduce_scatter_many(context.division.kind)
    marks = context.marks
    assert marks is not None
    unread = marks.unread

    def reduce(job: Job) -> Work | None:
        sent, found = job.marks or unread or marks.of(job)
        return scatter([*job.outputs, found], [*job.grads, sent])

    return reduce


def operations(
    context: ReduceContext,
    name: str,
    stage: Step,
    reduce: Step,
    unstage: Step | None = None,
    inputs: Sequence[torch.Tensor] = (),
) -> list[Op]:
    """A transport's operations, in their order: stage on COMPUTE, reduce and unstage on REDUCE.

    ``unstage`` puts the output where the rows belong, if it is elsewhere. The collective also reads
    ``inputs``; all that it reads is divided before the sum, if the dtype could overflow.
    """
    before, kernels = context.division.before, context.kernels
    ops = [Op(COMPUTE, f"stage {name}", stage)]
    if before is not None:

        def divide(job: Job) -> None:
            for tensor in (*inputs, *job.grads):
                kernels.divide(tensor, before)

        ops.append(Op(REDUCE, "divide", divide))
    ops.append(Op(REDUCE, REDUCE_SCATTER, reduce))
    if unstage is not None:
        ops.append(Op(REDUCE, "unstage", unstage))
    return ops


# ---- what becomes of the rows


def deliver(
    gradients: Gradients, kernels: Kernels, job: Job, present: list[bool] | None = None
) -> None:
    """Set ``.grad``, or add to it where there is one; then run the users' hooks."""
    if present is None:
        present = job.present
    if job.kept is None:
        waiting = gradients.deliver(job.outputs, present)
    else:
        waiting = gradients.deliver(job.kept.rows, present, job.kept.objects)
    if waiting:
        added, sums, addends = zip(*waiting, strict=True)
        job.sums = (*job.sums, *sums)
        kernels.add_many(sums, addends)
        for member in added:
            member.run_hooks()


def deliver_missed(gradients: Gradients, marks: PresenceMarks, kernels: Kernels, job: Job) -> None:
    """Deliver to members that had no gradient here, but had one on another rank."""
    present = marks.missed(job)
    if True in present:
        deliver(gradients, kernels, job, present)


# ---- a reduction


@dataclass(eq=False)
class Reduction:
    """The bound programs of members with equal options: to ``.grad``, or to partial sums."""

    gradients: Gradients
    context: ReduceContext
    partial_sums: PartialSums
    kept: KeptGradients | None
    full: Program
    partial: Program
    members: Sequence[ShardedParam] = field(init=False)

    def __post_init__(self) -> None:
        self.members = self.gradients.params

    @property
    def has_work(self) -> bool:
        return self.partial_sums.flat is not None or self.gradients.waiting()

    def collect(
        self, take_missing: bool, all_reduce: bool = True, summed: bool = False
    ) -> Job | None:
        """Take the members' gradients; ``None`` if there is nothing to reduce.

        With ``take_missing``, absent ones are zeros, and delivered; with ``all_reduce``, partial
        sums suffice; ``summed`` ones include those of earlier backwards.
        """
        grads = self.gradients.take(summed)
        missing = 0
        for grad in grads:  # without a call for each, in every backward
            if grad is None:
                missing += 1
        if not missing:
            return Job(cast(list[torch.Tensor], grads), [True] * len(grads))
        waits = self.partial_sums.flat is not None
        # Without gradients, it takes part only for other reductions of its group (`with_zeros`),
        # and for sums, which are due on all ranks (I9).
        if missing == len(grads) and not take_missing and not (waits and all_reduce):
            return None
        # Zeros are for members that are trained; those with sums of earlier backwards are
        # delivered, whatever this one brings.
        waiting = [take_missing and member.requires_grad for member in self.members]
        if waits:
            both = zip(waiting, self.partial_sums.present, strict=True)
            waiting = [wanted or before for wanted, before in both]
        present = [wanted or grad is not None for wanted, grad in zip(waiting, grads, strict=True)]
        return self._incomplete(grads, present)

    def absent(self) -> Job:
        """Zeros for all members, which get a gradient only if another rank has one."""
        none = [None] * len(self.members)
        return self._incomplete(none, [False] * len(none))

    def _incomplete(self, grads: Sequence[torch.Tensor | None], present: list[bool]) -> Job:
        zeros, dtype = self.context.kernels.zeros, self.context.spec.grad_dtype
        full = [
            zeros(member.shape, dtype, "absent gradient") if grad is None else grad
            for member, grad in zip(self.members, grads, strict=True)
        ]
        job = Job(full, present)
        # If all are delivered in any case, this rank need not look at marks.
        job.seeks = False in present
        return job

    def discard(self) -> None:
        self.partial_sums.flat = None

    def release(self) -> None:
        """Free the input of the collective, once COMPUTE has waited for it."""
        staging = self.context.staging
        if staging is not None and staging.allocated:
            staging.release()

    def abandon(self) -> None:
        """Let go of everything that an exception left half way."""
        self.release()
        if self.kept is not None:
            self.kept.abandon()


Jobs = list[tuple[Reduction, Job]]
"""The reductions of a group that have gradients to reduce, and these."""


def with_zeros(jobs: list[tuple[Reduction, Job | None]]) -> Jobs:
    """A group's jobs, with zeros for missing ones: ranks run equal collectives (decision 3)."""
    if all(job is None for _, job in jobs):
        return []
    return [(reduction, job or reduction.absent()) for reduction, job in jobs]


# ---- launched


@dataclass(slots=True)
class PendingReduction:
    """A running reduction of ``params``: its jobs live until COMPUTE has waited for it (invariant
    I7).

    ``scattered`` is the event after the reduce-scatter, when its input may be freed, ``done`` that
    after everything, maybe the same; then the steps of ``host`` deliver the data copied to it.
    """

    params: Sequence[ShardedParam]
    jobs: Jobs
    scattered: Event
    done: Event
    host: list[tuple[Step, Job]]

    def release_inputs(self) -> None:
        """Free the inputs of the reduce-scatters, once COMPUTE has waited for ``scattered``."""
        for reduction, job in self.jobs:
            reduction.release()
            job.grads = []
            job.marks = None

    def release_rest(self) -> None:
        """Free everything else that is not delivered, once COMPUTE has waited for ``done``."""
        for reduction, job in self.jobs:
            job.flat = job.scattered = None  # type: ignore[assignment]  # all operations have run
            job.result = job.partial = job.found = None
            if reduction.kept is not None and all(job is not other for _, other in self.host):
                reduction.kept.give_back(job)  # else once the host has delivered it
        self.jobs = []

    def deliver(self) -> None:
        """Deliver the data copied to the host, once the host has waited for ``done``."""
        with torch.no_grad():
            for step, job in self.host:
                step(job)


def reduce_on_lanes(
    streams: Streams, name: str, params: Sequence[ShardedParam], jobs: Jobs, all_reduce: bool
) -> PendingReduction | None:
    """Run the jobs' programs, each step on its lane; ``None`` if nothing is running: one rank."""
    work: list[tuple[Program, Reduction, Job]] = []
    reduces = all_reduces = False
    for reduction, job in jobs:
        program = reduction.full if all_reduce else reduction.partial
        if job.seeks:
            program = program.seeking or program
        work.append((program, reduction, job))
        reduces = reduces or bool(program.reduce)
        all_reduces = all_reduces or bool(program.all_reduce)
        _run(program, program.compute, reduction, job, name)
    if not (reduces or all_reduces):
        return None
    # All jobs of a lane run before the next lane's: one event and one wait for all of them
    event = streams.record(COMPUTE, "gradients staged")
    streams.wait(REDUCE, event, "reduction after compute")
    with streams.on(REDUCE):
        for program, reduction, job in work:
            _run(program, program.reduce, reduction, job, name)
    # An event of its own: inputs are freed without a wait for the all-reduce (decision 6, I7).
    scattered = done = streams.record(REDUCE, "reduction done")
    if all_reduces:
        streams.wait(ALL_REDUCE, scattered, "all-reduce after reduce-scatter")
        with streams.on(ALL_REDUCE):
            for program, reduction, job in work:
                _run(program, program.all_reduce, reduction, job, name)
        done = streams.record(ALL_REDUCE, "all-reduce done")
    # Run by `InFlight.deliver`, once the host has waited.
    host = [(step, job) for program, _, job in work for step in program.host]
    return PendingReduction(params, jobs, scattered, done, host)


def reduce_inline(
    streams: Streams, name: str, params: Sequence[ShardedParam], jobs: Jobs, all_reduce: bool
) -> None:
    """As `reduce_on_lanes` where all lanes are one, as on a CPU: on return, all is delivered."""
    for reduction, job in jobs:
        program = reduction.full if all_reduce else reduction.partial
        if job.seeks:
            program = program.seeking or program
        _run(program, program.inline, reduction, job, name)


def _run(
    program: Program, steps: Sequence[Step], reduction: Reduction, job: Job, name: str
) -> None:
    """Run a lane's operations; an exception names the group, or a sparse gradient."""
    running: Step | None = None
    try:
        for running in steps:
            work = running(job)
            if work is not None:
                # Only if all lanes are one: otherwise the lane itself waits, and nothing is
                # returned.
                work.wait()
    except RuntimeError as error:
        _refuse_sparse(reduction, job, error)
        # Found here, so that a launch that succeeds need not keep count of where it is
        operation = program.name_of(running)
        if operation not in COLLECTIVES or isinstance(error, torch.OutOfMemoryError):
            raise
        raise communication_error(operation, name, error) from error


def _refuse_sparse(reduction: Reduction, job: Job, error: RuntimeError) -> None:
    """Looked for where staging has raised: before, it would be a look at each gradient."""
    for member, grad in zip(reduction.members, job.grads, strict=False):  # none once staged
        if isinstance(grad, torch.Tensor) and grad.layout != torch.strided:
            raise coded(
                ValueError,
                "sparse-gradient",
                f"the gradient of parameter '{member.name}' is sparse, but fsdp2 reduces only "
                f"dense gradients; create its module with sparse=False, or pass it in "
                f"ignored_params",
            ) from error
