"""A reduction's operations, and the state that one run passes from each to the next.

    Op        lane, name, run                          a value, bound once (decision 6)
    Program   compute | reduce | all_reduce | host     what the operations of each lane run
    Job       one run: gradients in, this rank's rows out

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
from fsdp2.core.device.kernels import Tensors
from fsdp2.core.device.streams import ALL_REDUCE, COMPUTE, REDUCE, Lane


class KeptMemory(NamedTuple):
    """Memory of gradients that stays from step to step, in the gradients' dtype: ``rows`` are views
    of ``flat``, one per member; ``objects``, over the rows, become ``.grad``.
    """

    flat: torch.Tensor
    rows: list[torch.Tensor]
    objects: list[torch.Tensor]


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
    kept: KeptMemory | None = field(default=None, init=False)
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
