"""Which transport a segment has: the table of all, and what chooses.

Formats of fewer bytes have a separate table, `fsdp2.core.gather.coded.CODED`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2.core.custom_collectives import AllGather
from fsdp2.core.device.buffers import Buffer, TransientBuffer
from fsdp2.core.device.collectives import Collectives
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.gather.kept_rows import KeptTransport
from fsdp2.core.gather.transport import (
    BoundPackedTransport,
    CoalescedTransport,
    CustomTransport,
    GatherTransport,
    LocalTransport,
    OneSlotTransport,
    SegmentTransport,
)
from fsdp2.core.layout.layout import Segment, Transport, straight_into_slots

TRANSPORTS: dict[Transport, type[SegmentTransport]] = {
    Transport.COALESCED: CoalescedTransport,
    Transport.PACKED: BoundPackedTransport,
    Transport.LOCAL: LocalTransport,
}
"""Transports of a segment that is sent without a codec.

A packed segment with one parameter may have a `OneSlotTransport` (`straight_into_slots`).
"""


def make_transports(
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
) -> list[GatherTransport]:
    """A transport for each segment; one for all, if the user provides a collective.

    Whatever gathers them, the parameters have the same slots. A single rank gathers nothing.

    Args:
        segments: those of parameters without all-gather hooks.
        shard: the flat shard, or the device's copy of it.
        full: the gathered buffer, allocated.
        collectives: of the ranks that gather.
        kernels: memory and copies.
        comm: the user's all-gather.
        device: where its buffers are.
        codec: name of the transport of coded segments.
        differences: whether messages of coded segments are differences to the last values; rows of
            the others are then kept, too.
        keeps: whether rows of all segments without a codec are kept for the next all-gathers.
    """
    parts: list[SegmentTransport] = []
    custom: list[Segment] = []
    straight = straight_into_slots(segments)
    for segment in segments:
        coded = segment.transport is Transport.CODED
        if comm is not None and not coded and segment.transport is not Transport.LOCAL:
            custom.append(segment)
            continue
        if coded:
            kind = coded_gather(codec, differences)
        elif (keeps or differences) and segment.transport is not Transport.LOCAL:
            kind = KeptTransport
        elif straight and segment.transport is Transport.PACKED:
            kind = OneSlotTransport
        else:
            kind = TRANSPORTS[segment.transport]
        parts.append(kind(segment, shard, full, collectives, kernels))
    _launch_together(parts)
    found: list[GatherTransport] = [*parts]
    if custom and comm is not None:
        found.append(CustomTransport(custom, shard, full, collectives, kernels, comm, device))
    return found


def coded_gather(name: str | None, differences: bool = False) -> type[SegmentTransport]:
    """The transport of a format, which is loaded at its first use."""
    assert name is not None
    if differences:
        from fsdp2.core.gather.differences import DIFFERENCES

        return DIFFERENCES[name]
    from fsdp2.core.gather.coded import CODED

    return CODED[name]


def _launch_together(transports: Sequence[SegmentTransport]) -> None:
    """Join packed segments with coalesced ones if their dtypes on the wire are equal."""
    coalesced = [t for t in transports if isinstance(t, CoalescedTransport)]
    for packed in transports:
        if type(packed) is BoundPackedTransport and packed.communicates:
            dtype = packed.segment.full_dtype
            carrier = next((t for t in coalesced if t.segment.full_dtype == dtype), None)
            if carrier is not None:
                carrier.carry(packed)
                coalesced.remove(carrier)  # it carries one
