"""A backward that runs every unit, also those that this rank's loss does not use (invariant I11).

If ranks use different outputs, or parameters, all must run the same collectives in one order: that
of the forward in reverse. A unit that receives no gradient is entered and left at its position. A
unit whose end has no hook, because none of its inputs requires grad, is left before any older unit
is entered: autograd runs newer nodes first, so all nodes inside it have run by then.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fsdp2.core.schedule.unit import BACKWARD, IDLE, Unit

NOWHERE = -2
"""The position of a call inside another, of a unit without groups: there is none."""

Turn = Callable[[Unit, bool], None]
"""The scheduler's: enters the backward of a call of a unit that is skipped, or leaves one."""

next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of autograd's next node; nodes of a later call have higher numbers."""


def running_node() -> int | None:
    """Sequence number of the node that autograd runs; ``None`` outside backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


class _Begin(NamedTuple):
    """When a unit's call began: after how many calls had begun, at which next node of autograd, and
    after how many calls had ``ended``, which is the first position inside it.
    """

    call: int
    node: int
    ended: int


class Retracing:
    """The progress of a backward in the forwards that it follows; arguments as in `Iteration`.

    ``inside`` has units whose backward is running, and when the call of that backward began;
    ``filled`` those whose absent gradients were taken as zeros.
    """

    def __init__(self, finished: Sequence[Unit | None], starts: Sequence[int]) -> None:
        self._finished, self._starts = finished, starts
        self._floor: int | None = None  # of the forward whose backward runs
        self._reached = 0  # its position; later positions are taken
        self._calls = 0  # begun so far
        self._begins: dict[Unit, list[_Begin]] = {}  # of the calls whose backward is to come
        self._ends: list[int] = []  # autograd's next node when each of `finished` ended
        self._first: list[int] = []  # the same when each forward's first call began
        self.inside: dict[Unit, _Begin] = {}
        self.filled: set[Unit] = set()

    def forward_begins(self, unit: Unit) -> None:
        """A call of ``unit`` begins that has a backward."""
        if len(self._first) < len(self._starts):
            self._first.append(next_node())
        begin = _Begin(self._calls, next_node(), len(self._finished))
        self._begins.setdefault(unit, []).append(begin)
        self._calls += 1

    def forward_gives_up(self, unit: Unit) -> None:
        """The last call of ``unit`` that has begun raised: it has no backward."""
        calls = self._begins.get(unit)
        if calls:
            calls.pop()

    def forward_ends(self) -> None:
        """The last finished call has ended."""
        self._ends.append(next_node())

    def comes_to(self, unit: Unit, recomputed_for: int | None, turn: Turn) -> bool:
        """The backward of a call of ``unit`` is to begin: enter the units that it skips.

        Returns whether ``unit`` is entered now; not if its forward runs again, for the autograd
        node of the number ``recomputed_for``, before its position.
        """
        if not unit.visits or unit.visits[-1] == NOWHERE:
            return True
        if recomputed_for is not None:
            self._recompute(unit, recomputed_for, turn)
            return False
        position = unit.visits[-1]
        self._follow(position, turn)
        self._catch_up(position + 1, turn)
        self._leave_behind(position, turn)
        return True

    def backward_begins(self, unit: Unit, node: int | None) -> None:
        """The backward of a call of ``unit`` begins: of the last, or of ``node``'s."""
        if unit.phase is IDLE:
            self.filled.discard(unit)
        if not unit.groups:
            return
        calls = self._begins.get(unit)
        if calls:  # none were noted where the mode was chosen after the forward
            begin = calls.pop()
            if node is not None and begin.node > node:
                begin = self._of_node(node, begin, calls)
            self.inside[unit] = begin

    @staticmethod
    def _of_node(node: int, last: _Begin, calls: list[_Begin]) -> _Begin:
        """If backwards of several forwards run first to last: the call that contains ``node``.

        All ranks count positions as if the last call's came first. Nodes are a rank's own: they
        are the ones of the call that it is, which takes the last one's place.
        """
        for index in reversed(range(len(calls))):
            if calls[index].node <= node:
                own = calls[index].node
                calls[index] = calls[index]._replace(node=last.node)
                return last._replace(node=own)
        return last

    def _recompute(self, unit: Unit, node: int, turn: Turn) -> None:
        """The last call of ``unit`` runs again, for autograd's ``node``: handle passed units."""
        self._follow(unit.visits[-1], turn)
        if len(self._ends) < len(self._finished):  # the mode was chosen after the forward
            return
        begun = self._begins.get(unit)
        call = begun[-1].call if begun else 0  # around none, where all were entered
        # Except calls in which that node is the last, and those of a reentrant checkpoint whose
        # node it is: they made none.
        self._catch_up(self._ended_before(node + 1), turn)
        # Except a list of modules around this call, whose first part in the checkpoint it was.
        self._leave_until(
            lambda last: self.inside[last].node <= node or self.inside[last].call < call, turn
        )

    def _ended_before(self, node: int) -> int:
        """The first position that ended after ``node``, in the forward that backward follows."""
        found = bisect.bisect_right(self._ends, node)
        if len(self._first) < len(self._starts) or self._floor is None:
            return found
        followed = bisect.bisect_right(self._starts, self._floor) - 1
        own = max(bisect.bisect_right(self._first, node) - 1, 0)
        return found + self._starts[followed] - self._starts[own]

    def is_past(self, unit: Unit) -> bool:
        """Whether backward runs an older node than the call whose backward ``unit`` is in."""
        begin, node = self.inside.get(unit), running_node()
        return begin is not None and node is not None and node < begin.node

    def _follow(self, position: int, turn: Turn) -> None:
        """The backward is in the forward that ``position`` is in."""
        forward = bisect.bisect_right(self._starts, position) - 1
        start = self._starts[forward]
        if start != self._floor:
            if self._floor is not None:
                self._catch_up(self._floor, turn)  # the rest of a later forward
            following = self._starts[forward + 1 : forward + 2]
            self._reached = following[0] if following else len(self._finished)
            self._floor = start

    def exit(self, unit: Unit, turn: Turn) -> None:
        """The end of ``unit`` was seen: take up the rest of what is inside it."""
        self._catch_up(self.inside[unit].ended, turn)
        self._leave_until(lambda last: last is unit, turn)
        del self.inside[unit]

    def end(self, turn: Turn) -> None:
        """The whole backward has run: take up the rest."""
        if self._floor is not None:
            self._catch_up(self._floor, turn)
            self._floor = None
        self._leave_until(lambda last: False, turn)

    def fills(self, unit: Unit, over: bool) -> bool:
        """Whether absent gradients of ``unit`` count as zeros now: once (invariant I10)."""
        if unit in self.filled or not (over or not unit.visits):
            return False
        self.filled.add(unit)
        return True

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
        self._first.clear()
        self.inside.clear()

    def _catch_up(self, position: int, turn: Turn) -> None:
        """Enter the units that this backward skips, down to ``position``."""
        while self._reached > position:
            self._reached -= 1
            skipped = self._finished[self._reached]
            if skipped is not None and skipped.visits[-1:] == [self._reached]:
                self._leave_behind(self._reached, turn)
                if skipped.phase is not BACKWARD:
                    turn(skipped, True)

    def _leave_behind(self, position: int, turn: Turn) -> None:
        """Leave the units whose calls began after ``position``."""
        self._leave_until(lambda last: self.inside[last].ended <= position, turn)

    def _leave_until(self, stays: Callable[[Unit], bool], turn: Turn) -> None:
        """Leave units, the one whose call began last first, until that one ``stays``."""
        while self.inside:
            last = max(self.inside, key=self.inside.__getitem__)
            if stays(last):
                return
            del self.inside[last]
            turn(last, False)
