"""A unit's phase moves as the table says: in simulations, units refuse any other move."""

from __future__ import annotations

import pytest

from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.unit import Unit
from tests.common import schedules

pytestmark = pytest.mark.alone


def test_finishing_a_unit_that_was_not_entered_is_refused() -> None:
    sim = schedules.warm(schedules.chain("a", "b"))
    with pytest.raises(AssertionError, match="unit 'a' cannot go from idle to reduced"):
        sim.scheduler._finish(schedules.unit_of(sim, "a"), True)


def test_a_schedule_that_enters_a_unit_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = Scheduler.enter_forward

    def twice(self: Scheduler, unit: Unit) -> None:
        enter(self, unit)
        enter(self, unit)

    sim = schedules.warm(schedules.chain("a", "b"))
    monkeypatch.setattr(Scheduler, "enter_forward", twice)
    with pytest.raises(AssertionError, match="unit 'root' cannot go from forward to forward"):
        sim.iteration()
