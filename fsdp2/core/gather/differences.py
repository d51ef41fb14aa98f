"""How a segment is sent as differences to the values gathered last, its reference.

    own shard - own row of the reference ── encode ──> own message ══ one all-gather ══> messages
    reference + decoded messages = reference ── copy, as packed ──> slots

    reference   [ranks, n] in the compute dtype, on every rank: it stays between gathers

Weights change little from step to step: a difference has small numbers, which need few bits. All
ranks, including the owner, add the same messages to the same reference with the same operators, so
that all have equal bits. The rounding error of a message is part of the owner's next difference:
errors do not accumulate, and the reference differs from the weights by the error of the last
message, and by the rounding of the compute dtype.

    the reference is                  an all-gather is
    absent: first, or dropped         one exact all-gather of the shards, into the reference
    restored, only own rows           one exact all-gather of these rows, and one of differences
    present                           one all-gather of differences

If it is not finite, as a weight was, all ranks treat it as zero from the next message on: it
follows the weights again. An unused message, after a wrong prefetch, is added too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fsdp2.core.codecs.blocks import Bytes, Nibbles
from fsdp2.core.codecs.codec import Codec
from fsdp2.core.device.collectives import Work
from fsdp2.core.gather.kept_rows import KeptTransport
from fsdp2.core.gather.messages import Messages
from fsdp2.core.layout.layout import Slot

MESSAGES = "coded differences"

AT_A_TIME = 1 << 22
"""Numbers that are decoded at a time, or one rank's: a codec takes about 8 bytes for each."""


class DifferenceGather(KeptTransport):
    """Messages of a codec hold differences.

    Attributes:
        codec: what makes them.
    """

    codec: ClassVar[Codec]

    def _bind(self) -> None:
        super()._bind()
        segment, ranks, rank = self.segment, self.collectives.size, self.collectives.rank
        self.casts = True  # it encodes in front of the collective
        self._known = self._restored = False  # all of the reference; own rows alone
        self._exact = self._codes = False  # what a gather that has begun brings
        width = segment.shard_numel
        nbytes = self.codec.nbytes(width)
        self._messages = Messages(nbytes, self.collectives, self.kernels, MESSAGES, width)
        shard = (segment.shard_dtype, segment.shard_byte_offset, (1, width))
        self._shards = self._shard.view(*shard)
        self._packed.acquire()
        self._reference = self._packed.view(segment.full_dtype, 0, (ranks, width))
        start = rank * width * self._itemsize
        self._own_row = self._packed.view(segment.full_dtype, start, (1, width))
        self._gather_all = self.collectives.bind_all_gather(
            self._packed.view(segment.full_dtype, 0, (ranks * width,)),
            self._packed.view(segment.full_dtype, start, (width,)),
        )
        self._packed.release()
        self._messages.memory.release()

    @classmethod
    def row_bytes(cls, numel: int, itemsize: int) -> int:
        return cls.codec.nbytes(numel)

    # ---- a gather

    def acquire(self) -> None:
        super().acquire()
        self._exact, self._codes = not self._known, self._known or self._restored
        if self._codes:
            self._messages.memory.acquire()

    def copy_in(self) -> None:
        kernels = self.kernels
        if not self._codes:
            kernels.copy(self._own_row, self._shards)
            return
        messages = self._messages
        kernels.copy(messages.numbers, self._shards)
        kernels.transform(subtract, messages.numbers, self._own_row)
        kernels.transform(self.codec.encode, messages.own, messages.numbers)

    def gather(self) -> Work | None:
        if not self._exact:
            return self._messages.gather()
        first = self._gather_all()
        second = self._messages.gather() if self._codes else None
        return _Both(first, second) if first is not None and second is not None else first

    def copy_out(self) -> None:
        self._arrive()
        super().put()

    def release(self) -> None:
        self._arrive()  # unless it has
        self._messages.memory.release()

    def _arrive(self) -> None:
        """Add the gathered rows to the reference, whether they were used or not."""
        if self._codes:
            self.kernels.transform(self.add, self._reference, self._messages.every)
        if self._codes or self._exact:
            self._known, self._restored = True, False
        self._exact = self._codes = False

    def add(self, reference: Tensor, messages: Tensor) -> None:
        """Add decoded messages, in fp32, some rows at a time, because they need separate memory."""
        ranks, width = reference.shape
        rows = max(AT_A_TIME // width, 1) if width else ranks
        for start in range(0, ranks, rows):
            part = reference[start : start + rows]
            decoded = torch.empty(part.shape, dtype=torch.float32, device=part.device)
            self.codec.decode(decoded, messages[start : start + rows])
            part.nan_to_num_(0.0, 0.0, 0.0).add_(decoded)

    # ---- the reference

    @property
    def holds_rows(self) -> bool:
        return self._known or self._restored

    def follow(self, former: KeptTransport) -> None:
        super().follow(former)
        if isinstance(former, DifferenceGather):
            self._known, self._restored = former._known, former._restored

    def inherit(self, former: KeptTransport) -> None:
        """Let what was restored wait for its first gather, whichever of weights is loaded first.

        The reference that was gathered is of other weights: a difference to it would be large, and
        of few bits.
        """
        if isinstance(former, DifferenceGather) and former._restored:
            self.follow(former)

    def lose(self) -> None:
        self._known = self._exact = self._codes = False

    def own_rows(self) -> list[tuple[Slot, Tensor]]:
        """This rank's part of the reference, by parameter; empty where nothing was gathered."""
        if not self.holds_rows:
            return []
        row = self._own_row.view(-1)
        return [(slot, self._part(row, slot)) for slot in self.segment.slots]

    def restore(self, rows: Sequence[tuple[Slot, Tensor]]) -> None:
        """Let the next gather bring these rows first, and then a difference to them.

        Args:
            rows: what `own_rows` has returned, of all parameters.
        """
        self._packed.acquire()
        self._own_row.zero_()
        row = self._own_row.view(-1)
        for slot, saved in rows:
            self._part(row, slot).copy_(saved)
        self._known, self._restored = False, True

    def _part(self, row: Tensor, slot: Slot) -> Tensor:
        shape = slot.local_shape(self.collectives.rank)
        numel = torch.Size(shape).numel()
        return row.narrow(0, slot.shard_offset, numel).view(shape)


def subtract(numbers: Tensor, reference: Tensor) -> None:
    """Numbers to be added to ``reference``, as `DifferenceGather` adds it."""
    numbers.sub_(torch.nan_to_num(reference.float(), 0.0, 0.0, 0.0))


class _Both:
    """Two running collectives."""

    def __init__(self, first: Work, second: Work) -> None:
        self._works = first, second

    def wait(self) -> None:
        """Wait for both."""
        for work in self._works:
            work.wait()


class BytesDifferences(DifferenceGather):
    """In messages of 8-bit integers."""

    codec = Bytes()


class NibblesDifferences(DifferenceGather):
    """In messages of 4-bit integers."""

    codec = Nibbles()


DIFFERENCES: dict[str, type[DifferenceGather]] = {
    kind.codec.name: kind for kind in (BytesDifferences, NibblesDifferences)
}
"""The transports of segments that are sent as differences, by the name in `Wire.gather`."""
