"""benchmarks/visits.py: it counts what it says, and its counts do not rise."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import visits
from tests.common import upper_bounds

HERE = Path(__file__).parent


def _called() -> int:
    return sum(_item(i) for i in range(3))  # a generator: entered for each item and at the end


def _item(i: int) -> int:
    return i


def test_calls_functions_and_files_are_counted() -> None:
    found = visits.visits(_called, [HERE])
    assert (found.calls, found.functions, found.files) == (1 + 4 + 3, 3, 1)
    assert visits.visits(_called, [HERE / "elsewhere"]).calls == 0


def test_climbs_are_moves_to_rooms_above() -> None:
    walk = visits.Walk(("api", "sharding", "layout", "sharding", "device", "layout"))
    assert (len(walk.stays), walk.rooms, walk.climbs) == (6, 4, 2)


@pytest.mark.alone
def test_visits_do_not_rise() -> None:
    found = visits.counted("fsdp2")
    for part, seen in found.items():
        upper_bounds.hold(
            f"visits, {part}", calls=seen.calls, functions=seen.functions, files=seen.files
        )


@pytest.mark.alone
def test_the_walk_of_a_parameter_does_not_get_longer() -> None:
    walk = visits.walked()
    assert len(walk.stays) <= visits.WALKED
    upper_bounds.hold(
        "walk of a parameter", stays=len(walk.stays), rooms=walk.rooms, climbs=walk.climbs
    )
