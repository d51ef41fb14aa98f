"""The all-gather of a group: which operations each segment has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2.core.custom_collectives import AllGather
from fsdp2.core.device.buffers import Buffer, TransientBuffer
from fsdp2.core.device.collectives import Collectives
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.gather.custom import custom
from fsdp2.core.gather.program import Gather
from fsdp2.core.gather.segments import (
    KeptRows,
    Pair,
    SegmentViews,
    coalesced,
    local,
    one_slot,
    packed,
)
from fsdp2.core.layout.layout import Segment, Transport, straight_into_slots

Part = tuple[Gather, KeptRows | None]
"""The operations of a segment, and its rows if they stay."""


def make_gathers(
    segments: Sequence[Segment],
    shard: Buffer,
    full: TransientBuffer,
    collectives: Collectives,
    kernels: Kernels,
    comm: AllGather | None,
    device: torch.device,
    codec: str | None = None,
    differences: bool = False,
    keeps: bool = False,
) -> list[Part]:
    """The operations of each segment, in order, and the rows that the next all-gathers reuse.

    They are those of all segments together, if the user provides a collective; the parameters have
    the same slots in any case. A single rank gathers nothing. ``shard`` is the flat shard, or the
    device's copy of it; ``full`` is allocated.

    Args:
        differences: whether messages of coded segments are differences to the last values; rows of
            the others are then kept, too.
        keeps: whether rows of all segments without a codec are kept for the next all-gathers.
    """
    found: list[Part] = []
    theirs: list[SegmentViews] = []
    carriers: list[tuple[int, SegmentViews]] = []
    waiting: dict[torch.dtype, list[tuple[Gather, Pair]]] = {}
    straight = straight_into_slots(segments)
    for segment in segments:
        place = SegmentViews(segment, shard, full, collectives, kernels)
        transport, kept = segment.transport, None
        if transport is Transport.LOCAL:
            gather = local(place)
        elif comm is not None and transport is not Transport.CODED:
            theirs.append(place)
            continue
        elif not segment.shard_numel:  # empty parameters have nothing to say
            gather = Gather(place.parameters())
        elif transport is Transport.CODED:
            gather, kept = _coded(place, codec, differences)
        elif keeps or differences:
            kept = KeptRows(place)
            gather = kept.fresh()
        elif transport is Transport.COALESCED:
            carriers.append((len(found), place))
            gather = Gather()  # until it is known what its launch takes along
        elif straight:
            gather = one_slot(place)
        else:
            gather, pair = packed(place)
            waiting.setdefault(segment.full_dtype, []).append((gather, pair))
        found.append((gather, kept))
    for at, place in carriers:
        pairs: list[Pair] = []
        if carried := waiting.get(place.segment.full_dtype):
            gather, pair = carried.pop(0)
            # The carrier's launch sends it; the copies out of its rows remain here.
            gather.collectives = ()
            pairs.append(pair)
        found[at] = coalesced(place, pairs), None
    if theirs and comm is not None:
        # Together: a user's collective is called once per group, as torch's FSDP2 does.
        found.append((custom(theirs, comm, device), None))
    return found


def _coded(place: SegmentViews, name: str | None, differences: bool) -> Part:
    """The modules of codecs are loaded at their first use."""
    from fsdp2.core.gather.coded import CODED, encoded

    assert name is not None
    if not differences:
        return encoded(place, CODED[name]), None
    from fsdp2.core.gather.differences import ReferenceRows

    kept = ReferenceRows(place, CODED[name])
    return kept.fresh(), kept
