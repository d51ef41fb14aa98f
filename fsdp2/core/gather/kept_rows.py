"""Rows that outlive their all-gather: later ones copy them into the slots again, without a
collective.

    fresh   shards ══ all-gather ══> rows ── copy ──> slots
    again                            rows ── copy ──> slots

    Keeping    fresh ── a gather is finished ──> again ── forget ──> fresh

A group that keeps rows has both routes. It does not know when its shards may have changed:
`fsdp2.core.schedule.reuse` does, and calls `forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fsdp2.core.gather.transport import GatherTransport, Load, PackedTransport, Route

ROWS = "kept rows"


class KeptTransport(PackedTransport):
    """Packed rows, whose memory stays from the first gather on."""

    keeps = True
    output_name = ROWS

    def put(self) -> None:
        """Copy the rows into their slots once more."""
        super().copy_out()

    def follow(self, former: KeptTransport) -> None:
        """Take over the rows of the transport that was bound before."""
        if former.holds_rows:
            self._packed.acquire()
            self.kernels.copy(self.output, former.output)

    def inherit(self, former: KeptTransport) -> None:
        """Take over nothing from one that may have been bound to other shards."""

    @property
    def holds_rows(self) -> bool:
        """Whether a gather has brought rows."""
        return self._packed.allocated

    def lose(self) -> None:
        """Take rows for lost: a gather may have stopped half way."""

    def release(self) -> None:
        """The rows stay."""


class _Again(GatherTransport):
    """Puts kept rows in place, and communicates nothing."""

    communicates = False

    def __init__(self, kept: KeptTransport) -> None:
        self.copy_out = kept.put  # type: ignore[method-assign]  # a call less


class Nearby(Protocol):
    """Rows in front of a gather, `fsdp2.core.gather.levels.NodeRows`."""

    def route(self, transports: Sequence[GatherTransport], load: Load | None) -> Route:
        """A gather that fills them first."""

    def free(self) -> None:
        """Free them, if they exist."""


class Keeping(GatherTransport):
    """Which route a group's next gather takes: it is the last transport of the fresh one.

    Args:
        transports: of the group.
        load: as for `Route`.
        choose: called with the route that the next gather is to take.
        nodes: rows of a node that others than kept ones are gathered from, if there are any: they
            stay, too.

    Attributes:
        fresh: the route with collectives, of gathers after which rows are kept.
        again: the route of gathers that reuse them.
        current: whether rows are reused by the next gather.
    """

    communicates = False

    def __init__(
        self,
        transports: Sequence[GatherTransport],
        load: Load | None,
        choose: Callable[[Route], None],
        nodes: Nearby | None = None,
    ) -> None:
        self._choose = choose
        self._kept = [t for t in transports if isinstance(t, KeptTransport)]
        others = [t for t in transports if not t.keeps]
        self._nodes = nodes
        if nodes is None:
            self.fresh = Route([*transports, self], load)
            load = load if others else None
        else:
            self.fresh, load = nodes.route([*transports, self], load), None
        self.fresh.acquiring.append(self)  # told when a gather begins
        self.again = Route([*map(_Again, self._kept), *others], load)
        self.current = self._counts = False

    @property
    def nbytes(self) -> int:
        """Memory of the rows, once they are there."""
        return sum(transport.output.nbytes for transport in self._kept)

    def acquire(self) -> None:
        """An all-gather begins: its result counts, unless `forget` is called before."""
        self._counts = True

    def copy_out(self) -> None:
        """It is finished."""
        if self._counts:
            self.current = True
            self._choose(self.again)

    def forget(self) -> None:
        """Let the next gather communicate."""
        self._counts = self.current = False
        self._choose(self.fresh)

    def free(self) -> None:
        """Free memory that the next all-gather fills again, if no operation reads it."""
        if self._nodes is not None and not self.current:
            self._nodes.free()

    def lose(self) -> None:
        """The same, where a gather may have stopped half way."""
        self.forget()
        for transport in self._kept:
            transport.lose()

    def follow(self, former: Keeping) -> None:
        """Take over the rows of the earlier binding to the same segments."""
        known = self._known_to(former)
        for kept, before in known:
            kept.follow(before)
        if former.current and self._nodes is None and len(known) == len(self._kept):
            self.current = True
            self._choose(self.again)

    def inherit(self, former: Keeping) -> None:
        """Take over what remains valid if shards may have other values and memory."""
        for kept, before in self._known_to(former):
            kept.inherit(before)

    def _known_to(self, former: Keeping) -> list[tuple[KeptTransport, KeptTransport]]:
        before = {kept.segment: kept for kept in former._kept}
        return [(kept, before[kept.segment]) for kept in self._kept if kept.segment in before]
