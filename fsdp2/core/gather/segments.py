"""How a segment's shards become unsharded parameters: as they are, or by a user's collective.

    coalesced   shard ─(cast)─> own piece of its slot ══ one launch, an all-gather each ══> slots
                no copy afterwards; none before if shard and compute dtype agree (decision 17)
    packed      shard ─(cast)─> own row of [ranks, n] ══ one all-gather ══> rows ── copy ──> slots
                with coalesced ones of the same dtype it is part of their launch
    one slot    a packed segment of one parameter whose pieces are in order: straight into its slot
    local       one rank: the shard is the parameter; or ── cast ──> slots
    custom      shards ── cast or copy ──> own row of [ranks, n] ══ comm ══> rows ── copy ──> slots

Each is a function from the `SegmentViews` of a segment to the operations of a `Gather`; those of a
user's collective (`set_custom_all_gather`) are all segments', one after another in a row: in their
dtype if they share one, otherwise as bytes. Its buffer may be another one each time, so its views
are created for each all-gather. `keeping` selects. `packed_rows` is the common part of all
that are sent in rows, one per rank; `KeptRows` stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import torch

from fsdp2.core.custom_collectives import AllGather, checked_buffer
from fsdp2.core.device.buffers import Buffer, FlatBuffer, TransientBuffer, row_major
from fsdp2.core.device.collectives import Collectives, Work, collectives_of
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.gather.program import Gather, Run
from fsdp2.core.layout.layout import Segment, Slot


class SegmentViews:
    """A segment in the two buffers of its group, and what moves it from one to the other.

    ``shard`` is the flat shard, or the device's copy of it; ``full`` is allocated. It ``casts`` if
    shards have another dtype than ``wire``, which collectives and copies see.
    """

    def __init__(
        self,
        segment: Segment,
        shard: Buffer,
        full: TransientBuffer,
        collectives: Collectives,
        kernels: Kernels,
    ) -> None:
        dtype = segment.full_dtype
        self.segment, self.shard, self.full, self.kernels = segment, shard, full, kernels
        self.collectives = collectives_of(dtype, collectives)
        self.casts = segment.shard_dtype != dtype
        self.wire = dtype
        if not (self.casts or collectives.coalesces) and dtype.itemsize == 1:
            self.wire = torch.uint8  # gloo knows no 8-bit floats

    def parameters(self) -> list[tuple[Slot, torch.Tensor]]:
        segment = self.segment
        start, places = segment.full_byte_offset, segment.gathered_places
        gathered = self.full.views(segment.full_dtype, start, places)
        return list(zip(segment.slots, gathered, strict=True))

    def shards(self, shape: tuple[int, ...] | None = None, sent: bool = False) -> torch.Tensor:
        """This rank's rows, flat by default; ``sent``: a collective reads it, if no cast does."""
        segment = self.segment
        dtype = self.wire if sent and not self.casts else segment.shard_dtype
        return self.shard.view(dtype, segment.shard_byte_offset, shape or (segment.shard_numel,))

    def slot(
        self,
        slot: Slot,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> torch.Tensor:
        """A view in the memory of a slot, from an element on."""
        start = (slot.full_offset + offset) * self.segment.full_dtype.itemsize
        return self.full.view(self.wire, self.segment.full_byte_offset + start, shape, strides)

    def rows_of(self, slots: Sequence[Slot]) -> list[torch.Tensor]:
        """The slots of parameters whose pieces are in order, as rows of a rank each."""
        ranks = self.collectives.size
        places = [row_major((ranks, slot.shard_numel), slot.full_offset) for slot in slots]
        return self.full.views(self.wire, self.segment.full_byte_offset, places)

    def block(self, slot: Slot, ranks: int, first: int, length: int) -> torch.Tensor:
        """Destination of ``length`` indices of the sharded dim, from ``ranks`` ranks of a band."""
        inner = slot.inner
        piece, row = slot.chunk * inner, slot.shape[slot.dim] * inner
        shape = (slot.cut.bands, ranks, slot.outer, length, inner)
        strides = (slot.outer * row, piece, row, inner, 1)
        return self.slot(slot, shape, strides, first * piece)


class Pair(NamedTuple):
    """The tensors that one all-gather writes and reads."""

    output: torch.Tensor
    input: torch.Tensor


# ---- straight into slots


def coalesced(place: SegmentViews, also: Sequence[Pair] = ()) -> Gather:
    """Every parameter is gathered directly into its slot, in one launch with ``also``."""
    segment, full = place.segment, place.full
    slots, start = segment.slots, segment.full_byte_offset
    sizes = [slot.shard_numel for slot in slots]
    # A split must cover its whole input, padding after the last slot included.
    if segment.tail:
        sizes.append(segment.tail)
    shards = list(place.kernels.pieces(place.shards(), sizes))[: len(slots)]
    for piece in shards:
        # Parts of a view: a mirror that is swapped does not know them yet (`SwappedBuffer`).
        place.shard.keep_valid(piece)
    wire = segment.full_dtype
    inputs, outputs = shards, full.views(wire, start, segment.slot_places)
    copy_in: list[Run] = []
    if place.casts:
        # In place: the collective's input is the part of its output that this rank would receive.
        inputs = full.views(wire, start, segment.piece_places(place.collectives.rank))
        copy_in = [partial(place.kernels.copy_many, inputs, shards)]
    launch = place.collectives.bind_all_gather_many(
        [*outputs, *(pair.output for pair in also)], [*inputs, *(pair.input for pair in also)]
    )
    return Gather(place.parameters(), copy_in=copy_in, collectives=[launch], early=True)


def one_slot(place: SegmentViews) -> Gather:
    """A segment of one contiguous parameter: the gathered pieces are its slot, without a copy."""
    (slot,) = (slot for slot in place.segment.slots if slot.shard_numel)
    sent, numel, copy_in = place.shards(sent=True), slot.shard_numel, list[Run]()
    if place.casts:
        own = place.slot(slot, (numel,), offset=place.collectives.rank * numel)
        copy_in = [partial(place.kernels.copy, own, sent)]
        sent = own
    launch = place.collectives.bind_all_gather(place.slot(slot, (slot.full_numel,)), sent)
    return Gather(place.parameters(), copy_in=copy_in, collectives=[launch], early=True)


def local(place: SegmentViews) -> Gather:
    """One rank: the shard is the parameter, or is cast into its slot."""
    segment, flat = place.segment, place.shards()
    if place.casts:
        # One copy of all, because the layout gives a local slot the same offset in both buffers.
        target = place.full.view(segment.full_dtype, segment.full_byte_offset, tuple(flat.shape))
        # On COMPUTE, at use: a prefetch would have no collective to start.
        return Gather(place.parameters(), copy_out=[partial(place.kernels.copy, target, flat)])
    places = [row_major(slot.shape, slot.shard_offset) for slot in segment.slots]
    gathered = place.shard.views(segment.shard_dtype, segment.shard_byte_offset, places)
    return Gather(list(zip(segment.slots, gathered, strict=True)), aliases=True)


def from_host(mirror: TransientBuffer, shard: FlatBuffer, nbytes: int, kernels: Kernels) -> Gather:
    """The copy of offloaded shards to the allocated ``mirror``, in front of an all-gather."""
    # As bytes, so that one copy takes segments of all dtypes (decision 8).
    target = mirror.view(torch.uint8, 0, (nbytes,))
    source = shard.view(torch.uint8, 0, (nbytes,))
    load = partial(kernels.from_host, target, source)
    return Gather(acquire=[mirror.acquire], copy_in=[load], loads=True)


# ---- in rows, one per rank

WASTED_AT_MOST = 16
"""The part of a segment's bytes that may be copied needlessly, so that one kernel suffices."""


@dataclass
class Rows:
    """All ranks' rows of a segment, rank-major, and ``put``, which copies them into slots."""

    memory: TransientBuffer
    output: torch.Tensor
    put: list[Run]


def packed_rows(place: SegmentViews, name: str = "all-gather output") -> Rows:
    """Memory for the rows of all ranks, [ranks, n], and the copies out of it."""
    segment, kernels, itemsize = place.segment, place.kernels, place.segment.full_dtype.itemsize
    ranks, width = place.collectives.size, segment.shard_numel
    in_order = [slot for slot in segment.slots if slot.in_order and slot.shard_numel]
    sizes = [slot.shard_numel for slot in in_order] if kernels.fuses else []
    columns, rest = sum(sizes), width - sum(sizes)
    # One kernel splits whole rows only. If little else is in them, it goes to waste.
    wasted = rest if 0 < rest * WASTED_AT_MOST <= columns else 0
    memory = kernels.transient(ranks * (width + wasted) * itemsize, name)

    def view(start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        return memory.view(place.wire, start * itemsize, shape, strides)

    put: list[Run] = []
    if sizes:  # the kernel creates its own views of the tensor that it splits
        targets = place.rows_of(in_order)
        if wasted:
            targets.append(view(ranks * width, (ranks, wasted), (wasted, 1)))
            sizes.append(wasted)
        source = view(0, (ranks, sum(sizes)), (width, 1))
        put.append(partial(kernels.split_copy, source, sizes, targets))
    pairs: list[Pair] = []
    for run in () if kernels.fuses else runs_of_one_size(in_order):
        # One copy for all, of views that last: a split copies each by itself on a CPU.
        first, numel = run[0], run[0].shard_numel
        shape = (len(run), ranks, numel)
        step = run[-1].full_offset - run[-2].full_offset if len(run) > 1 else first.full_numel
        source = view(first.shard_offset, shape, (numel, width, 1))
        pairs.append(Pair(place.slot(first, shape, (step, numel, 1)), source))
    for slot in segment.slots:
        # Two strided copies at most: the ranks with a whole piece, and the one with a part.
        for count, begin, length in () if slot.in_order else slot.blocks():
            source = view(
                begin * width + slot.shard_offset,
                (slot.cut.bands, count, slot.outer, length, slot.inner),
                (slot.per_band * width, width, length * slot.inner, slot.inner, 1),
            )
            pairs.append(Pair(place.block(slot, count, begin, length), source))
    if pairs:
        sources = [pair.input for pair in pairs]
        put.append(partial(kernels.copy_many, [pair.output for pair in pairs], sources))
    return Rows(memory, memory.view(place.wire, 0, (ranks * width,)), put)


def packed(place: SegmentViews, kept: KeptRows | None = None) -> tuple[Gather, Pair]:
    """All shards are sent together and copied to slots; also the pair, for another launch. Rows
    that are ``kept`` are not freed.
    """
    rows = packed_rows(place) if kept is None else kept.rows
    sent, width, copy_in = place.shards(sent=True), place.segment.shard_numel, list[Run]()
    memory, dtype = rows.memory, place.segment.full_dtype
    if place.casts:
        start = place.collectives.rank * width * dtype.itemsize
        own = memory.view(dtype, start, (width,))
        copy_in = [partial(place.kernels.copy, own, sent)]
        sent = own
    # Without a cast, out of place: a copy of the shard into its row would be one more operation.
    pair = Pair(rows.output, sent)
    launch = place.collectives.bind_all_gather(*pair)
    # All views are made; the gather allocates again.
    memory.release()
    free = [memory.release] if kept is None else []
    moments = [memory.acquire], copy_in, [launch], rows.put, free
    return Gather(place.parameters(), *moments, kept=kept), pair


def runs_of_one_size(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Neighbours, in both buffers, whose pieces are of one size: a strided copy moves them all.
    Example: a Llama block's norms, q, k, v and o, and gate, up and down are three runs.
    """
    found: list[list[Slot]] = []
    for slot in slots:
        if found and _continues(found[-1], slot):
            found[-1].append(slot)
        else:
            found.append([slot])
    return found


def _continues(run: Sequence[Slot], slot: Slot) -> bool:
    last, numel = run[-1], slot.shard_numel
    if last.shard_numel != numel or last.shard_offset + numel != slot.shard_offset:
        return False
    # Slots are aligned, so the distance between two may be more than a slot is long.
    step = slot.full_offset - last.full_offset
    return len(run) == 1 or last.full_offset - run[-2].full_offset == step


# ---- rows that outlive their all-gather

ROWS = "kept rows"


class KeptRows:
    """The rows of a segment, whose memory stays: see `fsdp2.core.gather.keeping`."""

    def __init__(self, place: SegmentViews) -> None:
        self.place = place
        self.rows = packed_rows(place, ROWS)

    def fresh(self) -> Gather:
        """The all-gather that brings them. Called once, while their memory is allocated."""
        return packed(self.place, self)[0]

    @property
    def holds_rows(self) -> bool:
        """Whether a gather has brought rows."""
        return self.rows.memory.allocated

    def follow(self, former: KeptRows) -> None:
        if former.holds_rows:
            # A copy: operations are bound to this memory, and the former's ends with its binding.
            self.rows.memory.acquire()
            self.place.kernels.copy(self.rows.output, former.rows.output)

    def inherit(self, former: KeptRows) -> None:
        """Take over nothing from those that may have been bound to other shards."""

    def lose(self) -> None:
        """Take rows for lost: a gather may have stopped half way."""


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
