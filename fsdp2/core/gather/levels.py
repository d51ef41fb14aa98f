"""Node rows: the rows from which ranks of a node gather, if masters are sharded over all ranks.

    masters ══ all-gather between nodes ══> node rows ══ all-gather inside a node ══> gathered
     shard    (cast to the compute dtype)    [ rank's rows of each parameter ]

Both are launched one after the other: on the lane of all-gathers, or, if the host waits for its
launches, the second when it waits for the first. Between nodes each rank receives only its own
rows: (N - 1) / N of 1 / L of the parameters, over N nodes of L ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from fsdp2.core.device.buffers import Buffer, TransientBuffer
from fsdp2.core.device.collectives import Collectives, Launch, Work
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.gather.make import make_gathers
from fsdp2.core.gather.program import Gather, Run, combined
from fsdp2.core.layout.layout import GroupLayout, Segment
from fsdp2.core.layout.levels import gaps


class NodeRows:
    """Fills node rows, before the all-gather inside.

    ``pieces`` says where masters are in the flat ``shard`` (or the device's copy) and in node rows;
    ``between`` are collectives of the ranks that share rows. If it ``stays``, the memory of
    ``rows`` is freed explicitly, not per all-gather.
    """

    def __init__(
        self,
        name: str,
        pieces: GroupLayout,
        shard: Buffer,
        between: Collectives,
        kernels: Kernels,
        device: torch.device,
        codec: str | None = None,
    ) -> None:
        self.rows: TransientBuffer = kernels.transient(pieces.full_bytes, f"node rows of {name}")
        self.stays = False
        self._kernels = kernels
        parts = make_gathers(
            pieces.segments, shard, self.rows, between, kernels, None, device, codec
        )
        self._own = combined(gather for gather, _ in parts)
        self._gaps: list[torch.Tensor] = []
        self._zeros: list[torch.Tensor] = []

    def before(self, inside: Gather) -> Gather:
        """An all-gather through both levels, of which ``inside`` is that inside a node."""
        own = self._own
        release = [*own.release, self._leave]
        finish = [*release, *inside.finish]
        found = replace(inside, release=[*release, *inside.release], finish=finish)
        if not (own.collectives or inside.collectives):  # empty parameters have nothing to say
            return replace(found, acquire=[], copy_in=[])
        acquire = [self.rows.acquire, *own.acquire, *inside.acquire]
        # One launch for both levels: the copies between them run on ALL_GATHER, too.
        launch = partial(self._launch, inside)
        return replace(found, acquire=acquire, copy_in=own.copy_in, collectives=[launch])

    def fill_gaps(self, segments: Sequence[Segment], rank: int) -> None:
        """Zero the padding of coded ``segments`` of node rows, because block codecs read it."""
        for segment in segments:
            dtype, start = segment.full_dtype, segment.shard_byte_offset
            for first, length in gaps(segment, rank):
                place = start + first * dtype.itemsize
                self._gaps.append(self.rows.view(dtype, place, (length,)))
                self._zeros.append(self._kernels.zeros((length,), dtype, "padding"))

    def _launch(self, inside: Gather) -> Work | None:
        following = _Following()
        for launch in self._own.collectives:
            following.start(launch)
        rest: list[Run] = [*self._own.copy_out]
        if self._gaps:
            rest.append(partial(self._kernels.copy_many, self._gaps, self._zeros))
        rest += inside.copy_in  # of node rows, which are there then
        rest += [partial(following.start, launch) for launch in inside.collectives]
        if following.steps:
            # On a CPU the rows come later; the host cannot launch the second gather before that.
            following.steps += rest
            return following
        for run in rest:
            run()
        return following if following.steps else None

    def _leave(self) -> None:
        if not self.stays:
            self.free()

    def free(self) -> None:
        if self.rows.allocated:
            self.rows.release()


class _Following:
    """The rest of an all-gather, for the host: waits, and after those between nodes all else."""

    def __init__(self) -> None:
        self.steps: list[Run] = []

    def start(self, launch: Launch) -> None:
        work = launch()
        if work is not None:
            self.steps.append(work.wait)

    def wait(self) -> None:
        while self.steps:
            self.steps[0]()
            del self.steps[0]  # once it has run: a wait may be interrupted and repeated
