"""Node rows: the rows from which ranks of a node gather, if masters are sharded over all ranks.

    masters ══ all-gather between nodes ══> node rows ══ all-gather inside a node ══> gathered
     shard    (cast to the compute dtype)    [ rank's rows of each parameter ]

Both are launched one after the other: on the lane of all-gathers, or, if the host waits for its
launches, the second when it waits for the first. Between nodes each rank receives only its own
rows: (N - 1) / N of 1 / L of the parameters, over N nodes of L ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from fsdp2.core.device.buffers import Buffer, TransientBuffer
from fsdp2.core.device.collectives import Collectives, Launch, Work
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.gather.kinds import make_transports
from fsdp2.core.gather.transport import GatherTransport, Load, Route
from fsdp2.core.layout.layout import GroupLayout, Segment
from fsdp2.core.layout.levels import gaps


class NodeRows(GatherTransport):
    """Fills node rows, before the all-gather inside.

    Args:
        name: the group's.
        pieces: the positions of masters in the flat shard and in node rows.
        shard: the flat shard, or the device's copy of it.
        between: collectives of the ranks that share rows.
        kernels: memory and copies.
        device: where the rows are.
        codec: name of the transport of coded segments.

    Attributes:
        rows: the buffer; allocated when this is created.
        stays: whether its memory stays until it is freed explicitly, not per all-gather.
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
        self._transports = make_transports(
            pieces.segments, shard, self.rows, between, kernels, None, device, codec
        )
        self._own = Route(self._transports)
        self._gaps: list[torch.Tensor] = []
        self._zeros: list[torch.Tensor] = []
        self._inside = Route(())
        self.casts = bool(self._own.copying)

    def route(self, transports: Sequence[GatherTransport], load: Load | None) -> Route:
        """A gather through both levels.

        Args:
            transports: those of the gather inside.
            load: what copies masters from the host first, if they live there.
        """
        self._inside = inside = Route(transports)
        self.communicates = bool(self._own.gathers or inside.gathers)  # empty ones have none
        route = Route([self, *transports], load)
        route.gathers = [self.gather] if self.communicates else []
        route.copying = [each for each in route.copying if each not in inside.copying]
        return route

    def fill_gaps(self, segments: Sequence[Segment], rank: int) -> None:
        """Set the padding of node rows to zero, because block codecs read it.

        Args:
            segments: of node rows, those that are coded inside.
            rank: this process's place in the node.
        """
        for segment in segments:
            dtype, start = segment.full_dtype, segment.shard_byte_offset
            for first, length in gaps(segment, rank):
                place = start + first * dtype.itemsize
                self._gaps.append(self.rows.view(dtype, place, (length,)))
                self._zeros.append(self._kernels.zeros((length,), dtype, "padding"))

    def acquire(self) -> None:
        self.rows.acquire()
        for transport in self._own.acquiring:
            transport.acquire()

    def copy_in(self) -> None:
        for transport in self._own.copying:
            transport.copy_in()

    def gather(self) -> Work | None:
        works = [work for launch in self._own.gathers if (work := launch()) is not None]
        inside = self._inside
        landing: list[Callable[[], object]] = [each.copy_out for each in self._own.finishing]
        if self._gaps:
            landing.append(partial(self._kernels.copy_many, self._gaps, self._zeros))
        landing += [each.copy_in for each in inside.copying]  # of node rows, which are there then
        following = _Following(works, landing, inside.gathers)
        if works:
            return following
        following.go_on()
        return following if following.works else None

    def release(self) -> None:
        for transport in self._own.finishing:
            transport.release()
        if not self.stays:
            self.free()

    def free(self) -> None:
        """Free the rows, if they exist."""
        if self.rows.allocated:
            self.rows.release()


class _Following:
    """A gather inside that follows one between nodes, which the host waits for.

    Attributes:
        works: the collectives for which it waits next.
    """

    __slots__ = ("_inside", "_landing", "works")

    def __init__(
        self,
        works: list[Work],
        landing: Sequence[Callable[[], object]],
        inside: Sequence[Launch],
    ) -> None:
        self.works = works
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
