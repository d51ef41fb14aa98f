"""Error feedback: the rounding errors of gradient messages are added to the next gradients.

    gradients + residual ── encode ──> message ── decode ──> the values that receivers add
    residual = gradients + residual - the values that receivers add

A rank has a residual for each rank to which it sends: [ranks, n], padded and interleaved like its
gradients. This is an unsharded gradient of the unit, on each rank, and therefore kept in bf16,
which has the range of fp32 and loses 1/512 of it. Padding after the last member has none, although
a rotation spreads errors into it.

The residual of a block that is not finite becomes zero, because the message has already reported
it. A residual is sent with or without gradients: if no rank had a gradient, it is dropped with
them.

Residuals belong to parameters. A reduction that is bound again takes over those of the parameters
that both reduce, if a rank's piece and the division before the sum are unchanged: the residual is
in units of gradients, whatever codec produced it. Others start at zero, as do all residuals of a
reduction that an exception interrupted while it wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp2.core.codecs.codec import Codec
from fsdp2.core.device.kernels import Kernels

DTYPE = torch.bfloat16


class Feedback:
    """The residuals of one reduction, which sends ``width`` numbers to each rank.

    ``places`` says where each member's numbers begin among these, and how many there are. ``units``
    of residuals are how many ranks gradients are sent to, and what divides them before: a residual
    may be taken over for another of equal units.
    """

    def __init__(
        self,
        codec: Codec,
        units: tuple[int, float | None],
        width: int,
        places: Sequence[tuple[int, int]],
        kernels: Kernels,
    ) -> None:
        self._codec, self._kernels, self._width = codec, kernels, width
        self.units = units
        self.places = tuple(places)
        self._residual: Tensor | None = None
        self._own: Tensor | None = None  # the columns of members
        self._torn = False  # while it is neither the old one nor the new one

    @property
    def is_zero(self) -> bool:
        """Whether there is nothing yet to feed back."""
        return self._residual is None or self._torn

    def columns(self) -> list[Tensor]:
        """The residuals of each member, [ranks, n]: views of the next reduction's addends."""
        residual = self.hold()
        return [residual.narrow(1, start, numel) for start, numel in self.places]

    def hold(self) -> Tensor:
        """The memory of residuals, allocated on COMPUTE if it does not exist."""
        if self._residual is None or self._torn:
            shape = (self.units[0], self._width)
            # Later backwards write it, which torch refuses for tensors of inference mode.
            with torch.inference_mode(False):
                self._hold(self._kernels.zeros(shape, DTYPE, "residuals"))
            self._torn = False
        assert self._residual is not None
        return self._residual

    def _hold(self, residual: Tensor) -> None:
        end = max(start + numel for start, numel in self.places)
        self._residual, self._own = residual, residual.narrow(1, 0, end)

    def take_over(self, members: Sequence[object], former: Sequence[Fed]) -> None:
        """Take over the residuals of earlier reductions, with their members, for equal members."""
        there = [(m, old) for m, old in former if not old.is_zero and old.units == self.units]
        for others, old in there:
            if (old.places, old._width) == (self.places, self._width) and [*members] == [*others]:
                # Equal places: the memory itself, which the former does not use again.
                self._hold(old.hold())
                return
        known = {
            id(member): column
            for others, old in there
            for member, column in zip(others, old.columns(), strict=True)
        }
        for member, (start, numel) in zip(members, self.places, strict=True):
            source = known.get(id(member))
            if source is not None and source.shape[1] == numel:
                self._kernels.copy(self.hold().narrow(1, start, numel), source)

    def encode(self, message: Tensor, rows: Tensor) -> None:
        """Encode gradients and residuals, on REDUCE, into ``message``, [ranks, bytes]; ``rows``,
        [ranks, n], are the gradients, and afterwards the rounding errors.
        """
        residual, own, transform = self._residual, self._own, self._kernels.transform
        assert residual is not None
        assert own is not None
        self._kernels.add_many([rows], [residual])
        transform(self._codec.encode, message, rows)
        transform(self._codec.take_off, rows, message)
        self._torn = True
        transform(keep_finite, own, rows)
        self._torn = False


def keep_finite(residual: Tensor, rest: Tensor) -> None:
    """Keep the rounding errors of as many columns; 0 for those that are not finite."""
    residual.copy_(rest[:, : residual.shape[1]]).nan_to_num_(0.0, 0.0, 0.0)


Fed = tuple[Sequence[object], Feedback]
"""The members of a reduction, and its feedback."""
