"""Sums that wait for the all-reduce over replicas, and that all-reduce.

backward without all-reduce   reduce-scatter ── keep ──> sums            (invariant I9)
backward with it              reduce-scatter ──────────> flat  + sums ── all-reduce ──> flat
"""

from __future__ import annotations

import torch

from fsdp2.core.device.collectives import Collectives, ReduceKind, Work
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.reduce.program import Job


class PartialSums:
    """The results of reductions without all-reduce, and which members had a gradient in any."""

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


def sum_replicas(replicas: Collectives, kind: ReduceKind, job: Job) -> Work | None:
    """Reduce the flat sums over the replicate axis in place, on ALL_REDUCE."""
    return replicas.all_reduce(job.flat, kind)
