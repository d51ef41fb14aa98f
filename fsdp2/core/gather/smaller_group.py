"""Rows of a smaller group, kept between forward and backward (`reshard_after_forward` an int).

With 4 ranks and smaller groups of 2, a parameter of 8 rows:

    rank               0      1      2      3
    sharded            0-1    2-3    4-5    6-7
    between            0-3    4-7    0-3    4-7      gathered in backward by {0, 1} and by {2, 3}

After forward each rank copies its rows out of the gathered buffer into a separate buffer, in the
compute dtype. Backward gathers from there, over few ranks that are near each other, straight into
the same slots: the padding of a smaller group is never longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core.custom_collectives import AllGather
from fsdp2.core.device.buffers import TransientBuffer
from fsdp2.core.device.collectives import Collectives
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.gather.make import make_gathers
from fsdp2.core.gather.program import combined
from fsdp2.core.layout.layout import (
    COLLECTIVE_ALIGN_BYTES,
    Cut,
    GroupLayout,
    Segment,
    Slot,
    Transport,
    can_coalesce,
    side_by_side,
)
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.params.param import ShardedParam, Swap
from fsdp2.core.pieces import round_up


@dataclass(frozen=True)
class SmallerGroup:
    """The ranks that backward gathers from, and (replicate, shard) of all ranks by such groups."""

    collectives: Collectives
    mesh: DeviceMesh


def smaller_segment(
    segment: Segment,
    world_size: int,
    coalesces: bool,
    shard_byte_offset: int,
    pack_below: int = 0,
) -> Segment:
    """The segment as a smaller group holds it: other pieces, which may be packed; same slots."""
    itemsize = segment.full_dtype.itemsize
    # A smaller group has one shard dim: bands are for all ranks (decision 18).
    cut = [replace(slot, cut=Cut(slot.dim), world_size=world_size) for slot in segment.slots]
    slots, numel = side_by_side(cut)
    straight = coalesces and can_coalesce(slots, itemsize)
    # Pieces are longer than the group's, so those that it does not pack are not packed here either.
    large = segment.transport is Transport.COALESCED or all(
        slot.shard_numel * itemsize >= pack_below for slot in slots
    )
    multiple = max(COLLECTIVE_ALIGN_BYTES // itemsize, 1)
    return replace(
        segment,
        transport=Transport.COALESCED if straight and large else Transport.PACKED,
        # Rows are copied from the gathered buffer, so they are cast already.
        shard_dtype=segment.full_dtype,
        slots=tuple(slots),
        shard_numel=round_up(numel, multiple),
        shard_byte_offset=shard_byte_offset,
    )


class SmallerRows:
    """A smaller group's rows; ``stays`` for other micro-batches; calls ``kept`` with them there."""

    stays = False
    kept: Callable[[], None] | None = None

    def __init__(
        self,
        group: SmallerGroup,
        layout: GroupLayout,
        full: TransientBuffer,
        params: Sequence[ShardedParam],
        kernels: Kernels,
        comm: AllGather | None,
        device: torch.device,
        pack_below: int = 0,
    ) -> None:
        self._group = group
        self._kernels = kernels
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self.swaps: list[Swap] = []
        segments: list[Segment] = []
        nbytes = 0
        for segment in layout.segments:
            if segment.transport is Transport.EXTENSION:
                raise coded(
                    ShardingStateError,
                    "smaller-group-of-hooks",
                    f"parameter '{params[segment.slots[0].index].name}' has all-gather hooks, "
                    f"which cannot be used with reshard_after_forward=<int>; call "
                    f"set_reshard_after_forward(True)",
                )
            smaller = smaller_segment(
                segment, group.collectives.size, group.collectives.coalesces, nbytes, pack_below
            )
            segments.append(smaller)
            nbytes += smaller.shard_numel * smaller.full_dtype.itemsize
            nbytes = round_up(nbytes, COLLECTIVE_ALIGN_BYTES)
        self._rows = kernels.transient(nbytes, "rows of the smaller group")
        parts = make_gathers(segments, self._rows, full, group.collectives, kernels, comm, device)
        self.gather = combined(gather for gather, _ in parts)
        gathered = {slot.index: tensor for slot, tensor in self.gather.parameters}
        for smaller in segments:
            for slot in smaller.slots:
                self._add(params[slot.index], slot, smaller, gathered[slot.index], full)
        self._rows.release()

    def _add(
        self,
        param: ShardedParam,
        slot: Slot,
        segment: Segment,
        gathered: torch.Tensor,
        full: TransientBuffer,
    ) -> None:
        rank = self._group.collectives.rank
        dtype = segment.full_dtype
        start = segment.shard_byte_offset + slot.shard_offset * dtype.itemsize
        rows = self._rows.view(dtype, start, slot.local_shape(rank))
        self._targets.append(rows)
        self._sources.append(slot.part(gathered, rank))
        between = param.make_smaller(rows, self._group.mesh)
        # Views of views, which a `SwappedBuffer` does not know by itself.
        for buffer, tensor in ((full, self._sources[-1]), (self._rows, local_of(between))):
            buffer.keep_valid(tensor)
        self.swaps += param.swaps(between)

    def keep(self) -> None:
        """Copy this rank's rows out of the gathered buffer."""
        # The rows of an earlier forward are still valid (I17).
        if self.stays:
            return
        # On COMPUTE, after forward: the gathered buffer is freed next (I2).
        self._rows.acquire()
        self._kernels.copy_many(self._targets, self._sources)
        if self.kept is not None:
            self.kept()

    def release(self) -> None:
        if self._rows.allocated and not self.stays:
            self._rows.release()
