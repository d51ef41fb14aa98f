"""When a backward gathers the next unit: a scheduler for units that choose it themselves.

    BEFORE    enter i ──> gather i-1, compute i, reduce i        `Scheduler`
    AFTER     enter i ──> compute i, free i, gather i-1, reduce i
    NEVER     enter i ──> compute i, free i, reduce i; gather i-1 when it is entered

Before is fastest: the gather hides behind a compute. After holds one gathered unit less at a time.
Never holds as little, and hides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.unit import BACKWARD, PrefetchTime, Unit


def chooses(units: Iterable[Unit]) -> bool:
    """Whether a unit gathers the next one at another time than before its backward computes."""
    return any(unit.prefetches is not PrefetchTime.BEFORE for unit in units)


class ChoosingScheduler(Scheduler):
    """A scheduler whose units say when backward gathers the next one.

    A scheduler becomes one, by its class, while a unit asks for it (`refresh_scheduler`).
    """

    _holds_back = False
    _postponed: tuple[Unit, Unit] | None = None  # whose end gathers which

    def enter_backward(self, unit: Unit, recomputed_for: int | None = None) -> None:
        """Gather ``unit``; what comes next is gathered when the unit says."""
        if unit.phase is BACKWARD:
            return
        self._postponed = None
        self._holds_back = unit.prefetches is not PrefetchTime.BEFORE
        try:
            super().enter_backward(unit, recomputed_for)
        finally:
            self._holds_back = False
        if self._postponed is not None:
            self._postponed = (unit, self._postponed[1])

    def _prefetch(self, unit: Unit | None) -> None:
        if not self._holds_back:
            super()._prefetch(unit)
        elif unit is not None:
            self._postponed = (unit, unit)

    def _gather_ahead(self, units: Sequence[Unit]) -> None:
        """What a larger window gathers: here as if it were one unit."""
        if not self._holds_back:
            super()._gather_ahead(units)  # type: ignore[misc]  # of `LookingAhead`, which calls it
        elif units:
            self._postponed = (units[0], units[0])

    def _finish(self, unit: Unit, reshard: bool, over: bool = False, fill: bool = False) -> None:
        postponed = self._postponed
        if postponed is not None and postponed[0] is unit:
            self._postponed = None
            following = postponed[1]
            if unit.prefetches is PrefetchTime.AFTER and not over and following is not unit:
                if reshard:
                    unit.reshard()
                self._gather_behind(following)
        super()._finish(unit, reshard, over, fill)

    def _gather_behind(self, unit: Unit) -> None:
        ahead = getattr(super(), "_gather_ahead", None)  # of a larger window
        if ahead is None:
            super()._prefetch(unit)
        else:
            ahead([unit])

    def reset(self) -> None:
        """As it is, and nothing is postponed."""
        self._postponed = None
        super().reset()
