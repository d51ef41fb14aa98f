"""Notifications about phase transitions of units, while a watcher exists.

    no watcher        unit.phase = FORWARD ──> Unit's slot
    with watchers     unit.phase = FORWARD ──> watcher(unit, IDLE, FORWARD), … ──> Unit's slot

This is the single point of interception for phases, as a unit's list is for its groups
(`fsdp2.core.schedule.layers`). While a watcher exists, a property hides the slot in which units
store their phase: units keep their class, and the scheduler stores phases as before. With the last
watcher the property is removed, so that a phase costs one store again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from fsdp2.core.schedule.unit import Phase, Unit

Watcher = Callable[[Unit, Phase, Phase], None]
"""Called with a unit, its phase until now, and the one that is stored next, unless it raises."""

_slot = vars(Unit)["phase"]
_watchers: list[Watcher] = []


def _store(unit: Unit, phase: Phase) -> None:
    before = getattr(unit, "phase", None)
    if before is not None:  # a unit that is being made has none
        for watcher in _watchers:
            watcher(unit, before, phase)
    _slot.__set__(unit, phase)


_told = property(_slot.__get__, _store, doc="As the slot; each store is told before.")


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher`` of each store of a phase, of every unit in this process, while it is on."""
    _watchers.append(watcher)
    type.__setattr__(Unit, "phase", _told)
    try:
        yield
    finally:
        _watchers.remove(watcher)
        if not _watchers:
            type.__setattr__(Unit, "phase", _slot)
