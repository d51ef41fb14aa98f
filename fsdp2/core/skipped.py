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

next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""What autograd's next node will be numbered; those of a later call have higher numbers."""


def running_node() -> int | None:
    """Sequence number of the node that autograd runs; ``None`` outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


class _Begin(NamedTuple):
    """When a unit's call began.

    Attributes:
        call: how many calls had begun before it.
        node: autograd's next node then.
        ended: how many calls had ended before it: the first position that is inside of it.
    """

    call: int
    node: int
    ended: int


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
        inside: units whose backward has begun and is not over, and when the call began whose it is.
    """

    def __init__(self, finished: Sequence[Unit | None], starts: Sequence[int]) -> None:
        self._finished, self._starts = finished, starts
        self._floor: int | None = None  # of the forward whose backward runs
        self._reached = 0  # the position that it is at; what is behind is taken
        self._calls = 0  # begun so far
        self._begins: dict[Unit, list[_Begin]] = {}  # of the calls whose backward is to come
        self._ends: list[int] = []  # autograd's next node when each of `finished` ended
        self.inside: dict[Unit, _Begin] = {}

    def forward_begins(self, unit: Unit) -> None:
        """A call of ``unit`` begins that has a backward."""
        begin = _Begin(self._calls, next_node(), len(self._finished))
        self._begins.setdefault(unit, []).append(begin)
        self._calls += 1

    def forward_ends(self) -> None:
        """The call ends that was finished last."""
        self._ends.append(next_node())

    def backward_begins(self, unit: Unit) -> None:
        """The backward of the last call of ``unit`` begins."""
        calls = self._begins.get(unit)
        if calls:  # none were noted where the mode was chosen after the forward
            self.inside[unit] = calls.pop()

    def enter(self, position: int, backward: Backward) -> None:
        """The unit whose call ended at ``position`` is to be entered; take up what is behind it."""
        self._follow(position, backward)
        self._catch_up(position + 1, backward)
        self._leave_behind(position, backward)

    def recompute(self, unit: Unit, node: int, backward: Backward) -> None:
        """The last call of ``unit`` runs again; take up what backward is past.

        That is not all behind it, where more units than this one run again.

        Args:
            unit: whose call it is.
            node: sequence number of the node of autograd that it runs for.
            backward: what enters and leaves units.
        """
        self._follow(unit.visits[-1], backward)
        if len(self._ends) < len(self._finished):  # the mode was chosen after the forward
            return
        begun = self._begins.get(unit)
        call = begun[-1].call if begun else 0  # around none, where all were entered
        # Not calls in which that node is the last, nor those of a reentrant checkpoint that it is
        # the node of: they made none.
        self._catch_up(bisect.bisect_right(self._ends, node + 1), backward)
        # Nor a list of modules around this call, of which it was the first thing in the checkpoint.
        self._leave_until(
            lambda last: self.inside[last].node <= node or self.inside[last].call < call, backward
        )

    def is_past(self, unit: Unit) -> bool:
        """Whether backward runs a node that is older than the call whose backward ``unit`` is in.

        Nobody enters anything between two calls of a unit where a rank skips what is there.
        """
        begin, node = self.inside.get(unit), running_node()
        return begin is not None and node is not None and node < begin.node

    def _follow(self, position: int, backward: Backward) -> None:
        """The backward is in the forward that ``position`` is in."""
        forward = bisect.bisect_right(self._starts, position) - 1
        start = self._starts[forward]
        if start != self._floor:
            if self._floor is not None:
                self._catch_up(self._floor, backward)  # the rest of a later forward
            following = self._starts[forward + 1 : forward + 2]
            self._reached = following[0] if following else len(self._finished)
            self._floor = start

    def exit(self, unit: Unit, backward: Backward) -> None:
        """The end of ``unit`` was seen: take up the rest of what is inside it."""
        self._catch_up(self.inside[unit].ended, backward)
        self._leave_until(lambda last: last is unit, backward)
        del self.inside[unit]

    def end(self, backward: Backward) -> None:
        """The whole backward has run: take up the rest."""
        if self._floor is not None:
            self._catch_up(self._floor, backward)
            self._floor = None
        self._leave_until(lambda last: False, backward)

    def interrupt(self) -> None:
        """A backward is over that followed only a part of a forward; it has missed nothing."""
        self._floor = None
        self.inside.clear()

    def forget(self) -> None:
        """There is no forward to follow any more."""
        self._floor = None
        self._reached = self._calls = 0
        self._begins.clear()
        self._ends.clear()
        self.inside.clear()

    def _catch_up(self, position: int, backward: Backward) -> None:
        """Enter the units that this backward skips, down to ``position``."""
        while self._reached > position:
            self._reached -= 1
            skipped = self._finished[self._reached]
            if skipped is not None and skipped.visits[-1:] == [self._reached]:
                self._leave_behind(self._reached, backward)
                if skipped.phase is not BACKWARD:
                    backward.begin_backward(skipped)

    def _leave_behind(self, position: int, backward: Backward) -> None:
        """Leave the units whose calls began behind ``position``."""
        self._leave_until(lambda last: self.inside[last].ended <= position, backward)

    def _leave_until(self, stays: Callable[[Unit], bool], backward: Backward) -> None:
        """Leave units, the one whose call began last first, until that one ``stays``."""
        while self.inside:
            last = max(self.inside, key=self.inside.__getitem__)
            if stays(last):
                return
            del self.inside[last]
            backward.exit_backward(last)
