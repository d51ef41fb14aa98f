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
        works = [work for launch in self._own.collectives if (work := launch()) is not None]
        landing = [*self._own.copy_out]
        if self._gaps:
            landing.append(partial(self._kernels.copy_many, self._gaps, self._zeros))
        landing += inside.copy_in  # of node rows, which are there then
        following = _Following(works, landing, inside.collectives)
        # On a CPU the rows come later; the host cannot launch the second gather before that.
        if works:
            return following
        following.go_on()
        return following if following.works else None

    def _leave(self) -> None:
        if not self.stays:
            self.free()

    def free(self) -> None:
        if self.rows.allocated:
            self.rows.release()


class _Following:
    """A gather inside after one between nodes, for whose ``works`` the host waits first."""

    __slots__ = ("_inside", "_landing", "works")

    def __init__(
        self,
        works: list[Work],
        landing: Sequence[Run],
        inside: Sequence[Launch],
    ) -> None:
        self.works = works
        # Copies, because each is removed once it has run: a wait may be interrupted and repeated.
        self._landing = [*landing]
        self._inside = [*inside]

    def wait(self) -> None:
        """Wait for the first, launch the second, and wait for that; again after an interrupt."""
        self._wait()
        self.go_on()
        self._wait()

    def _wait(self) -> None:
        while self.works:
            self.works[-1].wait()
            self.works.pop()

    def go_on(self) -> None:
        """Copy received pieces into node rows, and gather inside the node."""
        while self._landing:
            self._landing[0]()
            self._landing.pop(0)
        while self._inside:
            work = self._inside[0]()
            self._inside.pop(0)
            if work is not None:
                self.works.append(work)
