"""What is freed too early, or done wrong, in the core: the checker and the watch notice."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from fsdp2.core.device.streams import Lane
from fsdp2.core.gather import keeping
from fsdp2.core.reduce import binding
from fsdp2.core.reduce.reduction import Job, PartialSums, PendingReduction, Reduction
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.unit import Phase, Unit
from fsdp2.testing.virtual import VirtualDevice
from tests.common.scenarios import SCENARIOS

pytestmark = pytest.mark.alone

Run = Callable[..., Any]


class Sabotage(NamedTuple):
    """A function of the core, something else in its place, and what a scenario shows of that."""

    owner: Any
    name: str
    instead: Callable[..., Any]  # called with the original before its arguments
    scenario: str
    found: str

    def __call__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(self.owner, self.name)

        def instead(*args: Any, **kwargs: Any) -> Any:
            return self.instead(original, *args, **kwargs)

        monkeypatch.setattr(self.owner, self.name, instead)


SABOTAGES: list[Sabotage] = []


def shown(owner: Any, name: str, scenario: str, found: str) -> Callable[[Run], Run]:
    """A sabotage of ``owner.name``: a function that takes its place, and calls it or does not."""

    def add(instead: Run) -> Run:
        SABOTAGES.append(Sabotage(owner, name, instead, scenario, found))
        return instead

    return add


# ---- frees that come too early: a race


@shown(ParamGroup, "reduce", "steady", "still uses")
def release_at_once(
    run: Run, group: ParamGroup, jobs: list[Any], all_reduce: bool
) -> PendingReduction | None:
    pending: PendingReduction | None = run(group, jobs, all_reduce)
    for reduction, job in jobs:
        reduction.release()
        job.grads = []
    return pending


@shown(Scheduler, "enter_backward", "steady", "still uses")
def release_before_waiting(run: Run, scheduler: Scheduler, unit: Unit) -> None:
    for pending in scheduler._in_flight.holding:
        pending.jobs.clear()
    run(scheduler, unit)


@shown(keeping, "packed", "steady", "still uses")
def release_staging_at_once(run: Run, place: object) -> object:
    gather, pair = run(place)
    launch, release = gather.collectives[0], gather.release[0]

    def launch_and_free() -> None:
        launch()
        release()

    gather.collectives = [launch_and_free]
    return gather, pair


@shown(binding, "deliver", "stepping", "still uses")
def forget_sums(run: Run, gradients: object, kernels: object, job: Job) -> None:
    run(gradients, kernels, job)
    job.sums = []


@shown(Scheduler, "enter_forward", "steady", "not allocated")
def free_before_compute(run: Run, scheduler: Scheduler, unit: Unit) -> None:
    run(scheduler, unit)
    unit.reshard()


@shown(PendingReduction, "release_inputs", "replicated", "memory all_reduce#.* still uses")
def release_sums_with_the_inputs(run: Run, pending: PendingReduction) -> None:
    run(pending)
    if not pending.host:
        for _, job in pending.jobs:
            job.outputs = []
    pending.release_rest()


@shown(PartialSums, "add", "replicated", "memory all_reduce#.* still uses")
@shown(PartialSums, "keep", "replicated", "memory reduce#.* still uses")
def forget_partial_sums(run: Run, sums: PartialSums, job: Job) -> None:
    run(sums, job)
    job.partial = None


@shown(ParamGroup, "reduce", "offloaded", "memory (all_)?reduce#.* still uses")
def release_flat_gradient_at_once(
    run: Run, group: ParamGroup, jobs: list[Any], all_reduce: bool
) -> PendingReduction | None:
    pending: PendingReduction | None = run(group, jobs, all_reduce)
    for _, job in jobs:
        job.flat = job.result = None
    return pending


@shown(ParamGroup, "start_unshard", "offloaded", "memory copy_in#.* still uses")
def release_mirror_at_once(run: Run, group: ParamGroup) -> None:
    run(group)
    if group.bound.mirror is not None and not group.bound.keeps_mirror:
        group.bound.mirror.release()


@shown(ParamGroup, "start_unshard", "changing", "memory all_gather#.* still uses")
def release_smaller_rows_at_once(run: Run, group: ParamGroup) -> None:
    run(group)
    if group.bound.smaller is not None:
        group.bound.smaller.release()


@shown(VirtualDevice, "synchronize", "offloaded", "step reads host gradient while reduce#.* writes")
@shown(VirtualDevice, "synchronize", "offloaded", "writes host shard while copy_in#.* reads it")
def never_block_the_host(run: Run, *_: object) -> None:
    pass


@shown(Scheduler, "settle", "offloaded", "step writes host shard while copy_in#.* reads it")
def the_optimizer_does_not_wait_for_copies(run: Run, scheduler: Scheduler) -> None:
    if scheduler.is_running:  # not where a step begins
        run(scheduler)


@shown(Scheduler, "settle", "offloaded", "by hand writes host shard while copy_in#.* reads it")
def an_evaluation_does_not_wait_for_copies(run: Run, scheduler: Scheduler) -> None:
    if scheduler.iteration.forward_root is None:
        run(scheduler)


@shown(Scheduler, "unshard", "elsewhere", "reads shard while user#.* writes")
def gathers_do_not_wait_for_the_optimizer(run: Run, scheduler: Scheduler, unit: Unit) -> bool:
    scheduler.post_optim_event = None
    launched: bool = run(scheduler, unit)
    return launched


# ---- what the watch over random models notices


@shown(Scheduler, "_drop_unused", "changing", r"after loss \[.*\] are gathered")
@shown(Scheduler, "_free_guess", "changing", r"after .* \[.*\] are gathered")
@shown(Reduction, "release", "changing", r"leaked Counter\({'reduce-scatter input'")
def leave_it_out(run: Run, *_: object) -> None:
    pass


@shown(Scheduler, "_gather_ahead", "looking_ahead", r"after .* \[.*\] are gathered")
def make_no_room(
    run: Run, scheduler: Scheduler, units: Sequence[Unit | None], backward: bool = False
) -> None:
    scheduler.iteration.ahead += [unit for unit in units if unit and scheduler.unshard(unit)]


@shown(Scheduler, "_drop_guesses", "looking_ahead", r"after loss \[.*\] are gathered")
def forget_the_others(run: Run, scheduler: Scheduler, but: Sequence[Unit] = ()) -> None:
    scheduler.iteration.ahead.clear()


@shown(ParamGroup, "collect", "changing", "have gradients that were not reduced")
def never_reduce(run: Run, *_: object) -> list[object]:
    return []


@shown(ParamGroup, "collect", "changing", "were dropped")
def reduce_half(run: Run, *args: Any) -> list[object]:
    jobs: list[object] = run(*args)
    return jobs[1:]


@shown(Scheduler, "_finish", "changing", "is still gathered")
def keep_gathered(
    run: Run, scheduler: Scheduler, unit: Unit, reshard: bool, *rest: bool, **named: bool
) -> None:
    run(scheduler, unit, False, *rest, **named)


@shown(Scheduler, "exit_backward", "changing", r"after exit backward .* \[.*\] are gathered")
def free_all_at_the_end(run: Run, scheduler: Scheduler, unit: Unit, _: object = None) -> None:
    unit.reshard_after_backward = False
    run(scheduler, unit)
    unit.reshard_after_backward = True


@shown(Scheduler, "_gather", "changing", "gathered ahead, and freed for all_gather")
def drop_guess_at_the_next_gather(run: Run, scheduler: Scheduler, unit: Unit) -> None:
    scheduler._drop_guesses(but=[unit])
    run(scheduler, unit)


@shown(Scheduler, "_gather_ahead", "changing", "gathered ahead, and freed for")
def drop_guess_where_none_follows(
    run: Run, scheduler: Scheduler, units: Sequence[Unit | None], backward: bool = False
) -> None:
    scheduler._drop_guesses(but=units)
    run(scheduler, units, backward)


@shown(Scheduler, "end_backward", "several_forwards", "for a backward to come, and freed")
def drop_guess_after_every_backward(run: Run, scheduler: Scheduler) -> None:
    run(scheduler)
    scheduler._drop_guesses()


@shown(Scheduler, "end_backward", "several_forwards", "for a backward to come, and freed")
def finish_idle_units_after_every_backward(run: Run, scheduler: Scheduler) -> None:
    for unit in scheduler.units:
        if unit.phase is Phase.IDLE and unit not in scheduler.iteration.ahead:
            scheduler._finish(unit, unit.reshard_after_backward, over=True)
    run(scheduler)


@shown(VirtualDevice, "allocate", "changing", "is not on COMPUTE")
def allocate_elsewhere(run: Run, device: VirtualDevice, name: str) -> object:
    with device.on(Lane.REDUCE):
        return run(device, name)


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda it: f"{it.name}-{it.instead.__name__}")
def test_sabotage_is_found(sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a race on the device, or by the watch over the random models."""
    sabotage(monkeypatch)
    for seed in range(40):
        device = VirtualDevice()
        watch = SCENARIOS[sabotage.scenario](random.Random(f"{sabotage.scenario} {seed}"), device)
        watch.check_trace()
        if any(re.search(sabotage.found, text) for text in (*device.races, *watch.problems)):
            return
    pytest.fail("nothing was found")
