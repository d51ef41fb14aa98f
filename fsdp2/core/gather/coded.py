"""How a segment is gathered in fewer bytes: in rows that are messages of a codec.

    shard ── encode ──> own message ══ one all-gather ══> messages ── decode ──> [ranks, n]
                                                         ── copy, as packed ──> slots

A rank decodes its own message, too: all ranks compute with the same bits. A segment may be sent as
differences to the values gathered last (`ReferenceRows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fsdp2.core.codecs.codec import ALIGNMENT, NUMBERS, Codec
from fsdp2.core.device.collectives import Collectives, Launch, Work
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.gather.program import Gather
from fsdp2.core.gather.segments import KeptRows, SegmentViews, packed_rows
from fsdp2.core.layout.layout import Slot
from fsdp2.core.pieces import round_up

MESSAGES, DIFFERENCES = "coded shards", "coded differences"


def encoded(place: SegmentViews, codec: Codec) -> Gather:
    segment, kernels = place.segment, place.kernels
    assert {segment.shard_dtype, segment.full_dtype} <= {*NUMBERS}
    ranks, width = place.collectives.size, segment.shard_numel
    rows = packed_rows(place)
    messages = Messages(codec.nbytes(width), place.collectives, kernels, MESSAGES)
    numbers = rows.memory.view(segment.full_dtype, 0, (ranks, width))
    free = [rows.memory.release, messages.memory.release]
    found = Gather(
        place.parameters(),
        [rows.memory.acquire, messages.memory.acquire],
        [partial(kernels.transform, codec.encode, messages.own, place.shards((1, width)))],
        [messages.gather],
        [partial(kernels.transform, codec.decode, numbers, messages.every), *rows.put],
        free,
    )
    # Views exist now. Each gather allocates again, on COMPUTE (I2).
    for release in free:
        release()
    return found


class Messages:
    """The messages of a segment's all-gathers: ``every`` [ranks, nbytes] of uint8, this rank's
    ``own``, and room after them for ``numbers``, [1, scratch] of fp32.

    ``memory`` is allocated until it is released once, when its users are bound.
    """

    def __init__(
        self, nbytes: int, collectives: Collectives, kernels: Kernels, name: str, scratch: int = 0
    ) -> None:
        ranks, start = collectives.size, collectives.rank * nbytes
        behind = round_up(ranks * nbytes, ALIGNMENT)
        self.memory = memory = kernels.transient(behind + 4 * scratch, name)
        self.every = memory.view(torch.uint8, 0, (ranks, nbytes))
        self.own = memory.view(torch.uint8, start, (1, nbytes))
        self.numbers = memory.view(torch.float32, behind, (1, scratch))
        self.gather: Launch = collectives.bind_all_gather(
            memory.view(torch.uint8, 0, (ranks * nbytes,)),
            memory.view(torch.uint8, start, (nbytes,)),
        )


# ---- differences to the values gathered last

AT_A_TIME = 1 << 22
"""Numbers that are decoded at a time, or one rank's: a codec takes about 8 bytes for each."""


class ReferenceRows(KeptRows):
    """The reference of a segment, and the messages of a codec that hold differences to it.

        own shard - own row of the reference ── encode ──> own message ══ all-gather ══> messages
        reference + decoded messages = reference ── copy, as packed ──> slots
        reference   [ranks, n] in the compute dtype, on every rank: it stays between gathers

    Weights change little from step to step: a difference has small numbers, which need few bits.
    All ranks, including the owner, add the same messages to the same reference with the same
    operators, so that all have equal bits. The rounding error of a message is part of the owner's
    next difference: errors do not accumulate.

        the reference is                  an all-gather is
        absent: first, or dropped         one exact all-gather of the shards, into the reference
        restored, only own rows           one exact all-gather of these rows, and one of differences
        present                           one all-gather of differences

    If it is not finite, as a weight was, all ranks treat it as zero from the next message on: it
    follows the weights again. An unused message, after a wrong prefetch, is added too.
    """

    def __init__(self, place: SegmentViews, codec: Codec) -> None:
        super().__init__(place)
        segment, memory, collectives = place.segment, self.rows.memory, place.collectives
        assert {segment.shard_dtype, segment.full_dtype} <= {*NUMBERS}
        self._codec, self._kernels = codec, place.kernels
        self._known = self._restored = False  # all of the reference; own rows alone
        self._exact = self._codes = False  # what a gather that has begun brings
        ranks, rank, width = collectives.size, collectives.rank, segment.shard_numel
        nbytes = codec.nbytes(width)
        self._messages = Messages(nbytes, collectives, place.kernels, DIFFERENCES, width)
        self._shards = place.shards((1, width))
        start, dtype = rank * width * segment.full_dtype.itemsize, segment.full_dtype
        self._reference = memory.view(dtype, 0, (ranks, width))
        self._own_row = memory.view(dtype, start, (1, width))
        self._gather_all = collectives.bind_all_gather(
            memory.view(dtype, 0, (ranks * width,)), memory.view(dtype, start, (width,))
        )

    def fresh(self) -> Gather:
        """The all-gather that brings them. Called once, while their memory is allocated."""
        self.rows.memory.release()
        self._messages.memory.release()
        return Gather(
            self.place.parameters(),
            [self._acquire],
            [self._copy_in],
            [self._gather_rows, self._gather_messages],
            [self._arrive, *self.rows.put],
            [self._release],
            kept=self,
        )

    # ---- a gather

    def _acquire(self) -> None:
        self.rows.memory.acquire()
        self._exact, self._codes = not self._known, self._known or self._restored
        if self._codes:
            self._messages.memory.acquire()

    def _copy_in(self) -> None:
        kernels = self._kernels
        if not self._codes:
            kernels.copy(self._own_row, self._shards)
            return
        messages = self._messages
        kernels.copy(messages.numbers, self._shards)
        kernels.transform(subtract, messages.numbers, self._own_row)
        kernels.transform(self._codec.encode, messages.own, messages.numbers)

    def _gather_rows(self) -> Work | None:
        return self._gather_all() if self._exact else None

    def _gather_messages(self) -> Work | None:
        return self._messages.gather() if self._codes else None

    def _release(self) -> None:
        self._arrive()  # unless it has
        self._messages.memory.release()

    def _arrive(self) -> None:
        """Add the gathered rows to the reference, whether they were used or not."""
        if self._codes:
            self._kernels.transform(self.add, self._reference, self._messages.every)
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
            self._codec.decode(decoded, messages[start : start + rows])
            part.nan_to_num_(0.0, 0.0, 0.0).add_(decoded)

    # ---- the reference

    @property
    def holds_rows(self) -> bool:
        return self._known or self._restored

    def follow(self, former: KeptRows) -> None:
        super().follow(former)
        if isinstance(former, ReferenceRows):
            self._known, self._restored = former._known, former._restored

    def inherit(self, former: KeptRows) -> None:
        """Let what was restored wait for its first gather, whichever of weights is loaded first: a
        difference to the gathered reference, of other weights, would be large, and of few bits.
        """
        if isinstance(former, ReferenceRows) and former._restored:
            self.follow(former)

    def lose(self) -> None:
        # `_restored` stays: own rows are sent exactly again, so that all ranks agree.
        self._known = self._exact = self._codes = False

    def own_rows(self) -> list[tuple[Slot, Tensor]]:
        """This rank's part of the reference, by parameter; empty where nothing was gathered."""
        if not self.holds_rows:
            return []
        row = self._own_row.view(-1)
        return [(slot, self._part(row, slot)) for slot in self.place.segment.slots]

    def restore(self, rows: Sequence[tuple[Slot, Tensor]]) -> None:
        """Let the next gather bring these rows, of `own_rows`, and then a difference to them."""
        self.rows.memory.acquire()
        self._own_row.zero_()
        row = self._own_row.view(-1)
        for slot, saved in rows:
            self._part(row, slot).copy_(saved)
        self._known, self._restored = False, True

    def _part(self, row: Tensor, slot: Slot) -> Tensor:
        shape = slot.local_shape(self.place.collectives.rank)
        numel = torch.Size(shape).numel()
        return row.narrow(0, slot.shard_offset, numel).view(shape)


def subtract(numbers: Tensor, reference: Tensor) -> None:
    """Numbers to be added to ``reference``, as `ReferenceRows` adds it."""
    numbers.sub_(torch.nan_to_num(reference.float(), 0.0, 0.0, 0.0))
