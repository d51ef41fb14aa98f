"""Which schedulers note the calls of their units, and for how long."""

from __future__ import annotations

import weakref

from fsdp2.core.schedule.calls import Calls
from fsdp2.core.schedule.scheduler import Scheduler

noting: list[weakref.ref[Scheduler]] = []
"""The schedulers that note calls; empty when all have learned that they need not."""


def note_calls(scheduler: Scheduler) -> Calls:
    """Let ``scheduler`` note its units' calls from now on; returns the notes."""
    if scheduler.calls is None:
        scheduler.calls = Calls()
        noting.append(weakref.ref(scheduler))
    return scheduler.calls


def stop_noting_unused() -> None:
    """A backward is over: those stop that were not entered by a side door, and have none to come.

    All ranks run the same calls, so all of them stop, or none does (invariant I1).
    """
    kept = []
    for reference in noting:
        scheduler = reference()
        if scheduler is None or (calls := scheduler.calls) is None:
            continue  # it is gone
        if calls.looked and calls.whole and not (calls.used or scheduler.has_calls_to_come):
            scheduler.calls = None
        else:
            kept.append(reference)
    noting[:] = kept
