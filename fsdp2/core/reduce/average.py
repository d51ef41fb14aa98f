"""An average over copies of the model that the mesh does not have (`fsdp2.elastic`).

flat   [ rows of A | rows of B | marks ]    reduced, and divided, inside this copy
         ── average ──> the same, of all copies that take part

Marks are averaged too, so they say whether any copy had a gradient (`presence_marks`).
Why this is a step of its own: decision 31.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import ReduceTransport


class Average:
    """The step that averages the flat result.

    Args:
        average: does it in place; says whether this copy's own gradient is in the average.
        transport: what leaves the flat result, marks included.
    """

    __slots__ = ("_average", "_transport")

    def __init__(self, average: Callable[[torch.Tensor], bool], transport: ReduceTransport) -> None:
        self._average = average
        self._transport = transport

    def average(self, job: Job) -> None:
        """Average, on ALL_REDUCE.

        A copy whose gradient does not count gets exactly those that the others have: where it had
        one and they had none, the average is zero, and an optimizer would step only here.
        """
        assert job.flat is not None
        if not self._average(job.flat):
            marks = self._transport.marks
            assert marks is not None
            job.present = marks.present(job)
