"""A reduction's steps by lane, and the state that one run passes between them.

    Program   compute | reduce | all_reduce | host     tuples of steps, bound once (decision 6)
    Job       one run: gradients in, this rank's rows out

A step is a method of a small object that owns what it needs: a transport, marks, partial sums. It
takes the job. None of these objects refers to the reduction, so that one which is replaced is freed
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fsdp2.core.device.collectives import Work
from fsdp2.core.device.kernels import Tensors


class KeptMemory(NamedTuple):
    """Memory of gradients that stays from step to step.

    Attributes:
        flat: the rows of all members, in the gradients' dtype.
        rows: views of it, one per member.
        objects: what becomes ``.grad``, over the rows.
    """

    flat: torch.Tensor
    rows: list[torch.Tensor]
    objects: list[torch.Tensor]


@dataclass(eq=False)
class Job:
    """One running reduction: the results of each step for the next.

    Attributes:
        grads: unsharded gradients, a tensor for every member.
        present: which members had one, or must be delivered in any case; the others are reduced as
            zeros, and delivered if another rank had one.
        seeks: whether to find that out.
        marks: in that case, this rank's marks, and the destination of the sums of all ranks'.
        found: these sums.
        arrived: the same in CPU memory; from before and after the user's hook, which may sum them
            over more ranks, or lose them.
        outputs: this rank's reduced rows, a tensor for every member.
        flat: the flat tensor of which they are views, in the reduce dtype.
        scattered: the output of the collective, if that is not ``flat``, which gets a copy.
        result: the same in the gradient's dtype.
        partial: partial sums that were added, and other data that lives until the reduction has
            ended.
        between: the data sent between nodes, from its allocation to the end of the transfer.
        kept: the memory of the result, if that is kept.
        sums: gradients to which the outputs were added; a hook may have dropped them meanwhile.
    """

    grads: list[torch.Tensor]
    present: list[bool]
    # Of the class until a step sets them, which most do not.
    seeks: bool = field(default=False, init=False)
    marks: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)
    found: torch.Tensor | None = field(default=None, init=False)
    arrived: Tensors = field(default=(), init=False)
    outputs: Tensors = field(default=(), init=False)
    flat: torch.Tensor | None = field(default=None, init=False)
    scattered: torch.Tensor | None = field(default=None, init=False)
    result: torch.Tensor | None = field(default=None, init=False)
    partial: object = field(default=None, init=False)
    between: object = field(default=None, init=False)
    kept: KeptMemory | None = field(default=None, init=False)
    sums: Tensors = field(default=(), init=False)

    def to_deliver(self) -> torch.Tensor:
        """The flat result, in the gradient's dtype if that differs."""
        found = self.flat if self.result is None else self.result
        assert found is not None
        return found


Scatter = Callable[..., Work | None]
"""A bound reduce-scatter: of an output and an input, or of many of each, in one launch."""

Step = Callable[[Job], object]
"""An operation on a job: a method of an object that does not reference the reduction."""


class Program:
    """Steps by lane; ``host`` steps run after all others.

    Args:
        compute: those on COMPUTE.
        reduce: those on REDUCE.
        all_reduce: those on ALL_REDUCE.
        host: those that the host runs after all of them.
        behind: further steps if all lanes are one: otherwise COMPUTE must wait first.

    Attributes:
        inline: all of them, in order.
        seeking: the program of a job that lacks a gradient which another rank may have; ``None`` on
            a single rank. It is not the program itself, which would be a reference cycle.
    """

    __slots__ = ("all_reduce", "compute", "host", "inline", "reduce", "seeking")

    def __init__(
        self,
        compute: Sequence[Step],
        reduce: Sequence[Step] = (),
        all_reduce: Sequence[Step] = (),
        host: Sequence[Step] = (),
        behind: Sequence[Step] = (),
    ) -> None:
        self.compute = tuple(compute)
        self.reduce = tuple(reduce)
        self.all_reduce = tuple(all_reduce)
        self.host = tuple(host)
        self.inline = (*compute, *reduce, *all_reduce, *host, *behind)
        self.seeking: Program | None = None
