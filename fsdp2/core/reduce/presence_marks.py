"""Who had a gradient: a mark for each member, which travels with a reduction.

    this rank      [ 1 0 1 ]   A and C had a gradient here      the same to every rank
    another        [ 1 1 0 . ]
    their sum      [ 2 1 1 ]   each had one somewhere: B is delivered here, too (decision 20)

Marks are numbers of the reduce dtype. What happens to gradients, happens to them: they are divided
and averaged, added to partial sums, summed over replicas. One that is not zero at the end was set
by some rank. Where all members had a gradient, as most often, what is sent was made once, and what
comes back is not looked at. They travel

    within   behind the rows, where gradients are packed, or the flat result is reduced once more
    apart    as one more tensor of the launch, where nobody needs the result flat
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2.core.device.kernels import Kernels

SMALL = 2.0**-40
"""A mark that users' hooks see behind gradients: it changes neither norms nor scales."""

_WIDE = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)


class Marks:
    """The marks of a reduction's members.

    Args:
        ranks: how many ranks the sums are scattered over.
        start: where marks begin in the flat result; ``None``: they travel apart.
        width: numbers that a rank receives: one a member, and what fills them up.
        dtypes: of the reduction, and others that gradients may be staged in.
        small: whether a hook of the user's sees them.
        kernels: memory and copies.

    Attributes:
        start: as it was given.
        width: as it was given.
        sent: what a rank sends that has all gradients, by dtype.
        ignored: where the sums go that nobody reads; only where they travel apart.
    """

    __slots__ = ("_dtype", "_kernels", "_ranks", "ignored", "sent", "start", "width")

    def __init__(
        self,
        ranks: int,
        start: int | None,
        width: int,
        dtypes: Sequence[torch.dtype],
        small: bool,
        kernels: Kernels,
    ) -> None:
        self._ranks, self._kernels = ranks, kernels
        self._dtype = dtypes[0]
        self.start, self.width = start, width
        value = SMALL if small and all(dtype in _WIDE for dtype in dtypes) else 1.0
        numel = ranks * self.width
        self.sent = {dtype: kernels.constant(numel, value, dtype, "marks") for dtype in dtypes}
        self.ignored: torch.Tensor | None = None
        if start is None:
            self.ignored = kernels.zeros((self.width,), self._dtype, "marks")

    def of(self, present: Sequence[bool]) -> torch.Tensor:
        """What a rank sends that has only those gradients, on COMPUTE."""
        kernels, shape = self._kernels, (self._ranks, self.width)
        marks = kernels.zeros(shape, self._dtype, "marks of some")
        every = self.sent[self._dtype].view(*shape)
        for member, there in enumerate(present):
            if there:
                kernels.copy(marks.narrow(1, member, 1), every.narrow(1, member, 1))
        return marks.view(-1)

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """Their place in a flat result."""
        assert self.start is not None
        return flat.narrow(0, self.start, self.width)

    def place(self, flat: torch.Tensor) -> torch.Tensor:
        """Where the sums are to go that this rank reads, zeros until then; on COMPUTE."""
        zeros = self._kernels.zeros((self.width,), self._dtype, "sums of marks")
        if self.start is None:
            return zeros
        found = self.within(flat)
        self._kernels.copy(found, zeros)
        return found

    def found(self, sums: Sequence[torch.Tensor]) -> list[bool]:
        """Which members some rank had a gradient of, by any of these sums in CPU memory."""
        numbers = zip(*map(self._kernels.numbers, sums), strict=True)
        return [any(number != 0 for number in of_one) for of_one in numbers]
