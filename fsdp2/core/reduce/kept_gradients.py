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

from fsdp2.core.device.kernels import Kernels
from fsdp2.core.params.gradients import Gradients
from fsdp2.core.reduce.program import Job, KeptMemory, Step


class KeptGradients:
    """The gradients of the members of a reduction, which stay in place on request (decision 15).

    Args:
        gradients: the members'.
        make: allocates the flat tensor.
        views: makes the rows of it.
        otherwise: the step that makes new memory, where the kept memory is in use.
        kernels: memory and copies.

    Attributes:
        otherwise: as it was given.
        kernels: as it was given.
    """

    __slots__ = ("_gradients", "_kept", "_make", "_taken", "_views", "kernels", "otherwise")

    def __init__(
        self,
        gradients: Gradients,
        make: Callable[[], torch.Tensor],
        views: Callable[[torch.Tensor], list[torch.Tensor]],
        otherwise: Step,
        kernels: Kernels,
    ) -> None:
        self._gradients = gradients
        self._make, self._views = make, views
        self.otherwise = otherwise
        self.kernels = kernels
        self._kept: KeptMemory | None = None  # until it is needed
        self._taken = False  # by a reduction on its way, which fills it and hands it out

    def _take(self) -> KeptMemory | None:
        """The kept memory, unless it holds a gradient, or will hold one."""
        if self._taken or self._gradients.delivered():
            return None
        if self._kept is None:
            flat = self._make()
            rows = self._views(flat)
            self._kept = KeptMemory(flat, rows, self._gradients.objects_over(rows))
        self._taken = True
        return self._kept

    def abandon(self) -> None:
        """An exception has ended the reduction that fills them."""
        self._taken = False

    # ---- steps: one of the first three, wherever the result is made

    def hold_flat(self, job: Job) -> None:
        """Let the collective write there, on COMPUTE."""
        job.kept = kept = self._take()
        if kept is None:
            self.otherwise(job)
        else:
            job.flat, job.outputs = kept.flat, kept.rows

    def hold_result(self, job: Job) -> None:
        """Let the cast write there, on COMPUTE."""
        job.kept = kept = self._take()
        if kept is None:
            self.otherwise(job)
        else:
            job.result = kept.flat

    def hold_on_host(self, job: Job) -> None:
        """Copy there, to CPU memory."""
        job.kept = kept = self._take()
        if kept is None:
            self.otherwise(job)
        else:
            self.kernels.to_host(kept.flat, job.to_deliver())

    def give_back(self, job: Job) -> None:
        """The memory of the result may be filled again as soon as it is unused.

        This is not at the time of delivery: the all-reduce on its lane may still write it
        (invariant I13).
        """
        if job.kept is not None:
            self._taken = False
