"""Which transport a segment has: the table of all, and what chooses.

A codec is a file beside this one, and an entry in `TRANSPORTS` (docs/design.md, "A transport of
your own").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2.core.custom_collectives import AllGather
from fsdp2.core.device.buffers import Buffer, TransientBuffer
from fsdp2.core.device.collectives import Collectives
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.gather.transport import (
    BoundPackedTransport,
    CoalescedTransport,
    CustomTransport,
    GatherTransport,
    LocalTransport,
    OneSlotTransport,
    PackedTransport,
    SegmentTransport,
)
from fsdp2.core.layout.layout import Segment, Transport, straight_into_slots

TRANSPORTS: dict[Transport | str, type[SegmentTransport]] = {
    Transport.COALESCED: CoalescedTransport,
    Transport.PACKED: BoundPackedTransport,
    Transport.LOCAL: LocalTransport,
}
"""Those of a segment; a codec has a name, which `GroupOptions.gather_codec` gives.

A packed segment of one parameter may have a `OneSlotTransport` (`straight_into_slots`).
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
) -> list[GatherTransport]:
    """A transport for each segment; one for all, if the user brings a collective.

    Whatever gathers them, the parameters have the same slots. One rank has nothing to gather.

    Args:
        segments: those of parameters without all-gather hooks.
        shard: the flat shard, or the device's copy of it.
        full: the gathered buffer, allocated.
        collectives: of the ranks that gather.
        kernels: memory and copies.
        comm: the user's all-gather.
        device: where its buffers are.
        codec: name of the transport of all segments, in place of theirs and of ``comm``.
    """
    parts: list[SegmentTransport] = []
    custom: list[Segment] = []
    straight = straight_into_slots(segments)
    for segment in segments:
        local = segment.transport is Transport.LOCAL
        if comm is not None and codec is None and not local:
            custom.append(segment)
            continue
        kind = segment.transport if local or codec is None else codec
        made = OneSlotTransport if straight and kind is Transport.PACKED else TRANSPORTS[kind]
        parts.append(made(segment, shard, full, collectives, kernels))
    _launch_together(parts)
    found: list[GatherTransport] = [*parts]
    if custom and comm is not None:
        found.append(CustomTransport(custom, shard, full, collectives, kernels, comm, device))
    return found


def _launch_together(transports: Sequence[SegmentTransport]) -> None:
    """Let what is packed go along with what is coalesced, where dtypes on the wire agree."""
    coalesced = [t for t in transports if isinstance(t, CoalescedTransport)]
    for packed in transports:
        if isinstance(packed, PackedTransport) and packed.communicates:
            dtype = packed.segment.full_dtype
            carrier = next((t for t in coalesced if t.segment.full_dtype == dtype), None)
            if carrier is not None:
                carrier.carry(packed)
                coalesced.remove(carrier)  # it carries one
