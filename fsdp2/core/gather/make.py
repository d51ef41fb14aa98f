"""The all-gather of a group: which operations each segment has.

A user's collective (`set_custom_all_gather`) sends all segments packed, in a buffer of its own:

    shards ── cast or copy ──> own row of [ranks, n] ══ comm ══> rows ── copy ──> slots

The row holds the segments one after another: in their dtype if they share one, otherwise as bytes.
The buffer may be another one each time, so its views are created for each all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from fsdp2.core.custom_collectives import AllGather, checked_buffer
from fsdp2.core.device.buffers import Buffer, TransientBuffer
from fsdp2.core.device.collectives import Collectives, Work
from fsdp2.core.device.kernels import Kernels
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
) -> list[Gather]:
    """The operations of each segment, in order; with a user's ``comm``, those of all segments
    together. ``shard`` is the flat shard, or the device's
    copy of it; ``full`` is allocated. It ``keeps`` rows of all segments without a codec, as it does
    where messages of the others are ``differences``.
    """
    found: list[Gather] = []
    theirs: list[SegmentViews] = []
    carriers: list[tuple[int, SegmentViews]] = []
    waiting: dict[torch.dtype, list[tuple[Gather, Pair]]] = {}
    straight = straight_into_slots(segments)
    for segment in segments:
        place = SegmentViews(segment, shard, full, collectives, kernels)
        transport = segment.transport
        if transport is Transport.LOCAL:
            gather = local(place)
        elif comm is not None and transport is not Transport.CODED:
            theirs.append(place)
            continue
        elif not segment.shard_numel:  # empty parameters have nothing to say
            gather = Gather(place.parameters())
        elif transport is Transport.CODED:
            gather = _coded(place, codec, differences)
        elif keeps or differences:
            gather = KeptRows(place).fresh()
        elif transport is Transport.COALESCED:
            carriers.append((len(found), place))
            gather = Gather()  # until it is known what its launch takes along
        elif straight:
            gather = one_slot(place)
        else:
            gather, pair = packed(place)
            waiting.setdefault(segment.full_dtype, []).append((gather, pair))
        found.append(gather)
    for at, place in carriers:
        pairs: list[Pair] = []
        if carried := waiting.get(place.segment.full_dtype):
            gather, pair = carried.pop(0)
            # The carrier's launch sends it; the copies out of its rows remain here.
            gather.collectives = ()
            pairs.append(pair)
        found[at] = coalesced(place, pairs)
    if theirs and comm is not None:
        # Together: a user's collective is called once per group, as torch's FSDP2 does.
        found.append(custom(theirs, comm, device))
    return found


def _coded(place: SegmentViews, name: str | None, differences: bool) -> Gather:
    """The modules of codecs are loaded at their first use."""
    from fsdp2.core.codecs.codec import GATHERED
    from fsdp2.core.gather.coded import ReferenceRows, encoded

    assert name is not None
    if differences:
        return ReferenceRows(place, GATHERED[name]).fresh()
    return encoded(place, GATHERED[name])


# ---- by a collective of the user

Copies = tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]]
"""A segment's copies: into this rank's row of bytes, and out of the rows of all ranks."""


def custom(places: Sequence[SegmentViews], comm: AllGather, device: torch.device) -> Gather:
    parameters = [found for place in places for found in place.parameters()]
    nbytes, parts = 0, list[Copies]()
    for place in places:
        parts.append(_copies(place, nbytes))
        nbytes += place.segment.shard_numel * place.segment.full_dtype.itemsize
    if not nbytes:
        return Gather(parameters)
    dtypes = {place.segment.full_dtype for place in places}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    # Any of them will do: complex numbers are not converted for a user's collective.
    collectives, numel = places[0].collectives, nbytes // dtype.itemsize
    size, rank = collectives.size, collectives.rank
    buffers: list[torch.Tensor] = []  # of the all-gather that runs: the output, and its own row

    def acquire() -> None:
        output = checked_buffer(comm, size * numel, dtype, device)
        buffers[:] = output, output.narrow(0, rank * numel, numel)

    def copy_in() -> None:
        row = buffers[1].view(torch.uint8)
        for put, _ in parts:
            put(row)

    def gather() -> Work | None:
        return collectives.custom_all_gather(comm, *buffers)

    def copy_out() -> None:
        rows = buffers[0].view(torch.uint8).view(size, nbytes)
        for _, take in parts:
            take(rows)

    return Gather(parameters, [acquire], [copy_in], [gather], [copy_out], [buffers.clear])


def _copies(place: SegmentViews, start: int) -> Copies:
    """The copies of one segment, whose bytes in every rank's row begin at ``start``."""
    segment, kernels, flat = place.segment, place.kernels, place.shards()
    nbytes = segment.shard_numel * segment.full_dtype.itemsize
    in_order = [slot for slot in segment.slots if slot.in_order and slot.shard_numel]
    sizes, targets = [slot.shard_numel for slot in in_order], place.rows_of(in_order)
    blocks = [
        (slot, block) for slot in segment.slots if not slot.in_order for block in slot.blocks()
    ]
    block_targets = [place.block(slot, *block) for slot, block in blocks]

    def put(row: torch.Tensor) -> None:
        kernels.copy(row.narrow(0, start, nbytes).view(segment.full_dtype), flat)

    def take(rows: torch.Tensor) -> None:
        rows = rows.narrow(1, start, nbytes).view(place.wire)
        if sizes:
            kernels.split_copy(rows.narrow(1, 0, sum(sizes)), sizes, targets)
        sources = []
        for slot, (ranks, first, length) in blocks:
            shape = (slot.cut.bands, ranks, slot.outer, length, slot.inner)
            pieces = rows.view(slot.cut.bands, slot.per_band, rows.shape[1])
            pieces = pieces.narrow(1, first, ranks)
            sources.append(pieces.narrow(2, slot.shard_offset, prod(shape[2:])).view(shape))
        if sources:
            kernels.copy_many(block_targets, sources)

    return put, take
