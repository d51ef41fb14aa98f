"""The happens-before checker finds what is wrong, and finds nothing wrong with the scheduler."""

from __future__ import annotations

import ast
import functools
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp2.core
from fsdp2.core.group import ParamGroup, PendingReduction
from fsdp2.core.reduction import Job, SegmentReduction
from fsdp2.core.scheduler import Phase, Scheduler, Unit
from fsdp2.core.streams import Lane
from fsdp2.core.transport import CoalescedTransport
from fsdp2.core.virtual import Allocation, Op, VirtualDevice, VirtualTensor, VirtualTransient
from tests.unit._oracle import unordered_conflicts
from tests.unit._replay import replay, with_early_frees, with_stale_events
from tests.unit._scenarios import SCENARIOS

SEEDS = 225  # schedules of each scenario
MUTATED = 5  # schedules of each scenario that are mutated …
MAX_WAITS = 64  # … and have at most so many waits

pytestmark = pytest.mark.usefixtures("rare_collections")

# ---- (a) tiny schedules, written by hand


def _buffer(device: VirtualDevice, name: str = "x") -> VirtualTensor:
    return device.empty(1, torch.float32, name)


def _run(
    device: VirtualDevice,
    lane: Lane,
    reads: list[VirtualTensor] | None = None,
    writes: list[VirtualTensor] | None = None,
) -> None:
    with device.on(lane):
        device.run("op", reads or [], writes or [])


def _order(device: VirtualDevice, before: Lane, after: Lane) -> None:
    device.wait(after, device.record(before, "event"), "order")


def _read_unwritten(device: VirtualDevice) -> None:
    _run(device, Lane.COMPUTE, reads=[_buffer(device)])


def _read_without_wait(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    _run(device, Lane.REDUCE, reads=[x])


def _record_too_early(device: VirtualDevice) -> None:
    x = _buffer(device)
    event = device.record(Lane.COMPUTE, "event")
    _run(device, Lane.COMPUTE, writes=[x])
    device.wait(Lane.REDUCE, event, "order")
    _run(device, Lane.REDUCE, reads=[x])


def _wait_on_another_lane(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    _order(device, Lane.COMPUTE, Lane.COPY_IN)
    _run(device, Lane.ALL_GATHER, reads=[x])


def _write_after_read(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    _order(device, Lane.COMPUTE, Lane.REDUCE)
    _run(device, Lane.REDUCE, reads=[x])
    _run(device, Lane.COMPUTE, writes=[x])


def _write_after_one_of_two_reads(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    for lane in (Lane.COPY_IN, Lane.REDUCE):
        _order(device, Lane.COMPUTE, lane)
        _run(device, lane, reads=[x])
    _order(device, Lane.REDUCE, Lane.COMPUTE)
    _run(device, Lane.COMPUTE, writes=[x])


def _write_after_write(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.ALL_GATHER, writes=[x])
    _run(device, Lane.COMPUTE, writes=[x])


def _reuse_while_read(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    _order(device, Lane.COMPUTE, Lane.REDUCE)
    _run(device, Lane.REDUCE, reads=[x])
    del x
    _run(device, Lane.COMPUTE, writes=[_buffer(device, "y")])


def _wait_after_reuse(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.REDUCE, writes=[x])
    del x
    y = _buffer(device, "y")
    _run(device, Lane.COMPUTE, writes=[y])
    _order(device, Lane.REDUCE, Lane.COMPUTE)
    _run(device, Lane.COMPUTE, reads=[y])


def _reuse_on_a_third_lane(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.REDUCE, writes=[x])
    del x
    y = _buffer(device, "y")
    _order(device, Lane.REDUCE, Lane.COMPUTE)  # but the next to use it does not wait for COMPUTE
    _run(device, Lane.ALL_GATHER, writes=[y])


def _reuse_two_lives_later(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.REDUCE, writes=[x])
    del x
    y = _buffer(device, "y")
    del y
    _run(device, Lane.COMPUTE, writes=[_buffer(device, "z")])


WRONG: list[tuple[Callable[[VirtualDevice], None], str]] = [
    (_read_without_wait, "op reads x while compute#1 writes it"),
    (_record_too_early, "op reads x while compute#1 writes it"),
    (_wait_on_another_lane, "op reads x while compute#1 writes it"),
    (_write_after_read, "op writes x while reduce#1 reads it"),
    (_write_after_one_of_two_reads, "op writes x while copy_in#1 reads it"),
    (_write_after_write, "op writes x while all_gather#1 writes it"),
    (_reuse_while_read, "op uses y, whose memory reduce#1 still uses"),
    (_wait_after_reuse, "op uses y, whose memory reduce#1 still uses"),
    (_reuse_on_a_third_lane, "op uses y, whose memory reduce#1 still uses"),
    (_reuse_two_lives_later, "op uses z, whose memory reduce#1 still uses"),
]


@pytest.mark.parametrize(("schedule", "race"), WRONG)
def test_wrong_schedule(schedule: Callable[[VirtualDevice], None], race: str) -> None:
    device = VirtualDevice()
    schedule(device)
    assert device.races == [race]
    assert len(unordered_conflicts(device.trace)) == 1


def test_read_of_what_nothing_wrote() -> None:
    device = VirtualDevice()
    _read_unwritten(device)
    assert device.races == ["op reads x, which nothing wrote"]


def test_use_after_free() -> None:
    device = VirtualDevice()
    transient = VirtualTransient(device, 4, "x")
    view = transient.view(torch.float32, 0, (1,))
    _run(device, Lane.COMPUTE, writes=[view])
    transient.release()
    _run(device, Lane.COMPUTE, reads=[view])
    _run(device, Lane.COMPUTE, writes=[view])
    assert device.races == ["op uses a buffer that is not allocated"] * 2


def test_new_life_of_a_buffer_must_be_written() -> None:
    device = VirtualDevice()
    transient = VirtualTransient(device, 4, "x")
    view = transient.view(torch.float32, 0, (1,))
    _run(device, Lane.COMPUTE, writes=[view])
    transient.release()
    transient.acquire()
    _run(device, Lane.COMPUTE, reads=[view])
    assert device.races == ["op reads x, which nothing wrote"]


def _one_lane(device: VirtualDevice) -> None:
    for _ in range(3):
        x = _buffer(device)
        _run(device, Lane.COMPUTE, writes=[x])
        _run(device, Lane.COMPUTE, reads=[x], writes=[x])


def _there_and_back(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    _order(device, Lane.COMPUTE, Lane.REDUCE)
    _run(device, Lane.REDUCE, reads=[x], writes=[x])
    _order(device, Lane.REDUCE, Lane.COMPUTE)
    _run(device, Lane.COMPUTE, writes=[x])


def _over_a_third_lane(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COPY_IN, writes=[x])
    _order(device, Lane.COPY_IN, Lane.ALL_GATHER)
    _order(device, Lane.ALL_GATHER, Lane.COMPUTE)
    _run(device, Lane.COMPUTE, reads=[x])


def _reads_at_once(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    for lane in (Lane.COPY_IN, Lane.REDUCE):
        _order(device, Lane.COMPUTE, lane)
        _run(device, lane, reads=[x])
    _run(device, Lane.COMPUTE, reads=[x])


def _later_event_of_the_lane(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.REDUCE, writes=[x])
    _run(device, Lane.REDUCE)
    _order(device, Lane.REDUCE, Lane.COMPUTE)
    _run(device, Lane.COMPUTE, reads=[x])


def _reuse_after_wait(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.REDUCE, writes=[x])
    _order(device, Lane.REDUCE, Lane.COMPUTE)
    del x
    y = _buffer(device, "y")
    _run(device, Lane.COMPUTE, writes=[y])
    _order(device, Lane.COMPUTE, Lane.ALL_GATHER)
    _run(device, Lane.ALL_GATHER, reads=[y])


def _memory_of_another_lane(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    del x
    with device.on(Lane.REDUCE):  # its allocator has blocks of its own
        y = _buffer(device, "y")
    _run(device, Lane.REDUCE, writes=[y])


def _allocated_before_the_free(device: VirtualDevice) -> None:
    x, y = _buffer(device), _buffer(device, "y")
    _run(device, Lane.REDUCE, writes=[x])
    del x
    _run(device, Lane.COMPUTE, writes=[y])


@pytest.mark.parametrize(
    "schedule",
    [
        _one_lane,
        _there_and_back,
        _over_a_third_lane,
        _reads_at_once,
        _later_event_of_the_lane,
        _reuse_after_wait,
        _memory_of_another_lane,
        _allocated_before_the_free,
    ],
)
def test_right_schedule(schedule: Callable[[VirtualDevice], None]) -> None:
    device = VirtualDevice()
    schedule(device)
    assert device.races == []
    assert unordered_conflicts(device.trace) == []


def test_a_dropped_wait_is_counted_but_not_made() -> None:
    device = VirtualDevice(drop_wait=1)
    _there_and_back(device)
    assert device.waits == ["order", "order"]
    assert [op.kind for op in device.trace].count("wait") == 1
    assert device.races == ["op writes x while reduce#1 writes it"]


# ---- (b) random models


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_random_models(scenario: str) -> None:
    for seed in range(SEEDS):
        watch = SCENARIOS[scenario](random.Random(f"{scenario} {seed}"), VirtualDevice())
        watch.check_trace()
        assert watch.problems == [], f"seed {seed}"
        assert watch.sim.scheduler.forward_root is None, f"seed {seed}"


def test_enough_random_models() -> None:
    assert SEEDS * len(SCENARIOS) >= 2000


# ---- (c) mutations


@dataclass
class Mutations:
    """What became of schedules with something taken out."""

    schedules: int = 0
    found: Counter[str] = field(default_factory=Counter)
    redundant: Counter[str] = field(default_factory=Counter)
    disagreements: list[str] = field(default_factory=list)

    def add(self, what: str, label: str, device: VirtualDevice) -> None:
        (self.found if device.races else self.redundant)[label] += 1
        conflicts = unordered_conflicts(device.trace)
        if bool(conflicts) != bool(device.races):
            self.disagreements.append(f"{what}: checker {device.races}, oracle {conflicts}")


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


@pytest.fixture(scope="module")
def dropped_waits() -> Mutations:
    """Every wait of some small schedules dropped, one at a time."""
    result = Mutations()
    for scenario, run in SCENARIOS.items():
        for seed, whole in _small_schedules(scenario):
            assert whole.races == unordered_conflicts(whole.trace) == []
            result.schedules += 1
            for number, label in enumerate(whole.waits):
                device = VirtualDevice(drop_wait=number)
                run(random.Random(f"{scenario} {seed}"), device)
                result.add(f"{scenario} {seed} without wait {number} ({label})", label, device)
    return result


def test_every_needed_wait_is_missed_and_no_other(dropped_waits: Mutations) -> None:
    assert dropped_waits.disagreements == []
    assert dropped_waits.schedules == MUTATED * len(SCENARIOS)
    assert dropped_waits.found.total() > 800
    assert dropped_waits.redundant.total() > 0


def _wait_labels() -> set[str]:
    """The labels of all waits in the core's source."""
    labels = set()
    for path in Path(fsdp2.core.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("streams.wait"):
                labels.add(ast.literal_eval(node.args[2]))
    return labels


def test_every_label_is_needed_somewhere(dropped_waits: Mutations) -> None:
    labels = _wait_labels()
    assert len(labels) >= 5
    assert set(dropped_waits.found) == labels


@pytest.mark.parametrize("mutate", [with_early_frees, with_stale_events])
def test_replays_agree_with_the_oracle(mutate: Callable[[list[Op]], list[list[Op]]]) -> None:
    result = Mutations()
    for scenario in SCENARIOS:
        for seed, whole in _small_schedules(scenario)[:3]:
            assert replay(whole.trace).races == []
            for number, variant in enumerate(mutate(whole.trace)):
                result.add(f"{scenario} {seed} variant {number}", "", replay(variant))
    assert result.disagreements == []
    assert result.found.total() >= 100
    assert result.redundant.total() > 0


# ---- (d) frees that come too early


def _release_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = ParamGroup.reduce

    def hasty(self: ParamGroup, jobs: list[Any], all_reduce: bool) -> PendingReduction | None:
        pending = reduce(self, jobs, all_reduce)
        for reduction, job in jobs:
            reduction.release()
            job.grads = []
        return pending

    monkeypatch.setattr(ParamGroup, "reduce", hasty)


def _release_before_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = Scheduler.enter_backward

    def hasty(self: Scheduler, unit: Unit) -> None:
        for pending in self._pending:
            pending.jobs.clear()
        enter(self, unit)

    monkeypatch.setattr(Scheduler, "enter_backward", hasty)


def _release_staging_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = CoalescedTransport.gather

    def hasty(self: CoalescedTransport) -> None:
        gather(self)
        self.release()

    monkeypatch.setattr(CoalescedTransport, "gather", hasty)


def _forget_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = SegmentReduction._deliver

    def hasty(self: SegmentReduction, job: Job) -> None:
        deliver(self, job)
        job.sums = []

    monkeypatch.setattr(SegmentReduction, "_deliver", hasty)


def _free_before_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = Scheduler.enter_forward

    def hasty(self: Scheduler, unit: Unit) -> None:
        enter(self, unit)
        unit.reshard()

    monkeypatch.setattr(Scheduler, "enter_forward", hasty)


@pytest.mark.parametrize(
    ("sabotage", "scenario", "race"),
    [
        (_release_at_once, "steady", "still uses"),
        (_release_before_waiting, "steady", "still uses"),
        (_release_staging_at_once, "steady", "still uses"),
        (_forget_sums, "stepping", "still uses"),
        (_free_before_compute, "steady", "not allocated"),
    ],
)
def test_early_free_is_found(
    sabotage: Callable[[pytest.MonkeyPatch], None],
    scenario: str,
    race: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sabotage(monkeypatch)
    found = []
    for seed in range(40):
        device = VirtualDevice()
        SCENARIOS[scenario](random.Random(f"{scenario} {seed}"), device)
        found += [text for text in device.races if race in text]
    assert found


# ---- (e) the watch over random models is awake


def _keep_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_drop_unused", lambda self: None)


def _keep_wrong_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Scheduler) -> None:
        self._prefetched = None

    monkeypatch.setattr(Scheduler, "_drop_guess", forget)


def _never_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParamGroup, "collect", lambda self, all_reduce=True: [])


def _reduce_half(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = ParamGroup.collect
    monkeypatch.setattr(ParamGroup, "collect", lambda self, *args: collect(self, *args)[1:])


def _keep_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Scheduler._finish

    def lazy(self: Scheduler, unit: Unit, reshard: bool) -> None:
        finish(self, unit, reshard=False)

    monkeypatch.setattr(Scheduler, "_finish", lazy)


def _free_all_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    exit_backward = Scheduler.exit_backward

    def lazy(self: Scheduler, unit: Unit) -> None:
        unit.reshard_after_backward = False
        exit_backward(self, unit)
        unit.reshard_after_backward = True

    monkeypatch.setattr(Scheduler, "exit_backward", lazy)


def _drop_guess_at_the_next_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = Scheduler._gather

    def hasty(self: Scheduler, unit: Unit) -> None:
        if self._prefetched is not unit:
            self._drop_guess()
        gather(self, unit)

    monkeypatch.setattr(Scheduler, "_gather", hasty)


def _drop_guess_where_none_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetch = Scheduler._prefetch

    def hasty(self: Scheduler, unit: Unit | None) -> None:
        if unit is not self._prefetched:
            self._drop_guess()
        prefetch(self, unit)

    monkeypatch.setattr(Scheduler, "_prefetch", hasty)


def _drop_guess_after_every_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Scheduler.end_backward

    def hasty(self: Scheduler) -> None:
        end(self)
        self._drop_guess()

    monkeypatch.setattr(Scheduler, "end_backward", hasty)


def _finish_idle_units_after_every_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Scheduler.end_backward

    def hasty(self: Scheduler) -> None:
        for unit in self.units:
            if unit.phase is Phase.IDLE and unit is not self._prefetched:
                self._finish(unit, reshard=unit.reshard_after_backward)
        end(self)

    monkeypatch.setattr(Scheduler, "end_backward", hasty)


def _leak_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentReduction, "release", lambda self: None)


def _allocate_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = VirtualDevice.allocate

    def elsewhere(self: VirtualDevice, name: str) -> Allocation:
        with self.on(Lane.REDUCE):
            return allocate(self, name)

    monkeypatch.setattr(VirtualDevice, "allocate", elsewhere)


@pytest.mark.parametrize(
    ("sabotage", "scenario", "problem"),
    [
        (_keep_unused, "changing", r"after loss \[.*\] are gathered"),
        (_keep_wrong_guesses, "changing", r"after .* \[.*\] are gathered"),
        (_never_reduce, "changing", r"have gradients that were not reduced"),
        (_reduce_half, "changing", r"were dropped"),
        (_keep_gathered, "changing", r"is still gathered"),
        (_free_all_at_the_end, "changing", r"after exit backward .* \[.*\] are gathered"),
        (_leak_staging, "changing", r"leaked Counter\({'reduce-scatter input'"),
        (_allocate_elsewhere, "changing", r"is not on COMPUTE"),
        (_drop_guess_at_the_next_gather, "changing", r"gathered ahead, and freed for all_gather"),
        (_drop_guess_where_none_follows, "changing", r"gathered ahead, and freed for"),
        (
            _drop_guess_after_every_backward,
            "several_forwards",
            r"for a backward to come, and freed",
        ),
        (
            _finish_idle_units_after_every_backward,
            "several_forwards",
            r"for a backward to come, and freed",
        ),
    ],
)
def test_watch_notices(
    sabotage: Callable[[pytest.MonkeyPatch], None],
    scenario: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sabotage(monkeypatch)
    problems = []
    for seed in range(40):
        watch = SCENARIOS[scenario](random.Random(f"{scenario} {seed}"), VirtualDevice())
        watch.check_trace()
        problems += watch.problems
    assert any(re.search(problem, text) for text in problems)
