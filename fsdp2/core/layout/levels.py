"""Pieces of pieces: where masters lie that are sharded over all ranks of a mesh of two levels.

    rank (node 0, 0)  rows 0-3, master 0-1        rank (node 0, 1)  rows 4-7, master 4-5
    rank (node 1, 0)  rows 0-3, master 2-3        rank (node 1, 1)  rows 4-7, master 6-7

A group's layout says how its rows lie in a node: it is what a gather inside reads (*node rows*, in
the compute dtype) and what a reduction inside leaves. The layout of its pieces says how masters lie
in the flat shard, and where in the node rows each belongs. The ranks that share rows have the same
pieces. Others may have shorter ones, and then other transports between nodes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Set
from dataclasses import dataclass, replace

import torch

from fsdp2.core.layout.layout import (
    COLLECTIVE_ALIGN_BYTES,
    SLOT_ALIGN_BYTES,
    Cut,
    GroupLayout,
    Segment,
    Slot,
    Transport,
    repacked,
)
from fsdp2.core.layout.mesh import MeshAxes
from fsdp2.core.pieces import round_up


@dataclass(frozen=True)
class PieceSlot(Slot):
    """A piece of a rank's rows, its "gathered" form without padding; ``inside``: in the layout."""

    inside: Slot
    inside_rank: int

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether the pieces are contiguous in the rows: there is no room for padding."""
        return self.even and self.cut.in_order(self.shape, self.world_size)

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """``rank``'s piece of the rows: a view of the whole parameter."""
        return super().part(self.inside.part(whole, self.inside_rank), rank)


def own_slot(axes: MeshAxes, shape: tuple[int, ...], cut: Cut) -> Slot:
    """A parameter's pieces, wherever they lie: this rank's is that of ``axes.piece_rank``."""
    slot = Slot(0, shape, cut, axes.size, 0, 0)
    if not axes.levels:
        return slot
    rows = slot.local_shape(axes.rank)
    return PieceSlot(0, rows, Cut(cut.dim), axes.copies, 0, 0, slot, axes.rank)


def node_segments(layout: GroupLayout) -> list[Segment]:
    """The layout's segments, gathered from node rows, one after another."""
    segments: list[Segment] = []
    start = 0
    for segment in layout.segments:
        # Node rows are in the compute dtype: the all-gather between nodes has cast them.
        found = replace(segment, shard_dtype=segment.full_dtype, shard_byte_offset=start)
        segments.append(found)
        nbytes = found.shard_numel * found.full_dtype.itemsize
        start = round_up(start + nbytes, COLLECTIVE_ALIGN_BYTES)
    return segments


def gaps(rows: Segment, rank: int) -> list[tuple[int, int]]:
    """Start and length of each stretch of a rank's node rows that belongs to no parameter."""
    found = []
    end = 0
    for slot in sorted(rows.slots, key=lambda slot: slot.shard_offset):
        if slot.shard_offset > end:
            found.append((end, slot.shard_offset - end))
        end = slot.shard_offset + math.prod(slot.local_shape(rank))
    if rows.shard_numel > end:
        found.append((end, rows.shard_numel - end))
    return found


def pieces_layout(
    layout: GroupLayout, rank: int, ranks: int, coalesces: bool, coded: Set[int] = frozenset()
) -> GroupLayout:
    """How a rank's rows are split once more: a segment for each of the layout's, or two.

    ``ranks``, one per node, share the rows of ``rank``, a position in the node; ``coded`` are
    positions in the group of parameters that are encoded between nodes.
    """
    segments: list[Segment] = []
    shard_bytes = full_bytes = 0
    for segment, rows in zip(layout.segments, node_segments(layout), strict=True):
        assert segment.transport is not Transport.EXTENSION  # refused before
        # Coded ones apart, because a segment has one transport.
        for part in (False, True):
            members = [slot for slot in segment.slots if (slot.index in coded) is part]
            if members:
                found = _pieces(
                    replace(segment, slots=tuple(members)), rows, rank, ranks, coalesces
                )
                # Empty messages have nothing to encode.
                if part and found.shard_numel:
                    found = replace(found, transport=Transport.CODED)
                segments.append(replace(found, shard_byte_offset=shard_bytes))
                nbytes = found.shard_numel * found.shard_dtype.itemsize
                shard_bytes = round_up(shard_bytes + nbytes, SLOT_ALIGN_BYTES)
        full_bytes = rows.shard_byte_offset + rows.shard_numel * rows.full_dtype.itemsize
    # As in `build_layout`: nothing follows that must be aligned.
    if len(segments) == 1:
        shard_bytes = segments[0].shard_numel * segments[0].shard_dtype.itemsize
    world = layout.world_size * ranks
    return GroupLayout(world, tuple(segments), shard_bytes, full_bytes, layout.payload_bytes)


def _pieces(segment: Segment, rows: Segment, rank: int, ranks: int, coalesces: bool) -> Segment:
    cut = [
        PieceSlot(s.index, s.local_shape(rank), Cut(s.dim), ranks, 0, s.shard_offset, s, rank)
        for s in segment.slots
    ]
    itemsize = min(segment.shard_dtype.itemsize, segment.full_dtype.itemsize)
    transport, slots, numel = repacked(cut, itemsize, coalesces)
    return Segment(
        transport=transport,
        shard_dtype=segment.shard_dtype,
        full_dtype=segment.full_dtype,
        slots=slots,
        shard_numel=numel,
        full_numel=rows.shard_numel,
        shard_byte_offset=0,
        full_byte_offset=rows.shard_byte_offset,
    )
