"""Which of autograd's nodes belong to which unit's call, for backwards that enter by a side door.

    forward of unit i   ──> nodes 17 to 40 are i's      noted when the call begins and ends
    backward begins     ──> which edges lead into them  (`fsdp2.core.modules.engine` looks)

Backward enters a unit where a gradient comes to one of its outputs. A loss may also use what the
unit's forward kept, or what a hook inside of it took: nobody returned that. So a root notes its
units' calls in its first iteration. If a backward comes in by such a door, it goes on noting for
good; else it stops, and a step pays nothing.
"""

from __future__ import annotations

import functools
import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp2.core.config import ShardingStateError
from fsdp2.core.device.streams import Streams
from fsdp2.core.schedule.backward_order import ChoosingScheduler, chooses
from fsdp2.core.schedule.retrace import RetracingScheduler, next_node
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.unit import Unit
from fsdp2.core.schedule.window import LookingAhead, window_of


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a unit: nodes of two calls are apart, as nodes of two units."""

    unit: Unit


class Calls:
    """The calls of a root's units, as ranges of autograd's nodes.

    Attributes:
        used: whether a backward came in by a node that was no output's.
        looked: whether a backward has looked at a call.
        whole: whether a forward of the root is among them, not of units below alone.
    """

    REMEMBERED = 65536  # changes of owner: who knows how many backwards of a forward are to come

    def __init__(self) -> None:
        self.used = self.looked = self.whole = False
        self._starts: list[int] = []  # autograd's next node where the owner of nodes changed
        self._owners: list[Call | None] = []  # which it was from there on
        self._open: list[Call] = []  # that have begun, outermost first
        self._thread = 0  # each has numbers of its own

    def begin(self, unit: Unit) -> None:
        """A call of ``unit`` begins."""
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
        """It has ended, and with it what is still open inside."""
        if any(call.unit is unit for call in self._open):
            while self._open.pop().unit is not unit:
                pass
            self._note(self._open[-1] if self._open else None)

    def _note(self, owner: Call | None) -> None:
        self._starts.append(next_node())
        self._owners.append(owner)

    def __bool__(self) -> bool:
        """Whether any are known to this thread."""
        return bool(self._starts) and self._thread == threading.get_ident()

    def owner(self, number: int) -> Call | None:
        """The innermost call in which the node of that sequence number was made."""
        position = bisect_right(self._starts, number) - 1
        return self._owners[position] if position >= 0 else None

    def forget(self) -> None:
        """They were given up."""
        self._starts.clear()
        self._owners.clear()
        self._open.clear()


class NotingScheduler(Scheduler):
    """What a scheduler does besides while it notes the calls of its units.

    A forward that writes its parameters does so from the first on, so that later ones need no look.
    """

    calls: Calls

    def enter_forward(self, unit: Unit) -> None:
        if unit.groups and self._records_exits:
            self.calls.begin(unit)
        super().enter_forward(unit)

    def exit_forward(self, unit: Unit, keep: bool = False) -> None:
        if unit.is_root and self._records_exits:
            self.calls.whole = True
        for group in unit.groups:
            if written := group.written:
                raise ShardingStateError(
                    f"the forward of '{unit.title}' wrote parameter '{written}' in place, which is "
                    f"lost when it is resharded; keep what forward changes in a buffer, or write "
                    f"the sharded parameter between steps"
                )
        super().exit_forward(unit, keep)
        if unit.groups and self._records_exits:
            self.calls.end(unit)

    def give_up_forward(self, unit: Unit) -> None:
        super().give_up_forward(unit)
        self.calls.end(unit)

    def reset(self) -> None:
        super().reset()
        self.calls.forget()


@functools.cache
def _kind(
    notes: bool, misses_none: bool, chooses_order: bool, looks_ahead: bool
) -> type[Scheduler]:
    """The class of schedulers that do these things; always the same object.

    A backward that misses no unit enters units by itself, and looks ahead from those as well.
    """
    all_kinds = (
        (NotingScheduler, notes),
        (RetracingScheduler, misses_none),
        (ChoosingScheduler, chooses_order),
        (LookingAhead, looks_ahead),
    )
    kinds = tuple(kind for kind, wanted in all_kinds if wanted)
    if len(kinds) < 2:
        return kinds[0] if kinds else Scheduler
    return type("".join(kind.__name__ for kind in kinds), kinds, {})


noting: list[weakref.ref[Scheduler]] = []
"""The schedulers that note calls; empty when all have learned that they need not."""


def make_scheduler(units: Sequence[Unit], streams: Streams) -> Scheduler:
    """A scheduler of the kind that the units' flags ask for.

    Args:
        units: all units, in the order of registration; the first is the root.
        streams: lanes of the device.
    """
    scheduler = Scheduler(units, streams)
    refresh_scheduler(scheduler)
    return scheduler


def refresh_scheduler(scheduler: Scheduler) -> None:
    """Take up what was changed for units: flags, groups, and with them the kind of scheduler."""
    scheduler.refresh()
    _become(scheduler, isinstance(scheduler, NotingScheduler))


def note_calls(scheduler: Scheduler) -> Calls:
    """Let ``scheduler`` note its units' calls from now on; returns the notes."""
    if not isinstance(scheduler, NotingScheduler):
        _become(scheduler, True)
        noting.append(weakref.ref(scheduler))
    assert isinstance(scheduler, NotingScheduler)
    return scheduler.calls


def calls_of(scheduler: Scheduler) -> Calls | None:
    """The notes of ``scheduler``, if it makes any."""
    return scheduler.calls if isinstance(scheduler, NotingScheduler) else None


def stop_noting_unused() -> None:
    """A backward is over: those stop that were not entered by a side door, and have none to come.

    All ranks run the same calls, so all of them stop, or none does (invariant I1).
    """
    kept = []
    for reference in noting:
        scheduler = reference()
        if not isinstance(scheduler, NotingScheduler):
            continue  # it is gone
        calls = scheduler.calls
        if calls.looked and calls.whole and not (calls.used or scheduler.has_calls_to_come):
            _become(scheduler, False)
        else:
            kept.append(reference)
    noting[:] = kept


def _become(scheduler: Scheduler, notes: bool) -> None:
    misses_none = any(group.options.reduce_unused for group in scheduler.groups)
    window = window_of(scheduler.units)
    order = chooses(scheduler.units)
    kind, before = _kind(notes, misses_none, order, window > 1), type(scheduler)
    if before is not kind:
        if isinstance(scheduler, LookingAhead) and window == 1:
            scheduler.stop_looking()
        scheduler.__class__ = kind
        if isinstance(scheduler, RetracingScheduler) and not issubclass(before, RetracingScheduler):
            scheduler.begin()
        if isinstance(scheduler, NotingScheduler) and not issubclass(before, NotingScheduler):
            scheduler.calls = Calls()
        elif issubclass(before, NotingScheduler) and not notes:
            del scheduler.__dict__["calls"]
        if isinstance(scheduler, LookingAhead) and not issubclass(before, LookingAhead):
            scheduler.begin_looking()
    if isinstance(scheduler, LookingAhead):
        scheduler.look(window)
