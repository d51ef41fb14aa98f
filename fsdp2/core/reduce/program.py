"""A reduction's operations, and the state that one run passes from each to the next.

    Op        lane, name, run                          a value, bound once (decision 6)
    Program   compute | reduce | all_reduce | host     what the operations of each lane run
    Job       one run: gradients in, this rank's rows out
    PartialSums, KeptGradients                         data that stays between runs

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

    def hold(self, use: Callable[[Job, KeptGradients], None], otherwise: Step, job: Job) -> None:
        """Give a job the kept memory; new memory if that holds a gradient, or will hold one."""
        if self._taken or self._gradients.delivered():
            otherwise(job)
            return
        if not self.rows:
            self.flat = self._make()
            self.rows = self._views(self.flat)
            self.objects = self._gradients.objects_over(self.rows)
        self._taken = True
        job.kept = self
        use(job, self)

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
