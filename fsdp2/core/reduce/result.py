"""From the flat sums to the delivered gradients: hook, division, cast, copy to the host.

flat   [ rows of A | rows of B | marks ]    reduce dtype
         ── hook ── divide ──> the same
result [ rows of A | rows of B | marks ]    the gradient's dtype, where that is another one
         ── to host ──> the same in CPU memory, where gradients are offloaded
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp2.core.device.kernels import Kernels
from fsdp2.core.reduce.program import Job


class Result:
    """The destination of the result, if that is not the output of the collective.

    Args:
        shape: of the flat result.
        dtype: of the gradients.
        pin: whether memory on the host is pinned.
        views: creates rows of a flat tensor.
        kernels: memory and copies.
    """

    __slots__ = ("_new", "_pin", "_shape", "_views", "kernels")

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        pin: bool,
        views: Callable[[torch.Tensor], list[torch.Tensor]],
        kernels: Kernels,
    ) -> None:
        self._shape, self._pin, self._views = shape, pin, views
        self._new = kernels.bind_empty(shape, dtype, "sharded gradient")
        self.kernels = kernels

    def allocate_result(self, job: Job) -> None:
        """Memory of the cast, on COMPUTE."""
        job.result = self._new()

    def cast(self, job: Job) -> None:
        """Cast the sums into it, on the last lane."""
        assert job.flat is not None
        assert job.result is not None
        self.kernels.copy(job.result, job.flat)
        job.outputs = self._views(job.result) if job.kept is None else job.kept.rows

    def to_host(self, job: Job) -> None:
        """Copy out, on the last lane; the host delivers what arrives."""
        source = job.to_deliver()
        target = self.kernels.host_empty(self._shape, source.dtype, self._pin)
        self.kernels.to_host(target, source)
        job.outputs = self._views(target)


class DivisionAfter:
    """The division after the collectives.

    Args:
        factor: the divisor.
        kernels: memory and copies.
    """

    __slots__ = ("_factor", "kernels")

    def __init__(self, factor: float, kernels: Kernels) -> None:
        self._factor = factor
        self.kernels = kernels

    def divide(self, job: Job) -> None:
        """Divide the flat sums."""
        assert job.flat is not None
        self.kernels.divide(job.flat, self._factor)

    def divide_rows(self, job: Job) -> None:
        """Divide each member's rows, which lie in no flat tensor."""
        for rows in job.outputs:
            self.kernels.divide(rows, self._factor)


class Hook:
    """The user's, on the flat sums.

    Args:
        hook: it.
    """

    __slots__ = ("_hook",)

    def __init__(self, hook: Callable[[torch.Tensor], None]) -> None:
        self._hook = hook

    def run_hook(self, job: Job) -> None:
        """Call it, on ALL_REDUCE."""
        assert job.flat is not None
        self._hook(job.flat)
