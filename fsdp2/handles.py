"""Handles for asynchronous calls of a sharded module."""

from __future__ import annotations

from fsdp2.core.errors import coded
from fsdp2.core.modules.dynamo import uncompiled_methods
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.unit import Unit


@uncompiled_methods
class UnshardHandle:
    """The handle that ``unshard(async_op=True)`` returns."""

    def __init__(self, scheduler: Scheduler, unit: Unit) -> None:
        self._scheduler = scheduler
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Make the current stream wait for the all-gather; register the unsharded parameters."""
        if self._unit is not None:
            self._scheduler.hand_over(self._unit)
            self._unit.settle()
            self._unit = None


@uncompiled_methods
class GradientReductionHandle:
    """The handle that ``finalize_backward(async_op=True)`` returns."""

    def __init__(self, scheduler: Scheduler | None) -> None:
        self._scheduler = scheduler
        self._resets = scheduler.resets if scheduler is not None else 0

    def wait(self) -> None:
        """Make the current stream wait for the reductions, and the host for offloaded gradients.

        Raises:
            RuntimeError: ``reset_iter_state()`` has dropped the reductions meanwhile.
        """
        scheduler = self._scheduler
        if scheduler is None:
            return
        if scheduler.resets != self._resets:
            raise coded(
                RuntimeError,
                "handle-outlived",
                "the gradients that this handle waits for were dropped by reset_iter_state(); run "
                "the iteration again",
            )
        scheduler.wait_for_reductions()
        self._scheduler = None
