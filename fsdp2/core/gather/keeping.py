"""Which all-gather a group that keeps rows makes next: a fresh one, or one from its rows.

    fresh   shards ══ all-gather ══> rows ── copy ──> slots     as its first operation: begin
    again                            rows ── copy ──> slots     as its last one: end

    fresh ── an all-gather has ended ──> again ── forget ──> fresh

Rows of all ranks are kept (`KeptRows`), or of a node (`levels`), or of a smaller group, which a
forward leaves (`smaller_group`). An all-gather evaluates no condition: its last operation chooses
the next one. `fsdp2.core.schedule.reuse` knows when shards may have changed, and calls `forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdp2.core.gather.levels import NodeRows
from fsdp2.core.gather.make import Part
from fsdp2.core.gather.program import Gather, combined
from fsdp2.core.gather.segments import KeptRows
from fsdp2.core.gather.smaller_group import SmallerRows


class Keeping:
    """The two all-gathers of a group that keeps rows: ``fresh`` with collectives, and ``again``.

    ``gather`` is that of all segments, through both levels if there are two; ``load`` copies
    offloaded shards from the host first; ``choose`` is called with the next one. Rows of a
    ``smaller`` group stay, or rows of ``nodes``, from which others than kept ones are gathered.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        gather: Gather,
        load: Gather | None,
        choose: Callable[[Gather], None],
        nodes: NodeRows | None = None,
        smaller: SmallerRows | None = None,
    ) -> None:
        self._choose, self._nodes, self._smaller = choose, nodes, smaller
        self.kept = [kept for _, kept in parts if kept is not None]
        ends = [] if smaller is not None else [self._end]
        self.fresh = replace(
            gather, acquire=[*gather.acquire, self._begin], finish=[*gather.finish, *ends]
        )
        if smaller is not None:
            self.again = smaller.gather
            smaller.kept = self._end  # its rows are copied when forward is over
        else:
            others = [each for each, kept in parts if kept is None]
            again = [Gather(copy_out=kept.rows.put) for kept in self.kept] + others
            if load is not None and nodes is None and others:  # which read shards once more
                again.insert(0, load)
            self.again = combined(again)
        self.current = self._counts = False

    @property
    def nbytes(self) -> int:
        """Memory of the rows of all ranks, once they are there."""
        return sum(kept.rows.output.nbytes for kept in self.kept)

    def _begin(self) -> None:
        """An all-gather begins: its result counts, unless `forget` is called before it ends."""
        self._counts = True

    def _end(self) -> None:
        """Rows are there."""
        if self._counts:
            self.current = True
            if self._smaller is not None:
                self._smaller.stays = True
            self._choose(self.again)

    def forget(self) -> None:
        """Let the next gather communicate."""
        self._counts = self.current = False
        if self._smaller is not None:
            self._smaller.stays = False
        self._choose(self.fresh)

    def free(self) -> None:
        """Free memory that the next all-gather fills again, if no operation reads it."""
        if self.current:
            return
        if self._nodes is not None:
            self._nodes.free()
        if self._smaller is not None:
            self._smaller.release()

    def lose(self) -> None:
        """As `forget`, where a gather may have stopped half way."""
        self.forget()
        for kept in self.kept:
            kept.lose()

    def follow(self, former: Keeping) -> None:
        """Take over the rows of the earlier binding to the same segments."""
        if self._smaller is not None:
            return
        known = self._known_to(former)
        for kept, before in known:
            kept.follow(before)
        # All segments, or none: `again` has no collective for one that lacks rows.
        if former.current and self._nodes is None and len(known) == len(self.kept):
            self.current = True
            self._choose(self.again)

    def inherit(self, former: Keeping) -> None:
        """Take over what remains valid if shards may have other values and memory."""
        for kept, before in self._known_to(former):
            kept.inherit(before)

    def _known_to(self, former: Keeping) -> list[tuple[KeptRows, KeptRows]]:
        before = {kept.place.segment: kept for kept in former.kept}
        return [
            (kept, before[kept.place.segment]) for kept in self.kept if kept.place.segment in before
        ]
