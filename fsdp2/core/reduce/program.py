"""A reduction's operations, and the state that one run passes from each to the next.

    Op        lane, name, run                          a value, bound once (decision 6)
    Program   compute | reduce | all_reduce | host     what the operations of each lane run
    Job       one run: gradients in, this rank's rows out
    PartialSums, KeptGradients                         data that stays between runs
    PresenceMarks                                      which ranks had a gradient

An operation runs a closure over memory, such as staging, or a method of an object that owns some,
such as partial sums; either takes the job. None of them refers to the reduction, so that one which
is replaced is freed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fsdp2.core.device.collectives import Work
from fsdp2.core.device.kernels import Kernels, Tensors
from fsdp2.core.device.streams import ALL_REDUCE, COMPUTE, REDUCE, Lane
from fsdp2.core.params.gradients import Gradients
from fsdp2.core.reduce.spec import FlatPlan


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
