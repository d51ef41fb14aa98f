"""All segments packed, in a buffer and by a collective of the user (`set_custom_all_gather`).

    shards ── cast or copy ──> own row of [ranks, n] ══ comm ══> rows ── copy ──> slots

The row holds the segments one after another: in their dtype if they share one, otherwise as bytes.
The buffer may be another one each time, so its views are created for each all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from fsdp2.core.custom_collectives import AllGather, checked_buffer
from fsdp2.core.device.collectives import Work
from fsdp2.core.gather.program import Gather
from fsdp2.core.gather.segments import SegmentViews
from fsdp2.core.layout.layout import Slot


def custom(places: Sequence[SegmentViews], comm: AllGather, device: torch.device) -> Gather:
    parameters = [found for place in places for found in place.parameters()]
    found = _Custom(places, comm, device)
    if not found.nbytes:
        return Gather(parameters)
    return Gather(
        parameters,
        [found.acquire],
        [found.copy_in],
        [found.gather],
        [found.copy_out],
        [found.release],
    )


class _Custom:
    """The buffer of the all-gather that runs, and the rows of all segments in it."""

    def __init__(
        self, places: Sequence[SegmentViews], comm: AllGather, device: torch.device
    ) -> None:
        self._comm, self._device = comm, device
        # Any of them will do: complex numbers are not converted for a user's collective.
        self._collectives = places[0].collectives
        self._parts: list[_Part] = []
        self.nbytes = 0
        for place in places:
            self._parts.append(_Part(place, self.nbytes))
            self.nbytes += self._parts[-1].nbytes
        dtypes = {place.segment.full_dtype for place in places}
        self._dtype: torch.dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self._output: torch.Tensor | None = None
        self._own: torch.Tensor | None = None

    def acquire(self) -> None:
        numel = self.nbytes // self._dtype.itemsize
        size, rank = self._collectives.size, self._collectives.rank
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
        return self._collectives.custom_all_gather(self._comm, self._output, self._own)

    def copy_out(self) -> None:
        assert self._output is not None
        rows = self._output.view(torch.uint8).view(self._collectives.size, self.nbytes)
        for part in self._parts:
            part.take(rows)

    def release(self) -> None:
        self._output = self._own = None


class _Part:
    """One segment: its bytes in every rank's row, from ``start`` on."""

    def __init__(self, place: SegmentViews, start: int) -> None:
        segment = place.segment
        self._place, self._start = place, start
        self._flat = place.shards()
        self.nbytes = segment.shard_numel * segment.full_dtype.itemsize
        in_order = [slot for slot in segment.slots if slot.in_order and slot.shard_numel]
        self._sizes = [slot.shard_numel for slot in in_order]
        self._targets = place.rows_of(in_order)
        self._blocks: list[tuple[Slot, tuple[int, int, int], torch.Tensor]] = [
            (slot, block, place.block(slot, *block))
            for slot in segment.slots
            if not slot.in_order
            for block in slot.blocks()
        ]

    def put(self, row: torch.Tensor) -> None:
        """Cast the shards into this rank's row of bytes."""
        place = self._place
        target = row.narrow(0, self._start, self.nbytes).view(place.segment.full_dtype)
        place.kernels.copy(target, self._flat)

    def take(self, rows: torch.Tensor) -> None:
        """Copy the pieces of all ranks' rows of bytes into the slots."""
        kernels = self._place.kernels
        rows = rows.narrow(1, self._start, self.nbytes).view(self._place.wire)
        if self._sizes:
            columns = rows.narrow(1, 0, sum(self._sizes))
            kernels.split_copy(columns, self._sizes, self._targets)
        sources = []
        for slot, (ranks, first, length), _ in self._blocks:
            shape = (slot.cut.bands, ranks, slot.outer, length, slot.inner)
            pieces = rows.view(slot.cut.bands, slot.per_band, rows.shape[1])
            pieces = pieces.narrow(1, first, ranks)
            sources.append(pieces.narrow(2, slot.shard_offset, prod(shape[2:])).view(shape))
        if sources:
            kernels.copy_many([target for _, _, target in self._blocks], sources)
