"""The places of elements in the inputs and outputs of collectives, as functions of tensors.

    whole     the rows of all ranks, as an all-gather leaves them ──> parameters
    joined    gradients ──> what a reduce-scatter reads
    parts     what it leaves ──> gradients of this rank's shards

They only call functions of torch that change no tensor: eagerly they run as they are, and
`fsdp2.graph.placement` writes what they call into a graph, where a compiler fuses it.
"""

from __future__ import annotations

import itertools
import math
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
        self.sends_shards = ranks > 1 and segment.shard_dtype is segment.full_dtype
        """Whether a collective can read shards where they are."""
        self._sizes: list[int] = []  # with the gaps between slots that are coalesced
        self._pieces: list[int] = []  # the positions of slots among these
        ends = [*self.starts[1:], self.numel]
        for slot, start, end in zip(self.slots, self.starts, ends, strict=True):
            if self.coalesced:
                self._pieces.append(len(self._sizes))
                gap = end - start - slot.full_numel
                self._sizes += [slot.full_numel, gap] if gap else [slot.full_numel]

    @property
    def shard_bytes(self) -> list[tuple[int, int]]:
        """Each parameter's index, and where its shard begins in the group's flat shard."""
        begin, size = self.segment.shard_byte_offset, self.segment.shard_dtype.itemsize
        return [(slot.index, begin + slot.shard_offset * size) for slot in self.slots]

    def shards_in(self, memory: FlatBuffer) -> list[Tensor]:
        """The inputs of collectives, in the group's flat shard."""
        segment = self.segment
        given = segment.shard_dtype, segment.shard_byte_offset
        row = memory.view(*given, (segment.shard_numel,))
        if not self.coalesced:
            return [row]
        return [row.narrow(0, slot.shard_offset, slot.shard_numel) for slot in self.slots]

    def pieces(self, output: Tensor) -> list[Tensor]:
        """The outputs of collectives."""
        if not self.coalesced:
            return [output]
        found = output.split_with_sizes(self._sizes)
        return [found[position] for position in self._pieces]

    def fill(self, output: Tensor, shards: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Copy shards to where a rank's pieces belong; returns what collectives read then."""
        found = []
        for slot, start, step in zip(self.slots, self.starts, self.steps, strict=True):
            shard, begin = shards[slot.index], start + rank * step
            output.narrow(0, begin, shard.numel()).copy_(shard.reshape(-1))
            found.append(output.narrow(0, begin, slot.shard_numel))
        if self.coalesced:
            return found
        width = self.segment.shard_numel
        return [output.narrow(0, rank * width, width)]

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
        self.sizes = [slot.shard_numel for slot in self.slots]
        dtype, sent, copies = spec.reduce_dtype, self.ranks > 1, 1
        if group.replicas is not None:
            copies = group.replicas.size
        self.width = sum(self.sizes)
        if packed:
            facts = self.rank, dtype, sent, group.replicas is not None, False, True
            self.width = lay_flat(self.slots, *facts).width
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

    def parts(self, sums: Tensor) -> dict[int, Tensor]:
        """Gradients of this rank's shards, by their index: views of one tensor."""
        if self.division.after is not None:
            sums = sums / self.division.after
        sums = sums.to(self.spec.result_dtype)
        found = {}
        starts = itertools.accumulate(self.sizes, initial=0)
        for slot, start in zip(self.slots, starts, strict=False):
            shape = slot.local_shape(self.rank)
            found[slot.index] = sums.narrow(0, start, math.prod(shape)).view(shape)
        return found
