"""Timelines as data and as files: Chrome's trace events, which Perfetto opens."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp2.tracing import COLLECTIVES, LANES, Memory, Slice, Timeline, Wait, summary
from fsdp2.tracing.timeline import covered, length, union
from tests.common.errors import raises
from tests.tracing.perfetto import problems_of

pytestmark = pytest.mark.alone


def example() -> Timeline:
    """A unit's gather behind which compute stands still for 2 µs, and a reduction beside it."""
    slices = [
        Slice("all-gather", "all-gather", 0.0, 4.0, "a", 400, "float32", "ranks 0-1"),
        Slice("compute", "embed", 0.0, 2.0),
        Slice("compute", "forward", 4.0, 9.0, "a"),
        Slice("reduce", "reduce-scatter", 6.0, 10.0, "a", 400, "float32", "ranks 0-1", 1),
    ]
    waits = [
        Wait("compute", "all-gather", "compute after all-gather", 2.0, 4.0, "a", "all-gather", 0)
    ]
    memory = [Memory(0.0, {"shards": 10}), Memory(4.5, {"shards": 10, "gathered": 30})]
    memory.append(Memory(9.0, {"shards": 10, "gathered": 0}))
    return Timeline(slices, waits, memory, {"source": "paper", "rank": 1, "title": "an example"})


def random_timeline(seed: int) -> Timeline:
    """Slices of a lane one behind the other, waits for any of them, any memory."""
    rng = random.Random(seed)
    found = Timeline(metadata={"rank": rng.randrange(9), "note": 'ü "quoted" \u2028'})
    for lane in rng.sample([*LANES, "another"], rng.randint(1, 8)):
        now = 0.0
        for number in range(rng.randint(0, 12)):
            start = round(now + rng.choice([0, rng.uniform(0, 3)]), 3)
            now = round(start + rng.choice([0.001, rng.uniform(0.001, 9)]), 3)
            unit = rng.choice(["", "(root)", f"blocks.{number}"])
            found.slices.append(Slice(lane, rng.choice(COLLECTIVES), start, now, unit, number))
    for number in range(rng.randint(0, 9)):
        behind = rng.randrange(-1, len(found.slices)) if found.slices else -1
        on = found.slices[behind].lane if behind >= 0 else "reduce"
        start = round(rng.uniform(0, 30), 3)
        end = max(start, found.slices[behind].end if behind >= 0 else 0.0)
        found.waits.append(Wait(f"user {number}", on, "some order", start, end, behind=behind))
    found.memory = [
        Memory(float(t), {"shards": rng.randrange(99)}) for t in range(rng.randint(0, 4))
    ]
    return found.sorted()


@pytest.mark.parametrize("seed", range(40))
def test_a_file_gives_back_what_was_written_and_is_valid(seed: int, tmp_path: Path) -> None:
    timeline = random_timeline(seed)
    timeline.write(tmp_path / "step.json")
    assert Timeline.read(tmp_path / "step.json") == timeline
    assert problems_of(json.loads((tmp_path / "step.json").read_text())) == []


def test_a_lane_is_a_thread_and_a_slice_an_event(tmp_path: Path) -> None:
    example().write(tmp_path / "step.json")
    document = json.loads((tmp_path / "step.json").read_text())
    events = document["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["compute", "all-gather", "reduce"]
    shown = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert shown == [
        ("all-gather", "all-gather a", 0.0, 4.0),
        ("compute", "embed", 0.0, 2.0),
        ("compute", "compute after all-gather", 2.0, 2.0),
        ("compute", "forward a", 4.0, 5.0),
        ("reduce", "reduce-scatter a", 6.0, 4.0),
    ]
    arrow = [(names[e["tid"]], e["ph"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert arrow == [("all-gather", "s", 3.999), ("compute", "f", 4.0)]
    memory = [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert memory == [("memory", sample.time, sample.bytes) for sample in example().memory]
    assert {e["pid"] for e in events} == {1}
    assert document["otherData"]["source"] == "paper"


def test_a_timeline_says_how_long_it_is_and_what_is_in_it() -> None:
    timeline = example()
    assert (timeline.start, timeline.end, timeline.duration) == (0.0, 10.0, 10.0)
    assert timeline.lanes == ["compute", "all-gather", "reduce"]
    assert timeline.units == ["a"]
    assert timeline.categories == ["shards", "gathered"]
    assert [s.name for s in timeline.on("compute")] == ["embed", "forward a"]
    peak = timeline.peak  # the first moment of most memory
    assert (peak.time, peak.total, peak.running) == (4.5, 40, ("forward a", "reduce-scatter a"))
    assert Timeline().peak is None


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text("hello")
    with raises("trace-no-json"):
        Timeline.read(path)
    for other in ("[]", '{"traceEvents": []}', '{"otherData": {"format": "mine"}}'):
        path.write_text(other)
        with raises("trace-other-json"):
            Timeline.read(path)
    path.write_text('{"otherData": {"format": "fsdp2 timeline", "version": 99}}')
    with raises("trace-version"):
        Timeline.read(path)


def test_steps_have_marks_and_times() -> None:
    found = example()
    assert found.marks == [(0, 0.0), (1, 6.0)]
    told = summary(found)
    assert told.step_times == {0: 6.0, 1: 4.0}
    assert "2 steps: median 5 µs, least 4 µs (step 1), most 6 µs (step 0)" in str(told)
    one = replace(found, slices=found.slices[:3])
    assert summary(one).step_times == {0: 9.0}
    assert "steps:" not in str(summary(one))
    assert summary(Timeline()).step_times == {}
    assert "steps:" not in str(summary(Timeline()))


# ---- intervals, against a count of small steps


def _random_intervals(rng: random.Random) -> list[tuple[float, float]]:
    pairs = [(rng.randrange(30), rng.randrange(30)) for _ in range(rng.randint(0, 8))]
    return [(float(a), float(a + b)) for a, b in pairs]


@pytest.mark.parametrize("seed", range(20))
def test_intervals(seed: int) -> None:
    rng = random.Random(seed)
    intervals = _random_intervals(rng)
    steps = {t for a, b in intervals for t in range(int(a), int(b))}
    joined = union(intervals)
    assert length(joined) == len(steps)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(joined))
    for start, end in _random_intervals(rng):
        inside: Any = {t for t in range(int(start), int(end)) if t in steps}
        assert covered((start, end), joined) == len(inside)
