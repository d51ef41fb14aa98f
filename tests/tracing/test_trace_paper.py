"""Schedules on paper as timelines, and what summaries say of them."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp2.planning import Plan, plan
from fsdp2.testing.simulation import Simulation
from fsdp2.testing.virtual import VirtualDevice
from fsdp2.tracing import Memory, Slice, Timeline, Wait, diff, summary
from fsdp2.tracing.record.notes import Place
from fsdp2.tracing.record.replay import LANE_OF, Cost, Replay
from tests.common import random_models
from tests.tracing import perfetto

pytestmark = pytest.mark.alone

BLOCKS = ("0", "1", "2")


@functools.cache
def planned(tokens: int = 4096) -> Plan:
    """Three blocks, whose gathers are not all hidden."""
    return plan(
        lambda: nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in BLOCKS)),
        lambda: torch.zeros(tokens, 512),
        units={nn.Linear},
        mesh=(2, 8),
    )


def on_paper(device: VirtualDevice, took: Callable[[], float] = lambda: 1.0) -> Timeline:
    """What a simulation did, as a timeline."""
    return Replay(device.trace, lambda op: Cost(took())).timeline([], {})


class Noting(VirtualDevice):
    """A device that notes the edges that its race checker knows, by its own clocks.

    An edge: who waits, for whom, and how many operations of that one are then known to be over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.edges: list[tuple[Place, Place, int]] = []
        self._recorded: dict[int, Place] = {}

    def record(self, lane: Place, label: str, event: object = None) -> int | None:
        number = super().record(lane, label)
        assert number is not None
        self._recorded[number] = lane
        return number

    def follow(self, lane: Place, event: int | None, label: str = "") -> None:
        super().follow(lane, event, label)
        assert event is not None
        on = self._recorded[event]
        self.edges.append((lane, on, self.checker.events[event][on]))


# ---- from paper


@pytest.mark.parametrize("seed", range(30))
def test_waits_are_the_edges_of_the_race_checker(seed: int) -> None:
    rng = random.Random(f"trace {seed}")
    device = Noting()
    simulation = Simulation(
        random_models.random_tree(rng), device, **random_models.random_settings(rng, device, (2, 4))
    )
    for _ in range(2):
        simulation.iteration()
    timeline = on_paper(device)
    ordinals: dict[int, int] = {}
    counts: dict[str, int] = {}
    for index, each in enumerate(timeline.slices):
        counts[each.lane] = counts.get(each.lane, 0) + 1
        ordinals[index] = counts[each.lane]
    seen = [(w.lane, w.on, ordinals.get(w.behind, 0)) for w in timeline.waits]
    known = [(LANE_OF[lane], LANE_OF[on], count) for lane, on, count in device.edges]
    assert sorted(seen) == sorted(known)
    assert known


def test_a_wait_lasts_until_what_it_is_behind_is_over() -> None:
    timeline = planned().timeline()
    stood = [w for w in timeline.waits if w.duration]
    assert stood
    for wait in stood:
        behind = timeline.slices[wait.behind]
        assert (behind.lane, behind.unit) == (wait.on, wait.unit)
        assert behind.end == pytest.approx(wait.end)
    first = next(w for w in stood if w.label == "compute after all-gather")
    assert (first.unit, first.operation) == ("0", "all-gather")


def test_what_takes_no_time_leaves_no_slice() -> None:
    device = VirtualDevice()
    device.run("nothing", [], [])
    assert not on_paper(device, lambda: 0.0).slices
    assert len(on_paper(device).slices) == 1


# ---- summaries


def test_a_summary_of_a_timeline_by_hand() -> None:
    slices = [
        Slice("compute", "forward", 0.0, 10.0, "a"),
        Slice("all-gather", "all-gather", 5.0, 15.0, "b", 20_000, "bfloat16", "ranks 0-1"),
        Slice("compute", "copy-out", 15.0, 16.0, "b", 20_000),
        Slice("compute", "forward", 16.0, 20.0, "b"),
        Slice("reduce", "reduce-scatter", 20.0, 24.0, "b", 8_000),
    ]
    waits = [
        Wait("compute", "all-gather", "compute after all-gather", 10.0, 15.0, "b", "all-gather", 1)
    ]
    found = summary(Timeline(slices, waits, [], {"title": "by hand"}))
    assert (found.duration, found.compute, found.exposed) == (24.0, 15.0, 5.0)
    assert (found.communication, found.hidden, found.overlap) == (14.0, 5.0, 5 / 14)
    assert found.idle == {"compute after all-gather": 5.0, "nothing was launched": 4.0}
    a, b = found.units
    assert (a.unit, a.compute, a.exposed) == ("a", 10.0, 0.0)
    assert (b.compute, b.copies, b.gather, b.reduce, b.exposed) == (4.0, 1.0, 10.0, 4.0, 5.0)
    assert (b.gather_bandwidth, b.reduce_bandwidth) == (2.0, 2.0)
    text = str(found)
    assert "by hand" in text
    assert "compute 62.5 %, exposed communication 20.8 %, overlap 35.7 %" in text
    assert text.count("\n") == 11


def test_a_difference_goes_unit_by_unit() -> None:
    first, second = planned().timeline(), planned(8192).timeline()
    first.memory = second.memory = []
    found = diff(first, second)
    rows = [row for row in found.units if row[0] is not None and row[0].unit in BLOCKS]
    assert len(rows) == 3
    for before, after in rows:
        assert before is not None
        assert after is not None
        assert after.gather == pytest.approx(before.gather)
        assert after.compute > 1.5 * before.compute
    assert "0 gather" in str(found)
    assert "1.00" in str(found)
    assert "most gathered" not in str(found)
    first.memory = [Memory(0.0, {"gathered": 2000, "activations": 5}), Memory(1.0, {"gathered": 9})]
    second.memory = [Memory(0.0, {"gathered": 3000, "shards": 1})]
    text = str(diff(first, second))
    assert re.search(r"most gathered +2.00 kB +3.00 kB +1.50", text)
    assert "peak memory" not in text  # each has counted what the other has not
    assert "activations" not in text
    alone = diff(first, Timeline())
    assert all(after is None for _, after in alone.units)


EXPOSED = """
    SELECT extract(slice.id, 'args.unit') AS unit, SUM(dur) AS total
    FROM slice JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid)
    WHERE category = 'wait' AND thread.name = 'compute'
      AND extract(slice.id, 'args.operation') IN ('all-gather', 'reduce-scatter', 'all-reduce')
    GROUP BY unit
"""
GATHERS = """
    SELECT extract(slice.id, 'args.unit') AS unit, SUM(dur) AS total
    FROM slice WHERE category = 'all-gather' GROUP BY unit
"""
"""As docs/guides/tracing.md has them; there ``extract`` is Perfetto's ``EXTRACT_ARG``."""


@pytest.mark.parametrize("seed", range(5))
def test_an_arrow_leads_from_what_was_waited_for_to_what_ran_next(
    seed: int, tmp_path: Path
) -> None:
    """One for each wait behind which its lane ran anything; waits of that moment are passed by."""
    rng = random.Random(f"arrows {seed}")
    device = Noting()
    simulation = Simulation(
        random_models.random_tree(rng), device, **random_models.random_settings(rng, device, (2, 4))
    )
    simulation.iteration()
    timeline = on_paper(device, lambda: rng.choice([0.5, 1.0, 7.0]))
    timeline.write(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    lanes = {lane: tid for tid, lane in perfetto.tables(document).execute("SELECT * FROM thread")}
    seen = [(a["args"]["id"], b["tid"], b["ts"]) for a, b in perfetto.arrows(document)]
    known = []
    for wait in timeline.waits:
        ahead = [s.start for s in timeline.on(wait.lane) if s.start >= wait.end]
        ahead += [v.start for v in timeline.waits if v.lane == wait.lane and v.start > wait.end]
        if wait.behind >= 0 and ahead:
            known.append((wait.behind, lanes[wait.lane], min(ahead)))
    assert sorted(seen) == sorted(known)
    assert known


def test_sql_over_the_files_tables_gives_the_summarys_sums(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned().trace(path)
    document = json.loads(path.read_text())
    assert perfetto.problems_of(document) == []
    run = perfetto.tables(document).execute
    found = summary(path)
    exposed = {row.unit: row.exposed for row in found.units if row.exposed}
    gathers = {row.unit: row.gather for row in found.units if row.gather}
    assert {u: ns / 1e3 for u, ns in run(EXPOSED) if ns} == pytest.approx(exposed)
    assert {u: ns / 1e3 for u, ns in run(GATHERS)} == pytest.approx(gathers)
    assert exposed
    assert gathers
