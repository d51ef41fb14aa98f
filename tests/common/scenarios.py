"""What random models go through: a few iterations each, with the checks that must hold between.

Every scenario takes a generator and may build its model and settings from it, so that a seed says
all. The device is the caller's, who may have dropped a wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fsdp2.core.config import CPUOffloadPolicy
from fsdp2.core.progress import Counts
from fsdp2.core.schedule.unit import Unit
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.virtual import VirtualDevice
from fsdp2.tracing.record.notes import Operation
from tests.common import random_models

Scenario = Callable[[random.Random, VirtualDevice], random_models.Watch]


def _iterate(watch: random_models.Watch, padding: bool = True) -> None:
    """Forward, backward, step, after which nothing may be left over."""
    watch.sim.iteration()
    watch.check_reduced()
    watch.check_sharded()
    watch.check_live(padding)


def steady(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """The same calls in every iteration; all outputs, inputs and parameters take part."""
    watch = random_models.Watch(rng, random_models.random_tree(rng, plain=True), device=device)
    for _ in range(3):
        _iterate(watch)
    return watch


def stepping(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """The optimizer runs in hooks, as soon as a gradient is reduced or added to an older one."""
    root = random_models.random_tree(rng)
    watch = random_models.Watch(rng, root, device=device)
    sim = watch.sim
    for _ in range(2):
        sim.step_in_backward(False)
        for _ in range(rng.choice((0, 1, 1, 2))):  # leaves gradients, reduced or not
            for node, calls in random_models.calls_of(root).items():
                # Gradients of earlier backwards are reduced when the first of its calls ends: a
                # hook would step then, before the others are through.
                node.unit.sync = calls > 1 or rng.random() < 0.7
            sim.iteration(step=False)
            watch.check_reduced()
        for unit in sim.scheduler.units:
            unit.sync = True
        sim.step_in_backward()
        _iterate(watch)
    return watch


def stepping_in_flight(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """The optimizer runs in hooks, and forwards begin before it is known to be through."""
    watch = random_models.Watch(rng, random_models.random_tree(rng), device=device)
    sim = watch.sim
    for _ in range(2):
        sim.step_in_backward()
        for _ in range(rng.randint(1, 2)):
            sim.scheduler.is_last_backward = False
            sim.iteration(step=False)
            watch.check_reduced()
        sim.scheduler.is_last_backward = True
        _iterate(watch)
    return watch


def stepping_between(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """The optimizer runs in hooks, while backwards of earlier forwards are still to come."""
    watch = random_models.Watch(rng, random_models.random_tree(rng), device=device)
    sim = watch.sim
    for _ in range(2):
        sim.step_in_backward()
        forwards = rng.randint(2, 3)
        for _ in range(forwards):
            sim.forward()
        for left in reversed(range(forwards)):
            sim.scheduler.is_last_backward = not left
            sim.backward()
    return watch


def changing(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """Other calls in every iteration, so that the recorded order misleads."""
    root = random_models.random_tree(rng)
    watch = random_models.Watch(rng, root, device=device)
    for _ in range(3):
        random_models.random_flags(rng, watch.sim)
        _iterate(watch)
        random_models.shuffle_calls(rng, root)
    return watch


def partial(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """Frozen parameters, unused outputs, inputs without grad; which, changes between iterations."""
    root = random_models.random_tree(rng)
    watch = random_models.Watch(rng, root, device=device)
    for _ in range(3):  # which changes the reductions, and their padding
        for node in root.walk():
            node.frozen = rng.choice((0, 0, 1, 2))
            node.used = rng.random() < 0.8
            node.grad_to_input = rng.random() < 0.7
            node.absent = rng.choice((0, 0, 0, 1, 2))
        _iterate(watch, padding=False)
    return watch


def several_forwards(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """Evaluation, forwards that are thrown away, and up to three before their backwards."""
    root = random_models.random_tree(rng)
    watch = random_models.Watch(rng, root, device=device)
    sim = watch.sim
    for _ in range(2):
        for _ in range(rng.randint(0, 2)):  # without a backward: evaluation, or thrown away
            sim.forward(expects_backward=rng.random() < 0.5, start=_some_start(rng, root))
            sim.calls.clear()
        count = rng.randint(1, 3)
        for _ in range(count):
            sim.forward(start=_some_start(rng, root))
            if rng.random() < 0.3:
                random_models.shuffle_calls(rng, root)
        while sim.calls:
            joint = rng.randint(1, len(sim.calls))
            sim.scheduler.is_last_backward = joint == len(sim.calls) or rng.random() < 0.5
            sim.backward(joint)
            watch.check_reduced()
        sim.optimizer_step()
        watch.check_sharded()
        watch.check_live()
    return watch


def _some_start(rng: random.Random, root: Node) -> Node:
    return root if rng.random() < 0.7 else rng.choice(root.walk())


def accumulation(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """Micro-batches: some units sync or reshard late, some backwards are not the last."""
    root = random_models.random_tree(rng)
    watch = random_models.Watch(rng, root, device=device)
    sim = watch.sim
    units = sim.scheduler.units
    for _ in range(2):
        for _ in range(rng.randint(1, 2)):
            everywhere = rng.random() < 0.5
            for unit in units:
                unit.sync = not everywhere and rng.random() < 0.4
                unit.all_reduce = rng.random() < 0.5
                unit.reshard_after_backward = rng.random() < 0.6
            sim.scheduler.is_last_backward = rng.random() < 0.5
            sim.iteration(step=False)
            watch.check_reduced()
        for unit in units:
            unit.sync = unit.all_reduce = unit.reshard_after_backward = True
        sim.scheduler.is_last_backward = True
        random_models.random_flags(rng, sim)
        _iterate(watch)
    return watch


def replicated(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """Copies, whose sums are partial for some backwards; some of those are given up."""
    root = random_models.random_tree(rng)
    watch = random_models.Watch(rng, root, device=device, copies=2)
    sim = watch.sim
    units = sim.scheduler.units
    for _ in range(2):
        random_models.random_flags(rng, sim)
        for _ in range(rng.randint(1, 3)):
            everywhere = rng.random() < 0.5
            for unit in units:
                unit.all_reduce = not everywhere and rng.random() < 0.3
            sim.scheduler.is_last_backward = rng.random() < 0.4
            sim.iteration(step=False)
            watch.check_reduced()
            if rng.random() < 0.2:
                watch.discard_gradients()
            elif rng.random() < 0.2:
                for node in root.walk():
                    node.frozen = rng.choice((0, 0, 1))
        for unit in units:
            unit.all_reduce = True
        sim.scheduler.is_last_backward = True
        _iterate(watch, padding=False)
    return watch


def offloaded(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """Shards in CPU memory, which the host writes whenever no iteration is under way."""
    root = random_models.random_tree(rng)
    offload = CPUOffloadPolicy(rng.random() < 0.8)
    watch = random_models.Watch(rng, root, bounded=False, device=device, offload=offload)
    sim = watch.sim
    for _ in range(3):
        for unit in sim.scheduler.units:
            if rng.random() < 0.1:
                unit.forward_prefetch = _some_units(rng, sim)
        for _ in range(rng.choice((0, 1, 2))):  # without a backward: evaluation, or thrown away
            trains = rng.random() < 0.5
            sim.forward(expects_backward=trains, start=_some_start(rng, root))
            sim.calls.clear()
            if not trains:
                sim.write("by hand")
            if rng.random() < 0.7:
                sim.optimizer_step()
        if rng.random() < 0.5:
            for unit in sim.scheduler.units:
                unit.reshard()
                unit.settle()
            sim.write("load_state_dict")
        sim.step_in_backward(rng.random() < 0.3)
        for late in reversed(range(rng.choice((1, 1, 2)))):
            sim.scheduler.is_last_backward = not late
            sim.iteration(step=False)
        watch.check_reduced()
        watch.check_sharded()
        if rng.random() < 0.3:  # one more forward, then the step
            sim.forward(start=_some_start(rng, root))
            sim.calls.clear()
        sim.optimizer_step()
        for unit in sim.scheduler.units:
            unit.reshard()
        watch.check_live()
        if rng.random() < 0.5:
            random_models.shuffle_calls(rng, root)
    return watch


def finalized(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """Backwards that a caller ends: reductions of their own, waited for now or later."""
    root = random_models.random_tree(rng)
    watch = random_models.Watch(rng, root, device=device)
    sim = watch.sim
    scheduler = sim.scheduler
    scheduler.manual = True
    for _ in range(2):
        random_models.random_flags(rng, sim)
        for _ in range(rng.randint(1, 3)):
            for unit in scheduler.units:
                unit.sync = rng.random() < 0.3
                unit.all_reduce = rng.random() < 0.7
            sim.iteration(step=False)
            watch.check_reduced()
        for unit in scheduler.units:
            unit.sync = unit.all_reduce = True
        sim.finalize(wait=rng.random() < 0.5)
        watch.check_reduced()
        watch.check_sharded()
        sim.optimizer_step()
        watch.check_live()
    return watch


def elsewhere(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """The optimizer runs on a stream of the user's; gradients go when the next forward is through.

    Only the event says when it has stepped.
    """
    root = random_models.random_tree(rng)
    watch = random_models.Watch(rng, root, bounded=False, device=device, offload=None)
    sim = watch.sim
    for _ in range(3):
        if rng.random() < 0.2:
            sim.scheduler.unshard(rng.choice(sim.scheduler.units))
        sim.forward()
        sim.drop_gradients()
        sim.backward()
        watch.check_reduced()
        watch.check_sharded()
        sim.step_elsewhere()
        if rng.random() < 0.5:
            random_models.shuffle_calls(rng, root)
    sim.forward(expects_backward=False)
    sim.drop_gradients()
    for unit in sim.scheduler.units:
        unit.reshard()
    watch.check_live()
    return watch


def requested(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """Explicit prefetch lists, right or wrong, and gathers and frees that a user asks for."""
    root = random_models.random_tree(rng)
    watch = random_models.Watch(rng, root, bounded=False, device=device)
    sim = watch.sim
    for _ in range(3):
        for unit in sim.scheduler.units:
            unit.forward_prefetch = _some_units(rng, sim)
            unit.backward_prefetch = _some_units(rng, sim)
        for unit in _some_units(rng, sim):
            action = rng.choice(("unshard", "wait", "reshard"))
            sim.scheduler.unshard(unit)
            if action == "wait":
                sim.scheduler.wait(unit)
            elif action == "reshard":
                unit.reshard()
        for _ in range(rng.choice((1, 1, 2))):
            sim.forward()
            for unit in _some_units(rng, sim):  # between forward and backward
                rng.choice((sim.scheduler.unshard, Unit.reshard))(unit)
        while sim.calls:
            sim.scheduler.is_last_backward = len(sim.calls) == 1
            sim.backward()
            watch.check_reduced()
        sim.optimizer_step()
        watch.check_sharded()
        watch.check_live()
        if rng.random() < 0.3:
            random_models.shuffle_calls(rng, root)
    return watch


def other_optimizer(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """One that holds managed parameters, though none of these, steps at any moment."""
    root = random_models.random_tree(rng)
    watch = random_models.Watch(rng, root, device=device)

    def step() -> None:
        Counts.steps += rng.random() < 0.1

    watch.at_each_step = step
    for _ in range(3):
        _iterate(watch)
        if rng.random() < 0.5:
            random_models.shuffle_calls(rng, root)
    return watch


def interrupted(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """Exceptions anywhere in a forward or backward, each followed by a reset."""
    watch = random_models.Watch(rng, random_models.random_tree(rng), device=device)
    for _ in range(3):
        watch.interrupt_after = rng.randint(0, 40)
        try:
            watch.sim.iteration()
        except random_models.InterruptError:
            watch.reset()
            watch.sim.optimizer_step()
        watch.check_reduced()
        watch.check_sharded()
        watch.check_live()
    return watch


def broken_hooks(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """A user's hook raises in the middle of a reduction; a reset follows."""
    watch = random_models.Watch(rng, random_models.random_tree(rng), device=device)
    for _ in range(2):
        watch.break_hooks(rng.randint(0, 3))
        try:
            watch.sim.iteration(step=False)
        except random_models.InterruptError:
            watch.reset()
        watch.sim.step_in_backward(False)
        watch.sim.optimizer_step()
        _iterate(watch)
    return watch


def looking_ahead(rng: random.Random, device: VirtualDevice) -> random_models.Watch:
    """Windows of one to three units, which change between forwards and backwards."""
    root = random_models.random_tree(rng)
    watch = random_models.Watch(rng, root, device=device, window=2)
    sim = watch.sim
    for _ in range(3):
        for late in reversed(range(rng.choice((1, 1, 2)))):
            _choose_window(rng, watch)
            sim.forward()
            _choose_window(rng, watch)
            sim.scheduler.is_last_backward = not late
            sim.backward()
            watch.check_reduced()
        sim.optimizer_step()
        watch.check_sharded()
        watch.check_live()
        if rng.random() < 0.5:
            random_models.shuffle_calls(rng, root)
    return watch


def _choose_window(rng: random.Random, watch: random_models.Watch) -> None:
    """What a smaller window frees was no wrong guess."""
    if rng.random() < 0.5:
        scheduler, known = watch.sim.scheduler, len(watch.log)
        window = rng.choice((1, 2, 3))
        for unit in scheduler.units:
            unit.prefetch_window = window
        scheduler.refresh()
        watch.log[known:] = [("free what is outdated", name) for _, name in watch.log[known:]]


def _some_units(rng: random.Random, sim: Simulation) -> list[Unit]:
    units = sim.scheduler.units
    return rng.sample(units, rng.choice((0, 0, 1, min(2, len(units)), min(3, len(units)))))


SCENARIOS: dict[str, Scenario] = {
    function.__name__: function
    for function in (
        steady,
        stepping,
        stepping_in_flight,
        stepping_between,
        changing,
        partial,
        several_forwards,
        accumulation,
        replicated,
        offloaded,
        finalized,
        elsewhere,
        requested,
        looking_ahead,
        other_optimizer,
        interrupted,
        broken_hooks,
    )
}


def staged_in_order(
    scenario: str, buffer: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> bool:
    """Four random models of a scenario, whose groups have these options: nothing may be wrong."""
    settings = random_models.random_settings

    def chosen(*args: Any) -> dict[str, Any]:
        found = settings(*args)
        return found | {"options": replace(found["options"], **options)}

    monkeypatch.setattr(random_models, "random_settings", chosen)
    staged = False
    for seed in range(4):
        device = VirtualDevice()
        watch = SCENARIOS[scenario](random.Random(f"{scenario} {seed}"), device)
        assert watch.problems == []
        operations = (note for note in device.trace if isinstance(note, Operation))
        staged = staged or any(b.name == buffer for op in operations for b in op.writes)
    return staged
