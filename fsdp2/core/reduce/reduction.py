"""From unsharded gradients to sharded ``.grad``: the operations of a reduction, and a run of them.

    Op        lane, name, run                          a value, bound once (decision 6)
    Program   compute | reduce | all_reduce | host     what the operations of each lane run
    Job       one run: gradients in, this rank's rows out
    PartialSums, KeptGradients                         data that stays between runs
    PresenceMarks                                      which ranks had a gradient

    Reduction.collect       take the gradients that autograd left on the unsharded parameters
    reduce_on_lanes         run its program, each operation on its lane (`binding` has the order)
    PendingReduction        jobs, and events after reduce-scatter and all, until COMPUTE has waited

An operation runs a closure over memory, such as staging, or a method of an object that owns some,
such as partial sums; either takes the job. None of them refers to the reduction, so that one which
is replaced is freed at once. If all lanes are one, as on a CPU, everything has ended when the
launch returns (`reduce_inline`): nothing is pending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from fsdp2.core.device.buffers import TransientBuffer
from fsdp2.core.device.collectives import Collectives, Work
from fsdp2.core.device.kernels import Kernels, Tensors
from fsdp2.core.device.streams import ALL_REDUCE, COMPUTE, REDUCE, Event, Lane, Streams
from fsdp2.core.errors import coded
from fsdp2.core.layout.layout import Slot
from fsdp2.core.params.gradients import Gradients
from fsdp2.core.params.param import ShardedParam
from fsdp2.core.progress import communication_error
from fsdp2.core.reduce.spec import Division, FlatPlan, ReductionSpec, Run

if TYPE_CHECKING:  # who does not use it does not load it
    from fsdp2.core.reduce.feedback import Feedback


class KeptGradients:
    """The gradients of a reduction's members in permanent memory, on request (decision 15): each
    step fills and delivers them.

    flat     [ rows of A | rows of B | pad ]   where the reduction leaves its result
    rows       └ view      └ view
    objects    └ DTensor   └ DTensor           what becomes ``.grad`` of A, of B

    All are made once. They are filled again only while no member has a ``.grad`` (invariant I13),
    so ``zero_grad()`` decides, as always, between a new gradient and a sum, but frees no memory.
    """

    flat: torch.Tensor

    def __init__(
        self,
        gradients: Gradients,
        make: Callable[[], torch.Tensor],
        views: Callable[[torch.Tensor], list[torch.Tensor]],
    ) -> None:
        self._gradients = gradients
        self._make, self._views = make, views
        self.rows: list[torch.Tensor] = []  # until they are needed
        self.objects: list[torch.Tensor] = []
        self._taken = False  # by a reduction on its way, which fills it and hands it out

    def abandon(self) -> None:
        """An exception has ended the reduction that fills them."""
        self._taken = False

    def hold(self, job: Job) -> bool:
        """Give a job the kept memory, unless that holds a gradient, or will hold one."""
        if self._taken or self._gradients.delivered():
            return False
        if not self.rows:
            self.flat = self._make()
            self.rows = self._views(self.flat)
            self.objects = self._gradients.objects_over(self.rows)
        self._taken = True
        job.kept = self
        return True

    def give_back(self, job: Job) -> None:
        """The memory of the result is unused now, and may be filled again (invariant I13)."""
        # After delivery, the all-reduce on its lane may still have written it.
        if job.kept is not None:
            self._taken = False


@dataclass(eq=False)
class Job:
    """One running reduction: the results of each operation for the next.

    Attributes:
        grads: unsharded gradients of every member; once staged, those that the collective reads.
        present: which members had one, or must be delivered in any case; the others are reduced as
            zeros, and delivered if another rank had one.
        seeks: whether to find that out.
        marks: in that case, this rank's marks, and the destination of the sums of all ranks'.
        found: these sums.
        arrived: the same in CPU memory; from before and after the user's hook, which may sum them
            over more ranks, or lose them.
        outputs: this rank's reduced rows, for every member, in the reduce dtype: views of ``flat``.
        scattered: the output of the collective, if that is not ``flat``, which gets a copy.
        result: the same in the gradient's dtype.
        partial: partial sums that were added, and other data that lives until the end.
        between: the data sent between nodes, from its allocation to the end of the transfer.
        sums: gradients to which the outputs were added; a hook may have dropped them meanwhile.
    """

    grads: list[torch.Tensor]
    present: list[bool]
    # The class has these values until an operation sets others, which most do not.
    seeks: bool = field(default=False, init=False)
    marks: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)
    found: torch.Tensor | None = field(default=None, init=False)
    arrived: Tensors = field(default=(), init=False)
    outputs: Tensors = field(default=(), init=False)
    # No operation reads them before they are allocated, or after they are freed.
    flat: torch.Tensor = field(default=None, init=False)  # type: ignore[assignment]
    scattered: torch.Tensor = field(default=None, init=False)  # type: ignore[assignment]
    result: torch.Tensor | None = field(default=None, init=False)
    partial: object = field(default=None, init=False)
    between: Crossing | None = field(default=None, init=False)
    kept: KeptGradients | None = field(default=None, init=False)
    sums: Tensors = field(default=(), init=False)

    def to_deliver(self) -> torch.Tensor:
        """The flat result, in the gradient's dtype if that differs."""
        return self.flat if self.result is None else self.result


class Crossing(NamedTuple):
    """The sums of a node, ``rows``, while they are sent between nodes.

    ``job`` has this rank's pieces as its output. ``made`` has, for each member, the buffer in which
    its rows are first put in the order of nodes; ``messages`` are encoded, to and from nodes.
    """

    job: Job
    rows: torch.Tensor
    made: Sequence[torch.Tensor | None]
    messages: Sequence[torch.Tensor]


class PartialSums:
    """Sums that wait for the all-reduce over replicas, and which members had a gradient in any.

    backward without all-reduce   reduce-scatter ── keep ──> sums            (invariant I9)
    backward with it              reduce-scatter ──────────> flat  + sums ── all-reduce ──> flat
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.flat: torch.Tensor | None = None
        self.present: list[bool] = []

    # ---- what operations run

    def keep(self, job: Job) -> None:
        """Add to the sums that wait, on REDUCE."""
        if self.flat is None:
            self.flat, self.present = job.flat, job.present
            return
        job.partial = self.flat  # alive until this is over, whoever drops them
        self._kernels.add_many([self.flat], [job.flat])
        pairs = zip(self.present, job.present, strict=True)
        self.present = [before or now for before, now in pairs]

    def add(self, job: Job) -> None:
        """Add the sums that wait to this reduction's, on ALL_REDUCE."""
        if self.flat is not None:
            job.partial, sums, self.flat = self.flat, self.flat, None
            self._kernels.add_many([job.flat], [sums])


Scatter = Callable[..., Work | None]
"""A bound reduce-scatter: of an output and an input, or of many of each, in one launch."""

Step = Callable[[Job], Work | None]
"""The callable of an operation. It returns the work of a collective that is to be waited for."""

HOST, BEHIND = len(Lane), len(Lane) + 1
"""In place of a lane: what the host runs after all lanes; and, if all lanes are one, after that,
where otherwise COMPUTE must wait first."""

REDUCE_SCATTER, SUM_OF_REPLICAS = "reduce-scatter", "all-reduce"
BETWEEN_NODES = "reduce-scatter between nodes"
COLLECTIVES = frozenset((REDUCE_SCATTER, SUM_OF_REPLICAS, BETWEEN_NODES))
"""Names of operations that communicate, which errors say."""


class Op(NamedTuple):
    """An operation of a reduction; it ``seeks`` if only jobs without some gradients need it."""

    lane: int
    name: str
    run: Step
    seeks: bool = False


class Program:
    """Operations by lane, as the tuples that a launch runs through: of what each one runs.

    ``inline`` has all of them, lane after lane. ``seeking`` is the program of a job that lacks a
    gradient, if there are operations for it; never the program itself: that were a reference cycle.
    """

    def __init__(self, ops: Sequence[Op], seeks: bool = False) -> None:
        self._ops = ops
        self.seeking: Program | None = None
        lanes: list[list[Step]] = [[], [], [], [], [], [], []]  # five lanes, `HOST`, `BEHIND`
        for op in ops:
            if seeks or not op.seeks:
                lanes[op.lane].append(op.run)
            elif self.seeking is None:
                self.seeking = Program(ops, True)
        self.compute, self.reduce = tuple(lanes[COMPUTE]), tuple(lanes[REDUCE])
        self.all_reduce, self.host = tuple(lanes[ALL_REDUCE]), tuple(lanes[HOST])
        self.inline = (*self.compute, *self.reduce, *self.all_reduce, *self.host, *lanes[BEHIND])

    def name_of(self, step: Step | None) -> str:
        """The name of the operation that runs ``step``."""
        return next((op.name for op in self._ops if op.run is step), "")


# ---- marks

SMALL = 2.0**-40
"""A mark that users' hooks see after gradients: it changes neither norms nor scales."""

_WIDE = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)


class PresenceMarks:
    """Which ranks had a gradient: a mark for each member, sent with a reduction (decision 20).

        this rank      [ 1 0 1 ]   A and C had a gradient here      the same to every rank
        another        [ 1 1 0 . ]
        their sum      [ 2 1 1 ]   each had one somewhere: B is delivered here, too

    Marks are numbers of the reduce dtype, and receive the same operations as gradients: they are
    divided and averaged, added to partial sums, summed over replicas. If a mark is not zero at the
    end, some rank has set it. If all members had a gradient, which is the usual case, the tensor to
    send was created once, and the result is ignored. Marks are sent

        within     after the rows, if gradients are packed, or the flat result is reduced once more
        apart      as one more tensor of the launch, if the result need not be flat
        separate   in a small additional reduce-scatter, whose sums follow the rows: if the
                   collective of gradients may change marks in other ways than a sum (a user's)

    Each rank receives ``width`` numbers: one per member, and padding; they begin at ``start`` in
    the flat result, or are sent apart. They are ``small`` if a hook of the user sees them. ``sent``
    has the marks of a rank that has all gradients, by dtype; ``unread``, for those sent apart, the
    same in the reduction's dtype, and a buffer for unused sums.
    """

    def __init__(
        self,
        ranks: int,
        flat: FlatPlan,
        dtypes: Sequence[torch.dtype],
        small: bool,
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        self.start, self.width = flat.marks_start, flat.marks_width
        self._ranks, self._dtype = ranks, dtypes[0]
        # fp16 would make zero of `SMALL`: it ends at 2⁻²⁴.
        value = SMALL if small and all(dtype in _WIDE for dtype in dtypes) else 1.0
        numel = ranks * self.width
        self.sent = {
            dtype: kernels.constant(numel, value, dtype, "marks") for dtype in dict.fromkeys(dtypes)
        }
        self.unread: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.start is None:
            ignored = kernels.zeros((self.width,), self._dtype, "marks")
            self.unread = self.sent[self._dtype], ignored

    def of(self, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's marks, and the position of their sums in the flat result."""
        return job.marks or (self.sent[self._dtype], self.within(job.flat))

    # ---- what operations run

    def mark(self, job: Job) -> None:
        """For a job that lacks gradients, on COMPUTE: this rank's marks, and the sums' position."""
        kernels, shape = self._kernels, (self._ranks, self.width)
        marks = kernels.zeros(shape, self._dtype, "marks of some")
        # Copied, as a mark may be 1 or `SMALL`, and kernels have no other way to set a number.
        every = self.sent[self._dtype].view(*shape)
        for member, there in enumerate(job.present):
            if there:
                kernels.copy(marks.narrow(1, member, 1), every.narrow(1, member, 1))
        found = zeros = kernels.zeros((self.width,), self._dtype, "sums of marks")
        if self.start is not None:
            found = self.within(job.flat)
            kernels.copy(found, zeros)
        job.marks, job.found = (marks.view(-1), found), found

    def reduce(self, scatter: Scatter, job: Job) -> Work | None:
        """Sum them by a separate reduce-scatter, where gradients' own did not, on REDUCE."""
        sent, found = self.of(job)
        return scatter(found, sent)

    def fetch(self, job: Job) -> None:
        """Copy the sums to the host, which reads them after this lane."""
        assert job.found is not None
        job.arrived = (*job.arrived, self._kernels.fetched(job.found))

    def missed(self, job: Job) -> list[bool]:
        """Which members had no gradient here, but one on another rank, by any of the sums."""
        numbers = zip(*map(self._kernels.numbers, job.arrived), strict=True)
        found = [any(number != 0 for number in of_one) for of_one in numbers]
        # Padding follows the marks, hence `strict=False`.
        return [there and not here for here, there in zip(job.present, found, strict=False)]

    def present(self, job: Job) -> list[bool]:
        """Which members had a gradient anywhere, by the sums; the host waits for them."""
        numbers = self._kernels.numbers(self.within(job.flat))
        return [number != 0 for number, _ in zip(numbers, job.present, strict=False)]

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """The position of their sums in the flat result."""
        assert self.start is not None
        return flat.narrow(0, self.start, self.width)


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
        if self.context.staging is not None:
            self.context.staging.release()

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
