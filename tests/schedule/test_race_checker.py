"""The checker finds nothing wrong with the scheduler, and notices each needed wait that is gone."""

from __future__ import annotations

import ast
import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import fsdp2.core
from fsdp2.testing.races import races
from fsdp2.testing.simulation import Simulation
from fsdp2.testing.virtual import VirtualDevice
from fsdp2.tracing.record.notes import Note
from tests.common import combinations, random_models
from tests.common.scenarios import SCENARIOS
from tests.schedule import replay
from tests.schedule.oracle import unordered_conflicts

SEEDS = 20  # schedules of each scenario; the extended run has twice as many more
MUTATED = 4  # schedules of each scenario that are mutated …
MAX_WAITS = 56  # … and have at most so many waits

pytestmark = pytest.mark.alone

# ---- random models


def _check_seeds(scenario: str, seeds: range) -> None:
    for seed in seeds:
        device = VirtualDevice()
        device.others_had = bool(seed % 2)
        watch = SCENARIOS[scenario](random.Random(f"{scenario} {seed}"), device)
        watch.check_trace()
        assert watch.problems == [], (scenario, seed)
        assert watch.sim.scheduler.iteration.forward_root is None, (scenario, seed)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2, pytest.param(3, marks=pytest.mark.extended)])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_random_models(scenario: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many units are gathered ahead as the window says at most: the watch sees to it."""
    monkeypatch.setattr(random_models.Watch, "window", window)
    _check_seeds(scenario, range(SEEDS // window))


@pytest.mark.extended
def test_many_random_models() -> None:
    for scenario in SCENARIOS:
        _check_seeds(scenario, range(SEEDS, 3 * SEEDS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_very_many_random_models(scenario: str) -> None:
    _check_seeds(scenario, range(3 * SEEDS, 48 * SEEDS))


@pytest.mark.parametrize("seeds", combinations.often([range(30), range(30, 60)]), ids=str)
def test_roots_that_share_a_device(seeds: range) -> None:
    """Stages of a pipeline: each has its own scheduler, all use the same lanes and memory."""
    for seed in seeds:
        rng = random.Random(f"roots {seed}")
        device = VirtualDevice()
        sims = [
            Simulation(
                random_models.random_tree(rng),
                device,
                **random_models.random_settings(rng, device, (1, 2, 4)),
            )
            for _ in range(2)
        ]
        for _ in range(2):
            batches = rng.randint(1, 3)
            for _ in range(batches):
                for sim in sims:
                    sim.forward()
            for left in reversed(range(batches)):
                for sim in reversed(sims):
                    sim.scheduler.is_last_backward = not left
                    sim.backward()
            for sim in sims:
                sim.optimizer_step()
        assert device.races == [], f"seed {seed}"


# ---- mutations


@dataclass
class Mutations:
    """What became of schedules with something taken out."""

    schedules: int = 0
    found: Counter[str] = field(default_factory=Counter)
    redundant: Counter[str] = field(default_factory=Counter)
    disagreements: list[str] = field(default_factory=list)

    def add(self, what: str, label: str, trace: list[Note]) -> None:
        found, conflicts = races(trace), unordered_conflicts(trace)
        (self.found if found else self.redundant)[label] += 1
        if bool(conflicts) != bool(found):
            self.disagreements.append(f"{what}: checker {found}, oracle {conflicts}")


@functools.cache
def _small_schedules(scenario: str) -> list[tuple[int, VirtualDevice]]:
    """The first seeds whose schedules are small enough, and the device after each."""
    chosen: list[tuple[int, VirtualDevice]] = []
    seed = 0
    while len(chosen) < MUTATED:
        device = VirtualDevice()
        SCENARIOS[scenario](random.Random(f"{scenario} {seed}"), device)
        if 8 <= len(device.waits) <= MAX_WAITS:
            chosen.append((seed, device))
        seed += 1
    return chosen


def _drop_each_wait() -> Mutations:
    """Every wait of some small schedules dropped, one at a time."""
    result = Mutations()
    for scenario in SCENARIOS:
        for seed, whole in _small_schedules(scenario):
            assert whole.races == unordered_conflicts(whole.trace) == []
            result.schedules += 1
            for number, label in enumerate(whole.waits):
                what = f"{scenario} {seed} without wait {number} ({label})"
                result.add(what, label, whole.without(number))
    return result


def _wait_labels() -> set[str]:
    """The labels of all waits in the core's source, those of the host included."""
    labels = set()
    for path in Path(fsdp2.core.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("streams.wait"):
                labels.add(ast.literal_eval(node.args[2]))
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                "streams.synchronize"
            ):
                labels.add(ast.literal_eval(node.args[1]))
    return labels


@pytest.mark.extended
def test_every_needed_wait_is_missed_and_no_other() -> None:
    """And every wait in the core's source is needed somewhere."""
    dropped = _drop_each_wait()
    assert dropped.disagreements == []
    assert dropped.schedules == MUTATED * len(SCENARIOS)
    assert dropped.found.total() > 800
    assert dropped.redundant.total() > 0
    labels = _wait_labels()
    assert len(labels) >= 5
    assert set(dropped.found) == labels


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutate", "schedules"),
    combinations.often(
        [
            (replay.with_stale_events, slice(1)),
            (replay.with_stale_events, slice(1, 3)),
            (replay.with_early_frees, slice(3)),
        ]
    ),
)
def test_replays_agree_with_the_oracle(
    mutate: Callable[[list[Note]], list[list[Note]]], schedules: slice
) -> None:
    result = Mutations()
    for scenario in SCENARIOS:
        for seed, whole in _small_schedules(scenario)[schedules]:
            for number, variant in enumerate(mutate(whole.trace)):
                result.add(f"{scenario} {seed} variant {number}", "", variant)
    assert result.disagreements == []
    assert result.found.total() >= 100
    assert result.redundant.total() > 0
