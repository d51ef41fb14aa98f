"""From unsharded gradients to sharded ``.grad``: everything that runs in the backward of a steady
unit.

    Reduction.collect   take the gradients that autograd left on the unsharded parameters   COMPUTE
    reduce_inline, reduce_on_lanes      run the program, each step on its lane:
      allocate     the output of the collective                                      COMPUTE
      stage        put gradients where the collective reads them                     COMPUTE
      divide       before the sum, for dtypes that could overflow                    REDUCE
      reduce       reduce-scatter over the shard axis                                REDUCE
      unstage      put its output where the rows belong                              REDUCE
      keep         instead of all later steps: add to the partial sums               REDUCE
      all-reduce   over the replicate axis, including partial sums; or between nodes
                   a reduce-scatter (`levels`)                                       ALL_REDUCE
      hook         the user's                                                        ALL_REDUCE
      divide       after the sum                                                     (last lane)
      cast         to the gradient's dtype                                           (last lane)
      to host      copy to CPU memory                                                (last lane)
      deliver      become, or add to, the sharded parameter's ``.grad``              (last lane)
      found        deliver gradients that only other ranks had                       the host
    PendingReduction    jobs, and events after reduce-scatter and all, until COMPUTE has waited

The last lane is ALL_REDUCE if anything runs there, otherwise REDUCE; the host delivers what was
copied to it, once the copy has arrived. A step that a configuration does not need is not in the
program, which `binding` builds. If all lanes are one, as on a CPU, everything has ended when the
launch returns: nothing is pending.

`ReduceTransport` defines how gradients are reduced. The base class reduces them directly from
autograd's tensors, without a copy. `transport` has those that copy them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch

from fsdp2.core.device.buffers import TransientBuffer
from fsdp2.core.device.collectives import Collectives
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.device.streams import ALL_REDUCE, COMPUTE, REDUCE, Event, Streams
from fsdp2.core.errors import coded
from fsdp2.core.layout.layout import Slot
from fsdp2.core.params.gradients import Gradients, Sum
from fsdp2.core.params.param import ShardedParam
from fsdp2.core.progress import communication_error
from fsdp2.core.reduce.division import Division
from fsdp2.core.reduce.kept_gradients import KeptGradients
from fsdp2.core.reduce.partial_sums import PartialSums
from fsdp2.core.reduce.presence_marks import PresenceMarks
from fsdp2.core.reduce.program import Job, Program, Scatter, Step
from fsdp2.core.reduce.rows import FlatPlan
from fsdp2.core.reduce.spec import ReductionSpec

if TYPE_CHECKING:  # who does not use it does not load it
    from fsdp2.core.reduce.feedback import Feedback

# ---- how gradients travel


@dataclass(frozen=True)
class ReduceContext:
    """The context to which a transport is bound.

    Attributes:
        slots: the members' positions in the group's layout.
        direct: how many of the first are reduced directly from their gradients, or from where they
            are cast to; the others are packed.
        spec: the settings of the steps.
        division: where it divides, and how the collective reduces.
        flat: the output.
        marks: which ranks had a gradient; ``None`` on a single rank.
        collectives: of the shard axis.
        kernels: memory and copies.
    """

    slots: Sequence[Slot]
    direct: int
    spec: ReductionSpec
    division: Division
    flat: FlatPlan
    marks: PresenceMarks | None
    collectives: Collectives
    kernels: Kernels


class ReduceTransport:
    """The interface of a transport, which reduce-scatters gradients for a reduction.

    The methods are the steps ``allocate``, ``stage``, ``divide``, ``reduce`` and ``unstage``, each
    with the job, and ``release``. In this base class, the collective reads gradients directly, and
    writes each member's rows, in one launch.

    Args:
        context: the context to which it is bound.

    Attributes:
        carries_marks: whether marks use the same collective. If that may change them in other ways
            than a sum, they get a separate one.
        stages: whether ``stage`` does anything.
        communicates: whether there is a collective.
        unstages: whether ``unstage`` does anything.
        frees: whether ``release`` does anything.
        staging: the input of the collective, if gradients are copied there.
        feedback: the rounding errors of messages, if they are kept.
        scatter: the bound collective.
        shape: of the flat result.
    """

    carries_marks = True
    stages = True
    communicates = True
    unstages = False
    frees = False
    staging: TransientBuffer | None = None
    feedback: Feedback | None = None
    scatter: Scatter

    def __init__(self, context: ReduceContext) -> None:
        flat, spec = context.flat, context.spec
        self.slots = context.slots
        self.collectives = context.collectives
        self.kernels = context.kernels
        self.marks = context.marks
        self.grad_dtype, self.reduce_dtype = spec.grad_dtype, spec.reduce_dtype
        self.before = context.division.before
        self.shape = flat.shape
        self._runs = flat.runs
        self._pieces: Sequence[tuple[int, ...]] = ()  # shapes that the collective takes instead
        self._unread = None if self.marks is None else self.marks.unread
        name = "reduce-scatter output"
        self._new_flat = self.kernels.bind_empty(flat.shape, spec.reduce_dtype, name)
        self._bind(context)

    def _bind(self, context: ReduceContext) -> None:
        """Make the buffers and views that every reduction uses, and bind the collective."""

    @classmethod
    def row_bytes(cls, numel: int, itemsize: int, rotate: bool = False) -> int:
        """Bytes that one rank gives to another for the sums of ``numel`` elements."""
        return numel * itemsize

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """This rank's rows of each member, in a flat tensor of them.

        Two calls for a run, one for a single view; one less where it is all of ``flat``.
        """
        views: list[torch.Tensor] = []
        for _, place, sizes in self._runs:
            view = flat if place is None else flat.as_strided(*place)
            if sizes is None:
                views.append(view)
            else:
                views += view.split_with_sizes(sizes)
        return views

    def allocate(self, job: Job) -> None:
        """Allocate the collective's output, on COMPUTE."""
        job.flat = flat = self._new_flat()
        job.outputs = self.views(flat)

    def stage(self, job: Job) -> None:
        """Prepare the collective's input, on COMPUTE."""
        dtype = self.grad_dtype
        for grad in job.grads:
            if grad.dtype is not dtype or not grad.is_contiguous():
                self.unify(job)
                job.grads = [grad.contiguous() for grad in job.grads]
                break
        if self._pieces:
            self._as_pieces(job)

    def divide(self, job: Job) -> None:
        """Divide the collective's input, on REDUCE."""
        assert self.before is not None
        for grad in job.grads:
            self.kernels.divide(grad, self.before)

    def reduce(self, job: Job) -> None:
        """Reduce and scatter, on REDUCE."""
        sent, found = job.marks or self._unread or self._marks_of(job)
        work = self.scatter([*job.outputs, found], [*job.grads, sent])
        if work is not None:
            work.wait()

    def unstage(self, job: Job) -> None:
        """Copy the collective's output to the rows, on REDUCE."""

    def release(self) -> None:
        """Free the input of the collective, once COMPUTE has waited for it."""
        if self.staging is not None and self.staging.allocated:
            self.staging.release()

    def release_behind(self, job: Job) -> None:
        """The same as a step; COMPUTE runs after the collective once its call has returned."""
        self.release()

    def unify(self, job: Job) -> torch.dtype:
        """Give all gradients one dtype: autograd's, or the reduction's where any differs."""
        for grad in job.grads:
            if grad.dtype != self.grad_dtype:
                job.grads = [grad.to(self.reduce_dtype) for grad in job.grads]
                return self.reduce_dtype
        return self.grad_dtype

    def _as_pieces(self, job: Job) -> None:
        """Gradients as consecutive parts of one piece."""
        pairs = zip(self._pieces, job.grads, strict=True)
        job.grads = [grad.view(shape) for shape, grad in pairs]

    def _marks_of(self, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.marks is not None
        return self.marks.of(job)


# ---- what becomes of the rows


class Delivery:
    """The way from reduced rows to ``.grad``.

    Args:
        gradients: of the members.
        marks: which ranks had a gradient; ``None`` with one rank.
        kernels: memory and copies.
    """

    __slots__ = ("_gradients", "_marks", "kernels")

    def __init__(self, gradients: Gradients, marks: PresenceMarks | None, kernels: Kernels) -> None:
        self._gradients, self._marks = gradients, marks
        self.kernels = kernels

    def deliver(self, job: Job) -> None:
        """Set ``.grad``, or add to it where there is one; then run the users' hooks."""
        kept = job.kept
        if kept is not None:
            self._gradients.place(kept.objects, job.present)
            return
        waiting = self._gradients.deliver(job.outputs, job.present)
        if waiting:
            self._add(job, waiting)

    def deliver_missed(self, job: Job) -> None:
        """Deliver to members that had no gradient here, but had one on another rank."""
        assert self._marks is not None
        present = self._marks.missed(job)
        if True not in present:
            return
        kept = job.kept
        if kept is None:
            waiting = self._gradients.deliver(job.outputs, present)
        else:
            waiting = self._gradients.deliver(kept.rows, present, kept.objects)
        if waiting:
            self._add(job, waiting)

    def _add(self, job: Job, waiting: Sequence[Sum]) -> None:
        """Add rows to gradients that are there; then run the users' hooks."""
        added, sums, addends = zip(*waiting, strict=True)
        job.sums = (*job.sums, *sums)
        self.kernels.add_many(sums, addends)
        for member in added:
            member.run_hooks()


# ---- a reduction


class Reduction:
    """The bound programs of the members of a group that are reduced with the same options.

    Args:
        gradients: the gradients of the members.
        transport: how they are sent.
        partial_sums: the results of reductions without all-reduce.
        kept: the memory of gradients, if it is kept.
        full: the program that ends in ``.grad``.
        partial: the program that ends in partial sums, without all-reduce; ``full`` if there are no
            replicas.

    Attributes:
        members: the parameters.
        grad_dtype: dtype of autograd's gradients.
        reduce_dtype: dtype of the collectives.
    """

    __slots__ = (
        "__weakref__",
        "full",
        "grad_dtype",
        "gradients",
        "kept",
        "members",
        "partial",
        "partial_sums",
        "reduce_dtype",
        "transport",
    )

    def __init__(
        self,
        gradients: Gradients,
        transport: ReduceTransport,
        partial_sums: PartialSums,
        kept: KeptGradients | None,
        full: Program,
        partial: Program,
    ) -> None:
        self.gradients = gradients
        self.members: Sequence[ShardedParam] = gradients.params
        self.transport = transport
        self.partial_sums = partial_sums
        self.kept = kept
        self.full, self.partial = full, partial
        self.grad_dtype, self.reduce_dtype = transport.grad_dtype, transport.reduce_dtype

    @property
    def has_work(self) -> bool:
        """Whether there is anything to collect."""
        return self.partial_sums.flat is not None or self.gradients.waiting()

    def collect(
        self, take_missing: bool, all_reduce: bool = True, summed: bool = False
    ) -> Job | None:
        """Take the members' gradients; ``None`` if there is nothing to reduce.

        Args:
            take_missing: reduce (as zeros, delivered too) members without a gradient.
            all_reduce: whether partial sums are also reduced, so that they suffice without
                gradients.
            summed: whether the gradients include those of earlier backwards.
        """
        grads = self.gradients.take(summed)
        missing = 0
        for grad in grads:
            if grad is None:
                missing += 1
        if not missing:
            return Job(cast(list[torch.Tensor], grads), [True] * len(grads))
        waits = self.partial_sums.flat is not None
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
        zeros, dtype = self.transport.kernels.zeros, self.grad_dtype
        full = [
            zeros(member.shape, dtype, "absent gradient") if grad is None else grad
            for member, grad in zip(self.members, grads, strict=True)
        ]
        job = Job(full, present)
        job.seeks = False in present
        return job

    def discard(self) -> None:
        """Drop partial sums."""
        self.partial_sums.discard()

    def abandon(self) -> None:
        """Let go of everything that an exception left half way."""
        self.transport.release()
        if self.kept is not None:
            self.kept.abandon()


def with_zeros(jobs: list[tuple[Reduction, Job | None]]) -> list[tuple[Reduction, Job]]:
    """A group's jobs, with one of zeros for each that is missing; none where all are.

    Ranks that use parameters of different dtypes run the same collectives then (decision 3).
    """
    if all(job is None for _, job in jobs):
        return []
    return [(reduction, job or reduction.absent()) for reduction, job in jobs]


# ---- launched


class ReducedGroup(Protocol):
    """The group of parameters whose reductions are launched."""

    name: str
    params: list[ShardedParam]
    streams: Streams

    @property
    def has_grad_hooks(self) -> bool:
        """Whether users' hooks run when gradients are delivered."""


@dataclass(slots=True)
class PendingReduction:
    """A group's running reduction.

    Attributes:
        group: the group whose gradients it reduces.
        jobs: its data: alive until COMPUTE has waited for it (invariant I7).
        scattered: event after the reduce-scatter: its input may be freed.
        done: event after everything; the same one if nothing follows the reduce-scatter.
        host: the steps by which the host delivers the data copied to it.
    """

    group: ReducedGroup
    jobs: list[tuple[Reduction, Job]]
    scattered: Event
    done: Event
    host: list[tuple[Step, Job]]

    def release_inputs(self) -> None:
        """Free the inputs of the reduce-scatters, once COMPUTE has waited for ``scattered``."""
        for reduction, job in self.jobs:
            reduction.transport.release()
            job.grads = []
            job.marks = None

    def release_rest(self) -> None:
        """Free everything else that is not delivered, once COMPUTE has waited for ``done``."""
        for reduction, job in self.jobs:
            job.flat = job.scattered = job.result = job.partial = job.found = None
            if reduction.kept is not None and not self._waits(job):
                reduction.kept.give_back(job)
        self.jobs = []

    def _waits(self, job: Job) -> bool:
        """Whether the host is still to deliver anything of it."""
        return any(job is waiting for _, waiting in self.host)

    def deliver(self) -> None:
        """Deliver the data copied to the host, once the host has waited for ``done``."""
        with torch.no_grad():
            for step, job in self.host:
                step(job)


def reduce_on_lanes(
    group: ReducedGroup, jobs: list[tuple[Reduction, Job]], all_reduce: bool
) -> PendingReduction | None:
    """Run the jobs' programs, each step on its lane.

    Args:
        group: whose gradients they reduce, on its lanes.
        jobs: what `Reduction.collect` took.
        all_reduce: whether copies are summed too, not kept as partial sums for later.

    Returns:
        What is on its way, or ``None`` if nothing is: one rank has nothing to communicate.
    """
    streams = group.streams
    work: list[tuple[Program, Reduction, Job]] = []
    reduces = all_reduces = False
    for reduction, job in jobs:
        program = reduction.full if all_reduce else reduction.partial
        if job.seeks:
            program = program.seeking or program
        work.append((program, reduction, job))
        reduces = reduces or bool(program.reduce)
        all_reduces = all_reduces or bool(program.all_reduce)
        _run(program.compute, reduction, job, group.name)
    if not (reduces or all_reduces):
        return None
    event = streams.record(COMPUTE, "gradients staged")
    streams.wait(REDUCE, event, "reduction after compute")
    with streams.on(REDUCE):
        for program, reduction, job in work:
            _run(program.reduce, reduction, job, group.name)
    scattered = done = streams.record(REDUCE, "reduction done")
    if all_reduces:
        streams.wait(ALL_REDUCE, scattered, "all-reduce after reduce-scatter")
        with streams.on(ALL_REDUCE):
            for program, reduction, job in work:
                _run(program.all_reduce, reduction, job, group.name)
        done = streams.record(ALL_REDUCE, "all-reduce done")
    host = [(step, job) for program, _, job in work for step in program.host]
    return PendingReduction(group, jobs, scattered, done, host)


def reduce_inline(group: ReducedGroup, jobs: list[tuple[Reduction, Job]], all_reduce: bool) -> None:
    """As `reduce_on_lanes` where all lanes are one, as on a CPU: on return, all is delivered."""
    for reduction, job in jobs:
        program = reduction.full if all_reduce else reduction.partial
        if job.seeks:
            program = program.seeking or program
        _run(program.inline, reduction, job, group.name)


COLLECTIVES = {
    "reduce": "reduce-scatter",
    "all_reduce": "all-reduce",
    "scatter_between": "reduce-scatter between nodes",
}
"""Names and purposes of the steps that communicate."""


def _run(steps: Sequence[Step], reduction: Reduction, job: Job, name: str) -> None:
    """Run a lane's steps; an exception names the group, or a sparse gradient."""
    running: Step | None = None
    try:
        for running in steps:
            running(job)
    except RuntimeError as error:
        _refuse_sparse(reduction, job, error)
        operation = COLLECTIVES.get(getattr(running, "__name__", ""))
        if operation is None or isinstance(error, torch.OutOfMemoryError):
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
