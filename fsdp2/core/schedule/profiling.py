"""Ranges by unit name in a profiler's trace, while one is active.

    group.start_unshard ──> "fsdp2::all_gather (blocks.3)" around ParamGroup.start_unshard

`Scheduler` asks torch's own flag, without a call, when a forward or backward of the root begins. It
puts this layer around its groups then, or takes it off.
"""

from __future__ import annotations

from torch.profiler import record_function

from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import PendingReduction, Reduction
from fsdp2.core.schedule.layers import Layer


class ProfiledGroup(Layer):
    """A layer that marks operations as ranges in a profiler's trace."""

    __slots__ = ()

    height = 3  # around the checks: a trace shows what they cost

    def start_unshard(self) -> None:
        """Launch the all-gather."""
        with self._range("all_gather"):
            self.below.start_unshard()

    def finish_unshard(self) -> None:
        """Wait for the all-gather."""
        with self._range("wait"):
            self.below.finish_unshard()

    def reduce(
        self, jobs: list[tuple[Reduction, Job]], all_reduce: bool
    ) -> PendingReduction | None:
        """Reduce what was collected."""
        with self._range("reduce"):
            return self.below.reduce(jobs, all_reduce)

    def _range(self, operation: str) -> record_function:
        name = self.base.name.replace("(root)", "root")
        return record_function(f"fsdp2::{operation} ({name})")
