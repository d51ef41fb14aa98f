"""Rows that outlive their gather: the next gathers put them in place again, without a collective.

    fresh   shards ══ all-gather ══> rows ── copy ──> slots
    again                            rows ── copy ──> slots

    Keeping    fresh ── a gather is finished ──> again ── forget ──> fresh

A group that keeps rows has both routes. When its shards may have changed it does not know: whoever
does calls `forget` (`fsdp2.core.schedule.reuse`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        """Take over what counts of one that was bound to what were other shards, maybe: nothing."""

    @property
    def holds_rows(self) -> bool:
        """Whether a gather has brought rows."""
        return self._packed.allocated

    def lose(self) -> None:
        """What a gather has brought is not whole."""

    def release(self) -> None:
        """The rows stay."""


class _Again(GatherTransport):
    """Puts kept rows in place, and communicates nothing."""

    communicates = False

    def __init__(self, kept: KeptTransport) -> None:
        self.copy_out = kept.put  # type: ignore[method-assign]  # a call less


class Keeping(GatherTransport):
    """Which route a group's next gather takes: it is the last transport of the fresh one.

    Args:
        transports: of the group.
        load: as for `Route`.
        choose: called with the route that the next gather is to take.

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
    ) -> None:
        self._choose = choose
        self._kept = [t for t in transports if isinstance(t, KeptTransport)]
        others = [t for t in transports if not t.keeps]
        self.fresh = Route([*transports, self], load)
        self.fresh.acquiring.append(self)  # told when a gather begins
        loads = load if any(not t.keeps for t in transports) else None
        self.again = Route([*map(_Again, self._kept), *others], loads)
        self.current = self._counts = False

    @property
    def nbytes(self) -> int:
        """Memory of the rows, once they are there."""
        return sum(transport.output.nbytes for transport in self._kept)

    def acquire(self) -> None:
        """A gather begins: what it brings counts, unless it is forgotten before."""
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

    def lose(self) -> None:
        """The same, where a gather may have stopped half way."""
        self.forget()
        for transport in self._kept:
            transport.lose()

    def follow(self, former: Keeping) -> None:
        """Take over what was bound before to the same segments."""
        known = self._known_to(former)
        for kept, before in known:
            kept.follow(before)
        if former.current and len(known) == len(self._kept):
            self.current = True
            self._choose(self.again)

    def inherit(self, former: Keeping) -> None:
        """Take over what counts where shards may be others, as values and in memory."""
        for kept, before in self._known_to(former):
            kept.inherit(before)

    def _known_to(self, former: Keeping) -> list[tuple[KeptTransport, KeptTransport]]:
        before = {kept.segment: kept for kept in former._kept}
        return [(kept, before[kept.segment]) for kept in self._kept if kept.segment in before]
