"""How a segment's shards become unsharded parameters.

    Coalesced   shard ─(cast)─> own piece of its slot ══ one launch, an all-gather each ══> slots
                no copy afterwards; none before if shard and compute dtype agree (decision 17)
    Packed      shard ─(cast)─> own row of [ranks, n] ══ one all-gather ══> rows ── copy ──> slots
                with coalesced ones of the same dtype it is part of their launch
    One slot    a packed segment of one parameter whose pieces are in order: straight into its slot
    Custom      as packed, all segments in one collective of the user
    Local       shard is the parameter; or ── cast ──> slots

Parameters of tensor subclasses with all-gather hooks have a separate transport, in
`fsdp2.core.gather.extension`.

A transport is bound to buffers once; an all-gather then only makes the calls below, in this order,
on the lanes that the group chooses:

    acquire   allocate what the collective needs          COMPUTE
    copy_in   cast                                        COPY_IN
    gather    the collective                              ALL_GATHER
    copy_out  put pieces in place                         COMPUTE
    release   free what only the collective needed        COMPUTE
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Protocol

import torch

from fsdp2.core.custom_collectives import AllGather, checked_buffer
from fsdp2.core.device.buffers import Buffer, FlatBuffer, TransientBuffer, row_major
from fsdp2.core.device.collectives import Collectives, Launch, Work, collectives_of
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.layout.layout import Segment, Slot


class GatherTransport:
    """The interface of a transport, which turns shards into unsharded parameters.

    Attributes:
        carried: whether another transport's launch includes its collective.
        casts: whether copy_in does anything.
        early: whether the gathered buffer must be allocated before the collective.
        communicates: whether there is a collective.
        keeps: whether its rows stay for the next all-gathers (`fsdp2.core.gather.kept_rows`).
        stages: whether acquire, copy_out or release do anything.
        aliases: whether unsharded parameters are views of the shard.
        gather: runs the collective; returns a work object to wait for, or ``None``.
    """

    carried = False
    casts = False
    early = False
    communicates = True
    keeps = False
    stages = True
    aliases = False
    gather: Launch

    def parameters(self) -> list[tuple[Slot, torch.Tensor]]:
        """Every slot, and the tensor of its gathered parameter, if it exists."""
        return []

    def acquire(self) -> None:
        """Allocate what only the collective needs."""

    def copy_in(self) -> None:
        """Cast the shards."""

    def copy_out(self) -> None:
        """Put the pieces in place."""

    def release(self) -> None:
        """Free what ``acquire`` allocated."""


class SegmentTransport(GatherTransport):
    """The common part of the transports of segments: views of the group's two buffers."""

    def __init__(
        self,
        segment: Segment,
        shard: Buffer,
        full: TransientBuffer,
        collectives: Collectives,
        kernels: Kernels,
    ) -> None:
        dtype = segment.full_dtype
        self.segment = segment
        self.collectives = collectives_of(dtype, collectives)
        self.kernels = kernels
        self._shard = shard
        self._full = full
        self._itemsize = dtype.itemsize
        self.casts = segment.shard_dtype != segment.full_dtype
        self._wire = segment.full_dtype  # what copies and collectives see
        self._bind()

    def _bind(self) -> None:
        """Make the views that every gather uses."""

    @classmethod
    def row_bytes(cls, numel: int, itemsize: int) -> int:
        """Bytes that one rank gives to a gather of ``numel`` elements."""
        return numel * itemsize

    def parameters(self) -> list[tuple[Slot, torch.Tensor]]:
        """Every slot and the tensor of its gathered parameter."""
        segment = self.segment
        start, places = segment.full_byte_offset, segment.gathered_places
        gathered = self._full.views(segment.full_dtype, start, places)
        return list(zip(segment.slots, gathered, strict=True))

    def _shard_flat(self) -> torch.Tensor:
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
    ) -> torch.Tensor:
        start = self.segment.full_byte_offset + (slot.full_offset + offset) * self._itemsize
        return self._full.view(self._wire, start, shape, strides)

    def _rows_of(self, slots: Sequence[Slot]) -> list[torch.Tensor]:
        """The slots of parameters whose pieces are in order, as rows of a rank each."""
        ranks = self.collectives.size
        places = [row_major((ranks, slot.shard_numel), slot.full_offset) for slot in slots]
        return self._full.views(self._wire, self.segment.full_byte_offset, places)

    def _block(self, slot: Slot, ranks: int, first: int, length: int) -> torch.Tensor:
        """Destination of ``length`` indices of the sharded dim, from ``ranks`` ranks of a band."""
        inner = slot.inner
        piece, row = slot.chunk * inner, slot.shape[slot.dim] * inner
        shape = (slot.cut.bands, ranks, slot.outer, length, inner)
        strides = (slot.outer * row, piece, row, inner, 1)
        return self._slot_view(slot, shape, strides, first * piece)

    def _bytes_on_the_wire(self) -> None:
        """gloo knows no 8-bit floats."""
        if not (self.casts or self.collectives.coalesces) and self._itemsize == 1:
            self._wire = torch.uint8

    def _flat_on_the_wire(self) -> torch.Tensor:
        """The flat shard as the collective reads it, or a cast does."""
        segment = self.segment
        dtype = segment.shard_dtype if self.casts else self._wire
        return self._shard.view(dtype, segment.shard_byte_offset, (segment.shard_numel,))


WASTED_AT_MOST = 16
"""The part of a segment's bytes that may be copied needlessly, so that one kernel suffices."""


class CoalescedTransport(SegmentTransport):
    """Every parameter is gathered directly into its slot; a cast shard is already there."""

    early = True
    stages = False

    def _bind(self) -> None:
        segment = self.segment
        slots = segment.slots
        sizes = [slot.shard_numel for slot in slots]
        if segment.tail:
            sizes.append(segment.tail)
        self._shards = list(self.kernels.pieces(self._shard_flat(), sizes))[: len(slots)]
        for piece in self._shards:
            self._shard.keep_valid(piece)
        start = segment.full_byte_offset
        self._outputs = self._full.views(self._wire, start, segment.slot_places)
        self._inputs = self._shards
        if self.casts:
            pieces = segment.piece_places(self.collectives.rank)
            self._inputs = self._full.views(self._wire, start, pieces)
        self.gather = self.collectives.bind_all_gather_many(self._outputs, self._inputs)

    def carry(self, packed: PackedTransport) -> None:
        """Take the collective of ``packed``, of the same dtype, along in one launch."""
        outputs, inputs = [*self._outputs, packed.output], [*self._inputs, packed.input]
        self.gather = self.collectives.bind_all_gather_many(outputs, inputs)
        packed.carried = True

    def copy_in(self) -> None:
        self.kernels.copy_many(self._inputs, self._shards)


def runs_of_one_size(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Neighbours, in both buffers, whose pieces are of one size: a strided copy moves them all.

    Args:
        slots: whose pieces are in order, by offset.

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
    step = slot.full_offset - last.full_offset
    return len(run) == 1 or last.full_offset - run[-2].full_offset == step


class PackedTransport(SegmentTransport):
    """All shards are sent together, rank-major; a copy puts them into their slots.

    The collective's output is [ranks, n]; this rank's input is its own row of it if the shard is
    cast, otherwise the flat shard itself.

    Attributes:
        output: the output of the collective.
        input: its input.
        output_name: of the memory of ``output``.
    """

    output_name = "all-gather output"

    def _bind(self) -> None:
        segment, collectives, kernels = self.segment, self.collectives, self.kernels
        ranks, width = collectives.size, segment.shard_numel
        self.communicates = width > 0  # a segment of empty parameters has nothing to say
        self._bytes_on_the_wire()
        self._flat = self._flat_on_the_wire()
        rows = [slot for slot in segment.slots if slot.in_order and slot.shard_numel]
        self._sizes = [slot.shard_numel for slot in rows] if kernels.fuses else []
        columns, rest = sum(self._sizes), width - sum(self._sizes)
        # One kernel splits whole rows only. Where little else is in them, it goes to waste.
        wasted = rest if 0 < rest * WASTED_AT_MOST <= columns else 0
        nbytes = ranks * (width + wasted) * self._itemsize
        self._packed = kernels.transient(nbytes, self.output_name)
        self.output = self._packed.view(self._wire, 0, (ranks * width,))
        if self.casts:
            start = collectives.rank * width * self._itemsize
            self.input = self._packed.view(segment.full_dtype, start, (width,))
        else:
            self.input = self._flat
        self._rows: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        if self._sizes:
            self._split_rows(rows, wasted)
        for run in () if kernels.fuses else runs_of_one_size(rows):
            self._add_run(run)
        for slot in segment.slots:
            if not slot.in_order:
                self._add_moves(slot)
        self._packed.release()

    def acquire(self) -> None:
        self._packed.acquire()

    def copy_in(self) -> None:
        self.kernels.copy(self.input, self._flat)

    def gather(self) -> Work | None:
        return self.collectives.all_gather(self.output, self.input)

    def copy_out(self) -> None:
        if self._sizes:
            self.kernels.split_copy(self._columns, self._sizes, self._rows)
        if self._targets:
            self.kernels.copy_many(self._targets, self._sources)

    def release(self) -> None:
        self._packed.release()

    def _split_rows(self, rows: Sequence[Slot], wasted: int) -> None:
        """One kernel, which creates its own views of the tensor that it splits."""
        ranks, width = self.collectives.size, self.segment.shard_numel
        self._rows = self._rows_of(rows)
        if wasted:
            end = ranks * width * self._itemsize
            self._rows.append(self._packed.view(self._wire, end, (ranks, wasted)))
            self._sizes.append(wasted)
        shape = (ranks, sum(self._sizes))
        self._columns = self._packed.view(self._wire, 0, shape, (width, 1))

    def _add_run(self, run: Sequence[Slot]) -> None:
        """One copy for all, of views that last: a split copies each by itself on a CPU."""
        first, ranks, width = run[0], self.collectives.size, self.segment.shard_numel
        numel = first.shard_numel
        shape = (len(run), ranks, numel)
        start = first.shard_offset * self._itemsize
        self._sources.append(self._packed.view(self._wire, start, shape, (numel, width, 1)))
        step = run[-1].full_offset - run[-2].full_offset if len(run) > 1 else first.full_numel
        self._targets.append(self._slot_view(first, shape, (step, numel, 1)))

    def _add_moves(self, slot: Slot) -> None:
        """Two strided copies at most: the ranks with a whole piece, and the one with a part."""
        for ranks, first, length in slot.blocks():
            self._targets.append(self._block(slot, ranks, first, length))
            width = self.segment.shard_numel
            start = (first * width + slot.shard_offset) * self._itemsize
            shape = (slot.cut.bands, ranks, slot.outer, length, slot.inner)
            strides = (slot.per_band * width, width, length * slot.inner, slot.inner, 1)
            self._sources.append(self._packed.view(self._wire, start, shape, strides))


class BoundPackedTransport(PackedTransport):
    """The same, without a call between an all-gather and its result.

    A codec derives from `PackedTransport`, whose verbs are methods to override.
    """

    def _bind(self) -> None:
        super()._bind()
        packed, kernels = self._packed, self.kernels
        bound: dict[str, Callable[[], object]] = {
            "acquire": packed.acquire,
            "gather": self.collectives.bind_all_gather(self.output, self.input),
            "release": packed.release,
        }
        if self._targets and not self._sizes:
            bound["copy_out"] = partial(kernels.copy_many, self._targets, self._sources)
        elif self._sizes and not self._targets:
            bound["copy_out"] = partial(kernels.split_copy, self._columns, self._sizes, self._rows)
        vars(self).update(bound)


class OneSlotTransport(SegmentTransport):
    """A segment of one contiguous parameter: the gathered pieces are its slot, without a copy."""

    early = True
    stages = False

    def _bind(self) -> None:
        self._bytes_on_the_wire()
        (slot,) = (slot for slot in self.segment.slots if slot.shard_numel)
        self._flat = self._input = self._flat_on_the_wire()
        if self.casts:
            start = self.collectives.rank * slot.shard_numel
            self._input = self._slot_view(slot, (slot.shard_numel,), offset=start)
        output = self._slot_view(slot, (slot.full_numel,))
        self.gather = self.collectives.bind_all_gather(output, self._input)

    def copy_in(self) -> None:
        self.kernels.copy(self._input, self._flat)


class LocalTransport(SegmentTransport):
    """One rank: the shard is the parameter, or is cast into its slot."""

    communicates = False

    def _bind(self) -> None:
        segment = self.segment
        self._flat = self._shard_flat()
        self._target: torch.Tensor | None = None
        self.aliases = not self.casts
        if self.casts:
            self._target = self._full.view(
                segment.full_dtype, segment.full_byte_offset, (segment.shard_numel,)
            )

    def parameters(self) -> list[tuple[Slot, torch.Tensor]]:
        if self.casts:
            return super().parameters()
        segment = self.segment
        places = [row_major(slot.shape, slot.shard_offset) for slot in segment.slots]
        gathered = self._shard.views(segment.shard_dtype, segment.shard_byte_offset, places)
        return list(zip(segment.slots, gathered, strict=True))

    def copy_out(self) -> None:
        if self._target is not None:
            self.kernels.copy(self._target, self._flat)


class _CustomPart(SegmentTransport):
    """One segment of a `CustomTransport`: its bytes in every rank's row, from ``start`` on."""

    def __init__(
        self,
        segment: Segment,
        shard: Buffer,
        full: TransientBuffer,
        collectives: Collectives,
        kernels: Kernels,
        start: int,
    ) -> None:
        super().__init__(segment, shard, full, collectives, kernels)
        self._start = start
        self.nbytes = segment.shard_numel * self._itemsize
        self._flat = self._shard_flat()
        rows = [slot for slot in segment.slots if slot.in_order and slot.shard_numel]
        self._sizes = [slot.shard_numel for slot in rows]
        self._rows = self._rows_of(rows)
        self._blocks = [
            (slot, block, self._block(slot, *block))
            for slot in segment.slots
            if not slot.in_order
            for block in slot.blocks()
        ]

    def put(self, row: torch.Tensor) -> None:
        """Cast the shards into this rank's row of bytes."""
        target = row.narrow(0, self._start, self.nbytes).view(self.segment.full_dtype)
        self.kernels.copy(target, self._flat)

    def take(self, rows: torch.Tensor) -> None:
        """Copy the pieces of all ranks' rows of bytes into the slots."""
        rows = rows.narrow(1, self._start, self.nbytes).view(self.segment.full_dtype)
        if self._sizes:
            columns = rows.narrow(1, 0, sum(self._sizes))
            self.kernels.split_copy(columns, self._sizes, self._rows)
        sources = []
        for slot, (ranks, first, length), _ in self._blocks:
            shape = (slot.cut.bands, ranks, slot.outer, length, slot.inner)
            pieces = rows.view(slot.cut.bands, slot.per_band, rows.shape[1])
            pieces = pieces.narrow(1, first, ranks)
            sources.append(pieces.narrow(2, slot.shard_offset, prod(shape[2:])).view(shape))
        if sources:
            self.kernels.copy_many([target for _, _, target in self._blocks], sources)


class CustomTransport(SegmentTransport):
    """All segments packed, in a buffer and by a collective of the user.

        shards ── cast or copy ──> own row of [ranks, n] ══ comm ══> rows ── copy ──> slots

    The row holds the segments one after another: in their dtype if they share one, otherwise as
    bytes. The buffer may be another one each time, so its views are created for each all-gather. It
    is needed only between ``acquire`` and ``release``.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        shard: Buffer,
        full: TransientBuffer,
        collectives: Collectives,
        kernels: Kernels,
        comm: AllGather,
        device: torch.device,
    ) -> None:
        super().__init__(segments[0], shard, full, collectives, kernels)
        self.casts = True
        self._comm = comm
        self._device = device
        self._parts: list[_CustomPart] = []
        self._nbytes = 0
        for segment in segments:
            part = _CustomPart(segment, shard, full, collectives, kernels, self._nbytes)
            self._parts.append(part)
            self._nbytes += part.nbytes
        self.communicates = self._nbytes > 0
        dtypes = {segment.full_dtype for segment in segments}
        self._dtype: torch.dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self._output: torch.Tensor | None = None
        self._own: torch.Tensor | None = None

    def parameters(self) -> list[tuple[Slot, torch.Tensor]]:
        return [found for part in self._parts for found in part.parameters()]

    def acquire(self) -> None:
        numel = self._nbytes // self._dtype.itemsize
        size, rank = self.collectives.size, self.collectives.rank
        self._output = checked_buffer(self._comm, size * numel, self._dtype, self._device)
        self._own = self._output.narrow(0, rank * numel, numel)

    def copy_in(self) -> None:
        assert self._own is not None
        row = self._own.view(torch.uint8)
        for part in self._parts:
            part.put(row)

    def gather(self) -> Work | None:
        assert self._output is not None
        assert self._own is not None
        return self.collectives.custom_all_gather(self._comm, self._output, self._own)

    def copy_out(self) -> None:
        if self._output is not None and self.communicates:
            rows = self._output.view(torch.uint8).view(self.collectives.size, self._nbytes)
            for part in self._parts:
                part.take(rows)

    def release(self) -> None:
        self._output = self._own = None


class Load:
    """The copy of offloaded shards to the device, in front of a gather.

    Args:
        mirror: the transient buffer from which they are gathered; allocated.
        shard: their memory on the CPU.
        nbytes: of either.
        kernels: memory and copies.
    """

    def __init__(
        self, mirror: TransientBuffer, shard: FlatBuffer, nbytes: int, kernels: Kernels
    ) -> None:
        self._mirror = mirror
        self._kernels = kernels
        self._target = mirror.view(torch.uint8, 0, (nbytes,))
        self._source = shard.view(torch.uint8, 0, (nbytes,))

    def acquire(self) -> None:
        """Allocate the mirror."""
        self._mirror.acquire()

    def copy_in(self) -> None:
        """Copy."""
        self._kernels.from_host(self._target, self._source)


class Copying(Protocol):
    """Has memory to allocate and something to copy before the collectives."""

    def acquire(self) -> None:
        """Allocate it, on COMPUTE."""

    def copy_in(self) -> None:
        """Copy, on COPY_IN."""


class Route:
    """The transports of one kind of gather, sorted by their needs.

    Args:
        transports: all of them.
        load: copies shards from the host first, if they are offloaded.

    Attributes:
        gathering: the transports with a collective.
        gathers: the collectives.
        acquiring: the transports that allocate memory before the collectives.
        copying: the transports that copy before them.
        finishing: the transports that copy or convert after the collectives.
        early: whether the gathered buffer must exist before the collectives.
        loads: whether shards are copied from the host first.
        launches: whether there is anything to launch.
        finishes: whether anything remains to be done after the launched operations.
    """

    __slots__ = (
        "acquiring",
        "copying",
        "early",
        "finishes",
        "finishing",
        "gathering",
        "gathers",
        "launches",
        "loads",
    )

    def __init__(self, transports: Sequence[GatherTransport], load: Load | None = None) -> None:
        self.gathering = [t for t in transports if t.communicates]
        self.gathers = [t.gather for t in self.gathering if not t.carried]
        self.loads = load is not None
        loads: list[Copying] = [] if load is None else [load]
        self.acquiring: list[Copying] = [*loads, *(t for t in self.gathering if t.stages)]
        self.copying: list[Copying] = [*loads, *(t for t in self.gathering if t.casts)]
        self.finishing = [t for t in transports if t.stages]
        self.early = any(t.early for t in transports)
        self.launches = bool(self.gathering) or self.loads
        self.finishes = bool(self.finishing) or self.loads or not self.early
