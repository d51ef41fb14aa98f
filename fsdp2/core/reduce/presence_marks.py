"""Which ranks had a gradient: a mark for each member, sent with a reduction.

    this rank      [ 1 0 1 ]   A and C had a gradient here      the same to every rank
    another        [ 1 1 0 . ]
    their sum      [ 2 1 1 ]   each had one somewhere: B is delivered here, too (decision 20)

Marks are numbers of the reduce dtype, and receive the same operations as gradients: they are
divided and averaged, added to partial sums, summed over replicas. If a mark is not zero at the end,
some rank has set it. If all members had a gradient, which is the usual case, the tensor to send was
created once, and the result is ignored. Marks are sent

    within     after the rows, if gradients are packed, or the flat result is reduced once more
    apart      as one more tensor of the launch, if the result need not be flat
    separate   in a small additional reduce-scatter, whose sums follow the rows: if the collective
               of gradients may change marks in other ways than a sum (a collective of the user)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2.core.device.collectives import Work
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.reduce.program import Job, Scatter
from fsdp2.core.reduce.rows import FlatPlan

SMALL = 2.0**-40
"""A mark that users' hooks see after gradients: it changes neither norms nor scales."""

_WIDE = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)


class PresenceMarks:
    """The marks of a reduction's members, scattered over ``ranks``, in all dtypes that are staged.

    They are ``small`` if a hook of the user sees them. Each rank receives ``width`` numbers: one
    per member, and padding; they begin at ``start`` in the flat result, or are sent apart. ``sent``
    has the marks of a rank that has all gradients, by dtype; ``unread``, for those sent apart, the
    same in the reduction's dtype, and a buffer for unused sums.
    """

    def __init__(
        self,
        ranks: int,
        flat: FlatPlan,
        dtypes: Sequence[torch.dtype],
        small: bool,
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        self.start, self.width = flat.marks_start, flat.marks_width
        self._ranks, self._dtype = ranks, dtypes[0]
        # fp16 would make zero of `SMALL`: it ends at 2⁻²⁴.
        value = SMALL if small and all(dtype in _WIDE for dtype in dtypes) else 1.0
        numel = ranks * self.width
        self.sent = {
            dtype: kernels.constant(numel, value, dtype, "marks") for dtype in dict.fromkeys(dtypes)
        }
        self.unread: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.start is None:
            ignored = kernels.zeros((self.width,), self._dtype, "marks")
            self.unread = self.sent[self._dtype], ignored

    def of(self, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's marks, and the position of their sums in the flat result."""
        return job.marks or (self.sent[self._dtype], self.within(job.flat))

    # ---- what operations run

    def mark(self, job: Job) -> None:
        """For a job that lacks gradients, on COMPUTE: this rank's marks, and the sums' position."""
        kernels, shape = self._kernels, (self._ranks, self.width)
        marks = kernels.zeros(shape, self._dtype, "marks of some")
        # Copied, as a mark may be 1 or `SMALL`, and kernels have no other way to set a number.
        every = self.sent[self._dtype].view(*shape)
        for member, there in enumerate(job.present):
            if there:
                kernels.copy(marks.narrow(1, member, 1), every.narrow(1, member, 1))
        found = zeros = kernels.zeros((self.width,), self._dtype, "sums of marks")
        if self.start is not None:
            found = self.within(job.flat)
            kernels.copy(found, zeros)
        job.marks, job.found = (marks.view(-1), found), found

    def reduce(self, scatter: Scatter, job: Job) -> Work | None:
        """Sum them by a separate reduce-scatter, where gradients' own did not, on REDUCE."""
        sent, found = self.of(job)
        return scatter(found, sent)

    def fetch(self, job: Job) -> None:
        """Copy the sums to the host, which reads them after this lane."""
        assert job.found is not None
        job.arrived = (*job.arrived, self._kernels.fetched(job.found))

    def missed(self, job: Job) -> list[bool]:
        """Which members had no gradient here, but one on another rank, by any of the sums."""
        numbers = zip(*map(self._kernels.numbers, job.arrived), strict=True)
        found = [any(number != 0 for number in of_one) for of_one in numbers]
        # Padding follows the marks, hence `strict=False`.
        return [there and not here for here, there in zip(job.present, found, strict=False)]

    def present(self, job: Job) -> list[bool]:
        """Which members had a gradient anywhere, by the sums; the host waits for them."""
        numbers = self._kernels.numbers(self.within(job.flat))
        return [number != 0 for number, _ in zip(numbers, job.present, strict=False)]

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """The position of their sums in the flat result."""
        assert self.start is not None
        return flat.narrow(0, self.start, self.width)
