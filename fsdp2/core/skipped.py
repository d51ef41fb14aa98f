"""A backward that misses no unit, whatever this rank's loss uses (invariant I11).

Where ranks use different outputs, or parameters, all must run the same collectives in one order:
that of the forward in reverse. Two things differ by rank, and are made up for here. A unit of which
no gradient comes is entered and left where its turn is. One whose own end is not seen, as none of
its inputs requires grad, is left before anything older is entered. That is no sooner than it is
over: autograd runs new nodes first, so all inside it have run before anything older does.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from fsdp2.core.unit import BACKWARD, Unit

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""What autograd's next node will be numbered; those of a later call have higher numbers."""


def running_node() -> int | None:
    """Sequence number of the node that autograd runs; ``None`` outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


class _Begin(NamedTuple):
    """When a unit's call began: which call of a unit it was, and autograd's next node then."""

    call: int
    node: int


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
        ends: sequence number of autograd's next node when each of those calls ended.
        inside: units whose backward has begun and is not over, in that order.
    """

    def __init__(self, finished: Sequence[Unit | None], starts: Sequence[int]) -> None:
        self._finished, self._starts = finished, starts
        self._floor: int | None = None  # of the forward whose backward runs
        self.reached = 0
        self.ends: list[int] = []
        self.inside: list[Unit] = []
        self._calls = 0  # begun so far
        self._begins: dict[Unit, list[_Begin]] = {}  # of the calls whose backward is to come
        self._began: dict[Unit, _Begin] = {}  # of the units inside

    def forward_begins(self, unit: Unit) -> None:
        """A call of ``unit`` begins that has a backward."""
        self._begins.setdefault(unit, []).append(_Begin(self._calls, sequence_number()))
        self._calls += 1

    def backward_begins(self, unit: Unit) -> None:
        """The backward of the last call of ``unit`` begins."""
        calls = self._begins.get(unit)
        if calls:  # none were noted where the mode was chosen after the forward
            self._began[unit] = calls.pop()
            self.inside.append(unit)

    def enter(self, position: int, backward: Backward) -> None:
        """The unit whose call ended at ``position`` is to be entered; take up what is behind it."""
        self._follow(position, backward)
        self._catch_up(position + 1, backward)
        self._leave(position, backward)

    def recompute(self, position: int, node: int, backward: Backward) -> None:
        """The call that ended at ``position`` runs again; take up what backward is past.

        That is not all behind it, where more units than this one run again.

        Args:
            position: of the call.
            node: sequence number of the node of autograd that it runs for.
            backward: what enters and leaves units.
        """
        self._follow(position, backward)
        if len(self.ends) < len(self._finished):  # the mode was chosen after the forward
            return
        # Not calls in which that node is the last, nor those of a reentrant checkpoint that it is
        # the node of: they made none.
        self._catch_up(bisect.bisect_right(self.ends, node + 1), backward)
        over = [unit for unit in self.inside if self._began[unit].node > node]
        for unit in sorted(over, key=self._began.__getitem__, reverse=True):
            self.inside.remove(unit)
            backward.exit_backward(unit)

    def _follow(self, position: int, backward: Backward) -> None:
        """The backward is in the forward that ``position`` is in."""
        forward = bisect.bisect_right(self._starts, position) - 1
        start = self._starts[forward]
        if start != self._floor:
            if self._floor is not None:
                self._catch_up(self._floor, backward)  # the rest of a later forward
            following = self._starts[forward + 1 : forward + 2]
            self.reached = following[0] if following else len(self._finished)
            self._floor = start

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

    def interrupt(self) -> None:
        """A backward is over that followed only a part of a forward; it has missed nothing."""
        self._floor = None
        self.inside.clear()

    def forget(self) -> None:
        """There is no forward to follow any more."""
        self._floor = None
        self.reached = self._calls = 0
        self.ends.clear()
        self.inside.clear()
        self._begins.clear()
        self._began.clear()

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
            last = max(self.inside, key=self._began.__getitem__)
            if last is but or last.began <= position:
                return
            self.inside.remove(last)
            backward.exit_backward(last)
