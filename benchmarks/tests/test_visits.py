"""benchmarks/visits.py: it counts what it says, and its counts do not rise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import visits
from benchmarks.harness import ROOT
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
    walk = visits.Walk(("sharding", "sharding", "modules", "layout", "modules", "device", "layout"))
    assert (len(walk.stays), walk.rooms, walk.climbs) == (6, 4, 2)


@pytest.mark.slow
def test_visits_do_not_rise(tmp_path: Path) -> None:
    """In a process of its own: what others have loaded would be visited, too."""
    file = tmp_path / "visits.json"
    command = [sys.executable, "-m", "benchmarks.visits", "--json", str(file)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    found = json.loads(file.read_text())
    assert found.keys() == {*visits.PARTS, "walk"}
    for part, counts in found.items():
        upper_bounds.hold(f"visits, {part}", **counts)
