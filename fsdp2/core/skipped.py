"""A backward that misses no unit, whatever this rank's loss uses (invariant I11).

Where ranks use different outputs, or parameters, all must run the same collectives in one order:
that of the forward in reverse. Two things differ by rank, and are made up for here. A unit of which
no gradient comes is entered and left where its turn is. One whose own end is not seen, as none of
its inputs requires grad, is left before anything older is entered. That is no sooner than it is
over: autograd runs new nodes first, so all inside it have run before anything older does.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Protocol

from fsdp2.core.unit import BACKWARD, Unit


class Backward(Protocol):
    """What enters and leaves units: the scheduler."""

    def begin_backward(self, unit: Unit) -> None:
        """Gather ``unit`` for its backward."""

    def exit_backward(self, unit: Unit) -> None:
        """Free and reduce ``unit``."""


class Retracing:
    """How far a backward has come in the forwards that it follows.

    Args:
        finished: units in the order in which their calls ended; ``None`` where backward began.
        starts: first positions in it of each forward.

    Attributes:
        reached: the position that it is at; what is behind is taken.
        inside: units whose backward has begun and is not over, in that order.
    """

    def __init__(self, finished: Sequence[Unit | None], starts: Sequence[int]) -> None:
        self._finished, self._starts = finished, starts
        self._floor: int | None = None  # of the forward whose backward runs
        self.reached = 0
        self.inside: list[Unit] = []

    def enter(self, position: int, backward: Backward, recomputes: bool) -> None:
        """The unit that ended at ``position`` is to be entered; take up what is behind it.

        Args:
            position: of the unit's call; one without groups has that of the last one inside.
            backward: what enters and leaves units.
            recomputes: whether the unit's forward runs again, which may be ahead of the backward
                of units that are not over: none is left then that was entered before.
        """
        under_way: list[Unit] = []
        if recomputes:
            under_way, self.inside = self.inside, under_way
        forward = bisect.bisect_right(self._starts, position) - 1
        start = self._starts[forward]
        if start != self._floor:
            if self._floor is not None:
                self._catch_up(self._floor, backward)  # the rest of a later forward
            following = self._starts[forward + 1 : forward + 2]
            self.reached = following[0] if following else len(self._finished)
            self._floor = start
        self._catch_up(position + 1, backward)
        self._leave(position, backward)
        self.inside[:0] = under_way

    def exit(self, unit: Unit, backward: Backward) -> None:
        """The end of ``unit`` was seen: take up the rest of what is inside it."""
        self._catch_up(unit.began, backward)
        self._leave(unit.began - 1, backward, but=unit)
        self.inside.remove(unit)

    def end(self, backward: Backward) -> None:
        """The whole backward has run: take up the rest."""
        if self._floor is not None:
            self._catch_up(self._floor, backward)
            self._floor = None
        self._leave(-1, backward)

    def forget(self) -> None:
        """There is no forward to follow any more."""
        self._floor = None
        self.inside.clear()

    def _catch_up(self, position: int, backward: Backward) -> None:
        """Enter the units that this backward skips, down to ``position``."""
        while self.reached > position:
            self.reached -= 1
            skipped = self._finished[self.reached]
            if skipped is not None and skipped.visits[-1:] == [self.reached]:
                self._leave(self.reached, backward)
                if skipped.phase is not BACKWARD:
                    backward.begin_backward(skipped)

    def _leave(self, position: int, backward: Backward, but: Unit | None = None) -> None:
        """Leave units whose calls began behind ``position``, the last first, down to ``but``."""
        while self.inside:
            last = max(reversed(self.inside), key=lambda unit: unit.began)
            if last is but or last.began <= position:
                return
            self.inside.remove(last)
            backward.exit_backward(last)
