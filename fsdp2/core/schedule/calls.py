"""Which of autograd's nodes belong to which unit's call, for backwards that enter by a side door.

    forward of unit i   ──> nodes 17 to 40 are i's      recorded when the call begins and ends
    backward begins     ──> which edges lead into them  (`fsdp2.core.modules.engine` looks)

Backward enters a unit when a gradient arrives at one of its outputs. A loss may also use a tensor
that the unit's forward kept, or that a hook inside it captured. A root therefore records its units'
calls in its first iteration. If a backward enters through such a side door, it continues to record;
otherwise it stops, and a step pays nothing (`fsdp2.core.modules.registry` and `engine`).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp2.core.schedule.retrace import next_node
from fsdp2.core.schedule.unit import Unit


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a unit: the nodes of two calls are distinguished like those of two units."""

    unit: Unit


class Calls:
    """The calls of a root's units, as ranges of autograd's nodes: ``whole`` if one is the root's.

    They are ``used`` if a backward entered through a node that was not an output's, and ``looked``
    at if one has read a call.
    """

    REMEMBERED = 65536  # changes of owner: any number of backwards may follow

    def __init__(self) -> None:
        self.used = self.looked = self.whole = False
        self._starts: list[int] = []  # autograd's next node where the owner of nodes changed
        self._owners: list[Call | None] = []  # the owner from there on
        self._open: list[Call] = []  # that have begun, outermost first
        self._thread = 0  # each has its own numbers

    def begin(self, unit: Unit) -> None:
        thread = threading.get_ident()
        if thread != self._thread:
            self.forget()
            self._thread = thread
        if len(self._starts) > self.REMEMBERED and not self._open:
            del self._starts[: self.REMEMBERED // 2], self._owners[: self.REMEMBERED // 2]
        call = Call(unit)
        self._open.append(call)
        self._note(call)

    def end(self, unit: Unit) -> None:
        """It has ended, and with it the calls inside that are still open."""
        if any(call.unit is unit for call in self._open):
            while self._open.pop().unit is not unit:
                pass
            self._note(self._open[-1] if self._open else None)

    def _note(self, owner: Call | None) -> None:
        self._starts.append(next_node())
        self._owners.append(owner)

    def __bool__(self) -> bool:
        return bool(self._starts) and self._thread == threading.get_ident()

    def owners(self, numbers: Iterable[int]) -> list[Call | None]:
        """The innermost calls that created the nodes of these sequence numbers."""
        found = [bisect_right(self._starts, number) - 1 for number in numbers]
        return [self._owners[position] if position >= 0 else None for position in found]

    def forget(self) -> None:
        self._starts.clear()
        self._owners.clear()
        self._open.clear()
