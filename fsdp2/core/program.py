"""What a reduction runs, and on what.

    ReductionSpec   what sets the steps: dtypes, factors, whose collectives
    Program         the steps, by lane, in their order
    Job             what one run of a program leaves from step to step

`fsdp2.core.reduction` has the steps themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp2.core.collectives import ReduceScatter
from fsdp2.core.kept import KeptGradients


@dataclass(frozen=True)
class ReductionSpec:
    """What sets a reduction's steps.

    Attributes:
        direct: whether gradients may be reduced one by one in one launch: pieces in order, even,
            aligned.
        grad_dtype: dtype of autograd's gradients.
        reduce_dtype: dtype of the collectives.
        result_dtype: dtype of the sharded ``.grad``.
        factor: the user's divide factor.
        sum_only: whether the collectives must only sum.
        hook: called with the flat reduced gradient.
        to_host: whether the result is copied to CPU memory.
        pin: whether that memory is page-locked.
        comm: the user's reduce-scatter.
        device: where its buffers are.
        keep: whether gradients' memory is kept for the next step.
    """

    direct: bool
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


class Job:
    """One reduction on its way: what each step leaves for the next.

    Attributes:
        grads: full gradients, a tensor for every member.
        present: which members had one; the others are reduced as zeros and get no ``.grad``.
        outputs: this rank's reduced rows, a tensor for every member.
        flat: the flat tensor that they are views of, in the reduce dtype.
        scattered: what a user's reduce-scatter writes; ``flat`` gets a copy.
        result: the same in the gradient's dtype.
        partial: partial sums that were added, alive until the reduction is over.
        kept: the memory that the result is in, if that is kept.
        sums: gradients that the outputs were added to; a hook may have dropped them meanwhile.
    """

    # Of the class until a step sets them, which most do not.
    flat: Any = None
    scattered: Any = None
    result: Any = None
    partial: Any = None
    kept: KeptGradients | None = None
    outputs: Sequence[Any] = ()
    sums: tuple[Any, ...] = ()

    def __init__(self, grads: list[Any], present: list[bool]) -> None:
        self.grads = grads
        self.present = present


Step = Callable[[Any, Job], None]
"""A function of the `SegmentReduction`, not bound to it: one that is replaced is freed at once."""


class Program:
    """Steps by where they run; ``host`` steps run when everything else has.

    Attributes:
        inline: all of them, for where all lanes are one.
    """

    __slots__ = ("all_reduce", "compute", "host", "inline", "reduce")

    def __init__(
        self,
        compute: Iterable[Step],
        reduce: Iterable[Step] = (),
        all_reduce: Iterable[Step] = (),
        host: Iterable[Step] = (),
    ) -> None:
        self.compute = tuple(compute)
        self.reduce = tuple(reduce)
        self.all_reduce = tuple(all_reduce)
        self.host = tuple(host)
        self.inline = self.compute + self.reduce + self.all_reduce + self.host
