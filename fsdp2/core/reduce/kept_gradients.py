"""Gradients in permanent memory, which a reduction fills and delivers in every step.

    flat     [ rows of A | rows of B | pad ]   where the reduction leaves its result
    rows       └ view      └ view
    objects    └ DTensor   └ DTensor           what becomes ``.grad`` of A, of B

All are made once. They are filled again only while no member has a ``.grad`` (invariant I13), so
``zero_grad()`` decides, as always, between a new gradient and a sum; it just does not free memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp2.core.params.gradients import Gradients
from fsdp2.core.reduce.program import Job, KeptMemory, Step


class KeptGradients:
    """The gradients of the members of a reduction, which stay in place on request (decision 15)."""

    def __init__(
        self,
        gradients: Gradients,
        make: Callable[[], torch.Tensor],
        views: Callable[[torch.Tensor], list[torch.Tensor]],
    ) -> None:
        self._gradients = gradients
        self._make, self._views = make, views
        self._kept: KeptMemory | None = None  # until it is needed
        self._taken = False  # by a reduction on its way, which fills it and hands it out

    def abandon(self) -> None:
        """An exception has ended the reduction that fills them."""
        self._taken = False

    def hold(self, use: Callable[[Job, KeptMemory], None], otherwise: Step, job: Job) -> None:
        """Give a job the kept memory; new memory if that holds a gradient, or will hold one."""
        if self._taken or self._gradients.delivered():
            otherwise(job)
            return
        if self._kept is None:
            flat = self._make()
            rows = self._views(flat)
            self._kept = KeptMemory(flat, rows, self._gradients.objects_over(rows))
        self._taken = True
        job.kept = self._kept
        use(job, self._kept)

    def give_back(self, job: Job) -> None:
        """The memory of the result is unused now, and may be filled again (invariant I13)."""
        # After delivery, the all-reduce on its lane may still have written it.
        if job.kept is not None:
            self._taken = False
