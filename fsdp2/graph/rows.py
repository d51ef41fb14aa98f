"""The places of elements in the inputs and outputs of collectives, as functions of tensors.

    packed    shards of parameters ──> a row, as the group's memory holds them
    sent      the row ──> what an all-gather reads
    whole     the rows of all ranks, as it leaves them ──> parameters
    joined    gradients ──> what a reduce-scatter reads
    divided   what it leaves ──> the gradients of this rank's shards, flat
    parts     these ──> the gradient of each shard

They only call functions of torch that change no tensor: eagerly they run as they are, and
`fsdp2.graph.placement` writes what they call into a graph, where a compiler fuses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fsdp2.core.facts import (
    FlatBuffer,
    ParamGroup,
    ReductionSpec,
    Segment,
    Slot,
    Transport,
    is_direct,
    lay_flat,
    plan_division,
    views_of,
)


class GatheredRows:
    """A segment's parameters in the output of its all-gather.

    Rank r's piece of a slot begins at ``start + r * step``. Coalesced, the pieces of a parameter
    follow each other (its step is a piece), so that the parameter is a view of the output; packed,
    those of a rank do (a step is a row).

    Args:
        segment: the segment.
        ranks: how many ranks hold a piece.
    """

    def __init__(self, segment: Segment, ranks: int) -> None:
        self.segment, self.slots, self.ranks = segment, segment.slots, ranks
        self.coalesced = segment.transport is Transport.COALESCED
        width = segment.shard_numel
        self.numel = segment.full_numel if self.coalesced else ranks * width
        self.steps = [slot.shard_numel if self.coalesced else width for slot in self.slots]
        self.starts = [
            slot.full_offset if self.coalesced else slot.shard_offset for slot in self.slots
        ]
        self.facts = segment.shard_dtype, segment.full_dtype, self.numel, self.starts, self.steps
        """All that what is gathered depends on, but for slots."""
        offsets = [*(slot.shard_offset for slot in self.slots), width]
        self._widths = [end - start for start, end in itertools.pairwise(offsets)]
        """Elements of each shard in a row, with the gap behind it."""
        self._shards = _Cut([slot.shard_numel for slot in self.slots], self._widths)
        rooms = [end - start for start, end in itertools.pairwise([*self.starts, self.numel])]
        self._pieces = _Cut([slot.full_numel for slot in self.slots], rooms)

    @property
    def shard_bytes(self) -> list[tuple[int, int]]:
        """Each parameter's index, and where its shard begins in the group's flat shard."""
        begin, size = self.segment.shard_byte_offset, self.segment.shard_dtype.itemsize
        return [(slot.index, begin + slot.shard_offset * size) for slot in self.slots]

    def row_in(self, memory: FlatBuffer) -> Tensor:
        """The shards in the group's memory, flat."""
        segment = self.segment
        given = segment.shard_dtype, segment.shard_byte_offset
        return memory.view(*given, (segment.shard_numel,))

    def packed(self, shards: Sequence[Tensor]) -> Tensor:
        """The same of shards that lie anywhere."""
        pieces = [shards[slot.index].reshape(-1) for slot in self.slots]
        padded = [
            torch.constant_pad_nd(piece, (0, width - piece.numel()))
            for piece, width in zip(pieces, self._widths, strict=True)
        ]
        return torch.cat(padded)

    def sent(self, row: Tensor) -> Tensor:
        """The input of an all-gather, in the dtype that it sends."""
        return row.to(self.segment.full_dtype)

    def shards(self, row: Tensor) -> Sequence[Tensor]:
        """The inputs of collectives, in what is sent."""
        return self._shards.of(row) if self.coalesced else [row]

    def pieces(self, output: Tensor) -> Sequence[Tensor]:
        """The outputs of collectives."""
        return self._pieces.of(output) if self.coalesced else [output]

    def whole(self, output: Tensor) -> dict[int, Tensor]:
        """The parameters by their index, contiguous: views of the output, or copied out of it."""
        found: dict[int, Tensor] = {}
        copied: list[Slot] = []  # which stand at the beginning of each row
        for slot, start, step in zip(self.slots, self.starts, self.steps, strict=True):
            if slot.in_order and (step == slot.shard_numel or self.ranks == 1):
                found[slot.index] = output.narrow(0, start, slot.numel).view(slot.shape)
            elif slot.in_order:
                copied.append(slot)
            else:
                found[slot.index] = _in_place(output, slot, start, step)
        if copied:
            sizes = [slot.shard_numel for slot in copied]
            table = output.view(self.ranks, -1).narrow(1, copied[0].shard_offset, sum(sizes))
            for slot, piece in zip(copied, _copies(table, sizes), strict=True):
                found[slot.index] = piece.view(-1).narrow(0, 0, slot.numel).view(slot.shape)
        return found


class _Cut:
    """Pieces of a flat tensor, with gaps behind some of them."""

    def __init__(self, sizes: Sequence[int], rooms: Sequence[int]) -> None:
        self._sizes: list[int] = []
        self._positions: list[int] = []
        for size, room in zip(sizes, rooms, strict=True):
            self._positions.append(len(self._sizes))
            self._sizes += [size, room - size] if room > size else [size]

    def of(self, flat: Tensor) -> Sequence[Tensor]:
        found: Sequence[Tensor] = flat.split_with_sizes(self._sizes)
        if len(found) == len(self._positions):
            return found
        return [found[position] for position in self._positions]


def _copies(table: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Columns of a table, each in memory of its own; one kernel on an accelerator."""
    split: Sequence[Tensor] = torch.ops.aten.split_with_sizes_copy.default(table, sizes, 1)
    return split


def _in_place(output: Tensor, slot: Slot, start: int, step: int) -> Tensor:
    """A parameter whose pieces are not one after another in it."""
    bands, outer, inner = slot.cut.bands, slot.outer, slot.inner
    blocks = []
    for ranks, first, length in slot.blocks():
        shape = (bands, ranks, outer, length, inner)
        strides = (slot.per_band * step, step, length * inner, inner, 1)
        block = output.as_strided(shape, strides, output.storage_offset() + start + first * step)
        blocks.append(block.transpose(1, 2).reshape(bands, outer, ranks * length, inner))
    return torch.cat(blocks, 2).view(slot.shape) if blocks else output.new_empty(slot.shape)


def _by_ranks(whole: Tensor, slot: Slot) -> Tensor:
    """A parameter's pieces, [ranks, piece], zeros behind short ones."""
    ranks, numel = slot.world_size, slot.shard_numel
    if slot.in_order:
        flat = whole.reshape(-1)
        return torch.constant_pad_nd(flat, (0, ranks * numel - flat.numel())).view(ranks, numel)
    bands, outer, inner = slot.cut.bands, slot.outer, slot.inner
    blocks, held = [], 0
    for count, first, length in slot.blocks():
        held += count
        rows = whole.narrow(slot.dim, first * slot.chunk, count * length)
        rows = rows.reshape(bands, outer, count, length, inner).transpose(1, 2)
        rows = rows.reshape(bands, count, -1)
        blocks.append(torch.constant_pad_nd(rows, (0, numel - rows.shape[2])))
    blocks.append(whole.new_zeros(bands, slot.per_band - held, numel))
    return torch.cat(blocks, 1).view(ranks, numel)


class ReducedRows:
    """Parameters that are reduced in one launch: where it divides, and the rows of its result.

    As in the engine, the first are reduced from where their gradients are, one reduce-scatter
    each; the others are packed in rows, one per rank. Marks are not sent, but have room as in the
    engine's rows: where an element lies decides in which order gloo and NCCL add up more than two
    ranks.

    Args:
        group: their group.
        spec: how they are reduced.
        members: their slots, and how each is gathered.
    """

    def __init__(
        self, group: ParamGroup, spec: ReductionSpec, members: Sequence[tuple[Slot, Transport]]
    ) -> None:
        self.spec, collectives = spec, group.collectives
        self.rank, self.ranks = collectives.rank, collectives.size
        direct = [slot for slot, transport in members if is_direct(spec, slot, transport)]
        packed = [slot for slot, transport in members if not is_direct(spec, slot, transport)]
        self.direct = len(direct)
        self.slots = [*direct, *packed]
        self.indices = [slot.index for slot in self.slots]
        self.sizes = [slot.shard_numel for slot in self.slots]
        dtype, sent, copies = spec.reduce_dtype, self.ranks > 1, 1
        if group.replicas is not None:
            copies = group.replicas.size
        facts = self.rank, dtype, sent, group.replicas is not None, False, True
        plan = lay_flat(self.slots, *facts)
        self.width, self._runs = plan.width if packed else plan.payload, plan.runs
        rest = self.width - sum(self.sizes[: self.direct])
        self.outputs = [*self.sizes[: self.direct], *([rest] if rest or not direct else [])]
        """Elements of the result of each reduce-scatter, which lie side by side."""
        self._tail = self.width - sum(self.sizes)
        self.division = plan_division(
            dtype,
            self.ranks,
            spec.factor,
            collectives.premultiplies,
            copies,
            spec.sum_only,
            self.ranks * copies == 1,
            not self.width,
        )
        divided = self.division.before, self.division.after
        self.facts = dtype, spec.result_dtype, self.width, self.direct, self.sizes, divided
        """All that what is reduced depends on, but for slots."""

    def joined(self, given: Mapping[int, Tensor]) -> list[Tensor]:
        """The inputs of reduce-scatters, contiguous and flat, divided if that comes first."""
        dtype, before = self.spec.reduce_dtype, self.division.before
        tensors = [given[slot.index].to(dtype) for slot in self.slots]
        if before is not None:
            tensors = [tensor / before for tensor in tensors]
        found = [tensor.reshape(-1) for tensor in tensors[: self.direct]]
        packed = zip(self.slots[self.direct :], tensors[self.direct :], strict=True)
        rows = [_by_ranks(tensor, slot) for slot, tensor in packed if slot.shard_numel]
        if self._tail:
            rows.append(tensors[0].new_zeros(self.ranks, self._tail))
        if len(found) < len(self.outputs):
            found.append(torch.cat(rows, 1).view(-1) if rows else tensors[0].new_empty(0))
        return found

    def divided(self, sums: Tensor) -> Tensor:
        """Gradients of this rank's shards, flat, in their dtype."""
        if self.division.after is not None:
            sums = sums / self.division.after
        return sums.to(self.spec.result_dtype)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """The same of each shard, as views."""
        flat = flat.clone() if flat.storage_offset() else flat  # views are planned from 0
        return views_of(self._runs, flat)
