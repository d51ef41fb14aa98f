"""How a segment's shards become gathered parameters.

    Coalesced   shard ─(cast)─> staging ══ one launch, one all-gather a parameter ══> slots
                no copy afterwards; no staging where shard and compute dtype agree
    Packed      shard ─(cast)─> own row of [ranks, n] ══ one all-gather ══> rows ── copy ──> slots
    Local       shard is the parameter; or ── cast ──> slots

A transport is bound to buffers once; a gather then only makes the calls below, in this order, on
the lanes that the group chooses:

    acquire   allocate what the collective needs          COMPUTE
    copy_in   cast                                        COPY_IN
    gather    the collective                              ALL_GATHER
    copy_out  put pieces in place                         COMPUTE
    release   free what only the collective needed        COMPUTE
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp2.core.collectives import Collectives
from fsdp2.core.kernels import Kernels
from fsdp2.core.layout import Segment, Slot, Transport


class SegmentTransport:
    """What all transports share: the segment's views of the group's two buffers.

    Attributes:
        casts: whether copy_in does anything.
        early: whether the gathered buffer must be there before the collective.
        communicates: whether there is a collective.
    """

    casts = False
    early = False
    communicates = True

    def __init__(
        self, segment: Segment, shard: Any, full: Any, collectives: Collectives, kernels: Kernels
    ) -> None:
        self.segment = segment
        self.collectives = collectives
        self.kernels = kernels
        self._shard = shard
        self._full = full
        self._itemsize: int = segment.full_dtype.itemsize  # type: ignore[attr-defined]  # a dtype
        self.casts = segment.shard_dtype != segment.full_dtype
        self._wire: Any = segment.full_dtype  # what copies and collectives see

    def gathered(self, slot: Slot) -> Any:
        """The tensor of the gathered parameter: its global shape, over the gathered buffer."""
        start = self.segment.full_byte_offset + slot.full_offset * self._itemsize
        return self._full.view(self.segment.full_dtype, start, slot.shape)

    def acquire(self) -> None:
        """Allocate what only the collective needs."""

    def copy_in(self) -> None:
        """Cast the shards."""

    def gather(self) -> Any:
        """Run the collective; returns what must be waited for, or None."""

    def copy_out(self) -> None:
        """Put the pieces in place."""

    def release(self) -> None:
        """Free what ``acquire`` allocated."""

    def _shard_flat(self) -> Any:
        segment = self.segment
        return self._shard.view(
            segment.shard_dtype, segment.shard_byte_offset, (segment.shard_numel,)
        )

    def _slot_view(
        self,
        slot: Slot,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> Any:
        start = self.segment.full_byte_offset + (slot.full_offset + offset) * self._itemsize
        return self._full.view(self._wire, start, shape, strides)


class CoalescedTransport(SegmentTransport):
    """Every parameter is gathered straight into its slot."""

    early = True

    def __init__(
        self, segment: Segment, shard: Any, full: Any, collectives: Collectives, kernels: Kernels
    ) -> None:
        super().__init__(segment, shard, full, collectives, kernels)
        self._flat = self._shard_flat()
        if self.casts:
            nbytes = segment.shard_numel * self._itemsize
            self._staging = kernels.transient(nbytes, "all-gather input")
            self._target = self._staging.view(segment.full_dtype, 0, (segment.shard_numel,))
            source = self._target
        else:
            self._staging = None
            source = self._flat
        sizes = [slot.shard_numel for slot in segment.slots]
        if segment.tail:
            sizes.append(segment.tail)
        self._inputs = list(kernels.pieces(source, sizes))[: len(segment.slots)]
        self._outputs = [self._slot_view(s, (s.full_numel,)) for s in segment.slots]
        if self._staging is not None:
            self._staging.release()

    def acquire(self) -> None:
        if self._staging is not None:
            self._staging.acquire()

    def copy_in(self) -> None:
        self.kernels.copy(self._target, self._flat)

    def gather(self) -> Any:
        return self.collectives.all_gather_many(self._outputs, self._inputs)

    def release(self) -> None:
        if self._staging is not None:
            self._staging.release()


class PackedTransport(SegmentTransport):
    """All shards travel together, rank-major; a copy puts them into their slots.

    The collective's output is [ranks, n]; this rank's input is its own row of it where the shard
    is cast, else the flat shard itself.
    """

    def __init__(
        self, segment: Segment, shard: Any, full: Any, collectives: Collectives, kernels: Kernels
    ) -> None:
        super().__init__(segment, shard, full, collectives, kernels)
        ranks, width = collectives.size, segment.shard_numel
        self.communicates = width > 0  # a segment of empty parameters has nothing to say
        if not self.casts and self._itemsize == 1:
            self._wire = torch.uint8  # gloo knows no 8-bit floats
        self._flat = shard.view(
            segment.shard_dtype if self.casts else self._wire,
            segment.shard_byte_offset,
            (segment.shard_numel,),
        )
        self._packed = kernels.transient(ranks * width * self._itemsize, "all-gather output")
        self._output = self._packed.view(self._wire, 0, (ranks * width,))
        if self.casts:
            start = collectives.rank * width * self._itemsize
            self._input = self._packed.view(segment.full_dtype, start, (width,))
        else:
            self._input = self._flat
        rows = [slot for slot in segment.slots if slot.dim == 0 and slot.shard_numel]
        self._sizes = [slot.shard_numel for slot in rows]
        self._columns = self._packed.view(self._wire, 0, (ranks, sum(self._sizes)), (width, 1))
        self._rows = [self._slot_view(slot, (ranks, slot.shard_numel)) for slot in rows]
        self._targets: list[Any] = []
        self._sources: list[Any] = []
        for slot in segment.slots:
            if slot.dim != 0:
                self._add_moves(slot)
        self._packed.release()

    def acquire(self) -> None:
        self._packed.acquire()

    def copy_in(self) -> None:
        self.kernels.copy(self._input, self._flat)

    def gather(self) -> Any:
        return self.collectives.all_gather(self._output, self._input)

    def copy_out(self) -> None:
        if self._sizes:
            self.kernels.split_copy(self._columns, self._sizes, self._rows)
        if self._targets:
            self.kernels.copy_many(self._targets, self._sources)

    def release(self) -> None:
        self._packed.release()

    def _add_moves(self, slot: Slot) -> None:
        """Two strided copies at most: the ranks with a whole piece, and the one with a part."""
        for ranks, first, length in shard_blocks(slot):
            inner, outer = slot.inner, slot.outer
            shape = (ranks, outer, length, inner)
            strides = (slot.chunk * inner, slot.shape[slot.dim] * inner, inner, 1)
            offset = first * slot.chunk * inner
            self._targets.append(self._slot_view(slot, shape, strides, offset))
            start = (first * self.segment.shard_numel + slot.shard_offset) * self._itemsize
            strides = (self.segment.shard_numel, length * inner, inner, 1)
            self._sources.append(self._packed.view(self._wire, start, shape, strides))


def shard_blocks(slot: Slot) -> list[tuple[int, int, int]]:
    """(number of ranks, first rank, rows) of the ranks that hold equally much, none left out.

    Example: dim of 5 on 4 ranks, pieces 2 2 1 0: [(2, 0, 2), (1, 2, 1)].
    """
    blocks = []
    whole = slot.whole_ranks()
    if whole:
        blocks.append((whole, 0, slot.chunk))
    rest = slot.shape[slot.dim] - whole * slot.chunk
    if rest:
        blocks.append((1, whole, rest))
    return [block for block in blocks if slot.outer * slot.inner]


class LocalTransport(SegmentTransport):
    """One rank: the shard is the parameter, or is cast into its slot."""

    communicates = False

    def __init__(
        self, segment: Segment, shard: Any, full: Any, collectives: Collectives, kernels: Kernels
    ) -> None:
        super().__init__(segment, shard, full, collectives, kernels)
        self._flat = self._shard_flat()
        self._target: Any = None
        if self.casts:
            self._target = full.view(
                segment.full_dtype, segment.full_byte_offset, (segment.shard_numel,)
            )

    def gathered(self, slot: Slot) -> Any:
        if self.casts:
            return super().gathered(slot)
        segment = self.segment
        start = segment.shard_byte_offset + slot.shard_offset * self._itemsize
        return self._shard.view(segment.shard_dtype, start, slot.shape)

    def copy_out(self) -> None:
        if self.casts:
            self.kernels.copy(self._target, self._flat)


TRANSPORTS: dict[Transport, type[SegmentTransport]] = {
    Transport.COALESCED: CoalescedTransport,
    Transport.PACKED: PackedTransport,
    Transport.LOCAL: LocalTransport,
}
