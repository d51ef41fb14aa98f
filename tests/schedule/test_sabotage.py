"""What is freed too early, or done wrong, in the core: the checker and the watch notice."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fsdp2.core.device.kernels import Kernels
from fsdp2.core.device.streams import Lane
from fsdp2.core.gather import keeping
from fsdp2.core.gather.program import Gather
from fsdp2.core.gather.segments import Pair, SegmentViews
from fsdp2.core.params.gradients import Gradients
from fsdp2.core.reduce import binding
from fsdp2.core.reduce.reduction import Job, PartialSums, PendingReduction, Reduction
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.unit import Phase, Unit
from fsdp2.testing.virtual import VirtualDevice
from fsdp2.tracing.record.notes import Allocation
from tests.common.scenarios import SCENARIOS

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("rare_collections")]

# ---- frees that come too early


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
        for pending in self._in_flight.holding:
            pending.jobs.clear()
        enter(self, unit)

    monkeypatch.setattr(Scheduler, "enter_backward", hasty)


def _release_staging_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = keeping.packed

    def hasty(place: SegmentViews) -> tuple[Gather, Pair]:
        gather, pair = packed(place)
        launch, release = gather.collectives[0], gather.release[0]

        def launch_and_free() -> None:
            launch()
            release()

        gather.collectives = [launch_and_free]
        return gather, pair

    monkeypatch.setattr(keeping, "packed", hasty)


def _forget_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = binding.deliver

    def hasty(gradients: Gradients, kernels: Kernels, job: Job) -> None:
        deliver(gradients, kernels, job)
        job.sums = []

    monkeypatch.setattr(binding, "deliver", hasty)


def _free_before_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = Scheduler.enter_forward

    def hasty(self: Scheduler, unit: Unit) -> None:
        enter(self, unit)
        unit.reshard()

    monkeypatch.setattr(Scheduler, "enter_forward", hasty)


def _release_sums_with_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = PendingReduction.release_inputs

    def hasty(self: PendingReduction) -> None:
        release(self)
        if not self.host:
            for _, job in self.jobs:
                job.outputs = []
        self.release_rest()

    monkeypatch.setattr(PendingReduction, "release_inputs", hasty)


def _forget_added_partial_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    add = PartialSums.add

    def hasty(self: PartialSums, job: Job) -> None:
        add(self, job)
        job.partial = None

    monkeypatch.setattr(PartialSums, "add", hasty)


def _forget_partial_sums_that_are_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = PartialSums.keep

    def hasty(self: PartialSums, job: Job) -> None:
        keep(self, job)
        job.partial = None

    monkeypatch.setattr(PartialSums, "keep", hasty)


def _release_flat_gradient_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = ParamGroup.reduce

    def hasty(self: ParamGroup, jobs: list[Any], all_reduce: bool) -> PendingReduction | None:
        pending = reduce(self, jobs, all_reduce)
        for _, job in jobs:
            job.flat = job.result = None
        return pending

    monkeypatch.setattr(ParamGroup, "reduce", hasty)


def _release_mirror_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start = ParamGroup.start_unshard

    def hasty(self: ParamGroup) -> None:
        start(self)
        if self.bound.mirror is not None and not self.bound.keeps_mirror:
            self.bound.mirror.release()

    monkeypatch.setattr(ParamGroup, "start_unshard", hasty)


def _release_smaller_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start = ParamGroup.start_unshard

    def hasty(self: ParamGroup) -> None:
        start(self)
        if self.bound.smaller is not None:
            self.bound.smaller.release()

    monkeypatch.setattr(ParamGroup, "start_unshard", hasty)


def _never_block_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualDevice, "synchronize", lambda *_: None)


def _the_optimizer_does_not_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Scheduler.settle

    def hasty(self: Scheduler) -> None:
        if self.is_running:  # not where a step begins
            settle(self)

    monkeypatch.setattr(Scheduler, "settle", hasty)


def _an_evaluation_does_not_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Scheduler.settle

    def hasty(self: Scheduler) -> None:
        if self.iteration.forward_root is None:
            settle(self)

    monkeypatch.setattr(Scheduler, "settle", hasty)


def _gathers_do_not_wait_for_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    unshard = Scheduler.unshard

    def hasty(self: Scheduler, unit: Unit) -> None:
        self.post_optim_event = None
        unshard(self, unit)

    monkeypatch.setattr(Scheduler, "unshard", hasty)


@pytest.mark.parametrize(
    ("sabotage", "scenario", "race"),
    [
        (_release_sums_with_the_inputs, "replicated", "memory all_reduce#.* still uses"),
        (_forget_added_partial_sums, "replicated", "memory all_reduce#.* still uses"),
        (_forget_partial_sums_that_are_added_to, "replicated", "memory reduce#.* still uses"),
        (_release_flat_gradient_at_once, "offloaded", "memory (all_)?reduce#.* still uses"),
        (_release_mirror_at_once, "offloaded", "memory copy_in#.* still uses"),
        (_release_smaller_rows_at_once, "changing", "memory all_gather#.* still uses"),
        (_never_block_the_host, "offloaded", "step reads host gradient while reduce#.* writes it"),
        (_never_block_the_host, "offloaded", "writes host shard while copy_in#.* reads it"),
        (
            _the_optimizer_does_not_wait_for_copies,
            "offloaded",
            "step writes host shard while copy_in#.* reads it",
        ),
        (
            _an_evaluation_does_not_wait_for_copies,
            "offloaded",
            "by hand writes host shard while copy_in#.* reads it",
        ),
        (_gathers_do_not_wait_for_the_optimizer, "elsewhere", "reads shard while user#.* writes"),
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
    for seed in range(40):
        device = VirtualDevice()
        SCENARIOS[scenario](random.Random(f"{scenario} {seed}"), device)
        if any(re.search(race, text) for text in device.races):
            return
    pytest.fail("no race was found")


# ---- the watch over random models is awake


def _keep_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_drop_unused", lambda self: None)


def _keep_wrong_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_free_guess", lambda *_: None)


def _make_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(self: Scheduler, units: Sequence[Unit | None], backward: bool = False) -> None:
        self.iteration.ahead += [unit for unit in units if unit and self.unshard(unit)]

    monkeypatch.setattr(Scheduler, "_gather_ahead", greedy)


def _forget_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: Scheduler, but: Sequence[Unit] = ()) -> None:
        self.iteration.ahead.clear()

    monkeypatch.setattr(Scheduler, "_drop_guesses", forget)


def _never_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParamGroup, "collect", lambda *_: [])


def _reduce_half(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = ParamGroup.collect
    monkeypatch.setattr(ParamGroup, "collect", lambda *args: collect(*args)[1:])


def _keep_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Scheduler._finish

    def lazy(self: Scheduler, unit: Unit, reshard: bool, *rest: bool, **named: bool) -> None:
        finish(self, unit, False, *rest, **named)

    monkeypatch.setattr(Scheduler, "_finish", lazy)


def _free_all_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    exit_backward = Scheduler.exit_backward

    def lazy(self: Scheduler, unit: Unit, _: object = None) -> None:
        unit.reshard_after_backward = False
        exit_backward(self, unit)
        unit.reshard_after_backward = True

    monkeypatch.setattr(Scheduler, "exit_backward", lazy)


def _drop_guess_at_the_next_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = Scheduler._gather

    def hasty(self: Scheduler, unit: Unit) -> None:
        self._drop_guesses(but=[unit])
        gather(self, unit)

    monkeypatch.setattr(Scheduler, "_gather", hasty)


def _drop_guess_where_none_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = Scheduler._gather_ahead

    def hasty(self: Scheduler, units: Sequence[Unit | None], backward: bool = False) -> None:
        self._drop_guesses(but=units)
        gather(self, units, backward)

    monkeypatch.setattr(Scheduler, "_gather_ahead", hasty)


def _drop_guess_after_every_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Scheduler.end_backward

    def hasty(self: Scheduler) -> None:
        end(self)
        self._drop_guesses()

    monkeypatch.setattr(Scheduler, "end_backward", hasty)


def _finish_idle_units_after_every_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Scheduler.end_backward

    def hasty(self: Scheduler) -> None:
        for unit in self.units:
            if unit.phase is Phase.IDLE and unit not in self.iteration.ahead:
                self._finish(unit, unit.reshard_after_backward, over=True)
        end(self)

    monkeypatch.setattr(Scheduler, "end_backward", hasty)


def _leak_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reduction, "release", lambda self: None)


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
        (_make_no_room, "looking_ahead", r"after .* \[.*\] are gathered"),
        (_forget_the_others, "looking_ahead", r"after loss \[.*\] are gathered"),
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
    for seed in range(40):
        watch = SCENARIOS[scenario](random.Random(f"{scenario} {seed}"), VirtualDevice())
        watch.check_trace()
        if any(re.search(problem, text) for text in watch.problems):
            return
    pytest.fail("the watch noticed nothing")
