"""An exception at any operation of an iteration, on paper: the next one is as if it had not been.

An iteration is run once for each operation that it issues (allocation, kernel, copy, collective,
event, wait), and that operation raises: what an allocator does that is out of memory, a collective
whose peer is gone, or Ctrl-C. The scheduler must then know that it was interrupted (the next
forward of the root asks it), and after the reset nothing may be gathered, staged or in flight.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp2.core.config import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp2.core.schedule.states import GroupState
from fsdp2.core.schedule.unit import Phase
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.virtual import VirtualDevice
from fsdp2.tracing.record.notes import Allocation
from tests.common import schedules

pytestmark = pytest.mark.alone

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Interruption(Exception):  # noqa: N818  # no error of ours
    """What the operation raises."""


class Failing(VirtualDevice):
    """A device of which the operation number ``fail_at`` (from now on) raises."""

    def __init__(self) -> None:
        super().__init__()
        self.issued = 0
        self.fail_at: int | None = None

    def _tick(self) -> None:
        self.issued += 1
        if self.fail_at is not None and self.issued > self.fail_at:
            self.fail_at = None
            raise Interruption

    def allocate(self, name: str) -> Allocation:
        self._tick()
        return super().allocate(name)

    def record(self, *args: Any) -> Any:
        self._tick()
        return super().record(*args)

    def wait(self, *args: Any) -> None:
        self._tick()
        super().wait(*args)

    def synchronize(self, *args: Any) -> None:
        self._tick()
        super().synchronize(*args)

    def run(self, *args: Any) -> None:
        self._tick()
        super().run(*args)


def _nested() -> Node:
    inner = [
        schedules.leaf("a"),
        Node("b", [schedules.leaf("c"), schedules.leaf("d")], [0, 1, 0], shapes=((8, 8), (3,))),
    ]
    return Node("root", inner, [0, 1, 1], shapes=((8, 8),))


def _meshes() -> Node:
    return Node(
        "root",
        [Node(n, shapes=((8, 8), (5, 3)), more=[((8, 8),)]) for n in "ab"],
        [0, 1],
        shapes=((8, 8),),
    )


def _chain() -> Node:
    return schedules.chain("a", "b")


SETTINGS: dict[str, tuple[Callable[[], Node], dict[str, Any]]] = {
    "plain": (_chain, {}),
    "mixed": (_chain, {"precision": BF16}),
    "packed": (_chain, {"precision": BF16, "coalesces": False}),
    "replicas": (_chain, {"copies": 2}),
    "offload": (_chain, {"offload": CPUOffloadPolicy(pin_memory=True), "precision": BF16}),
    "smaller": (_chain, {"smaller": 2, "world_size": 4}),
    "nested": (_nested, {}),
    "meshes": (_meshes, {"world_size": 4, "precision": BF16, "coalesces": False}),
}


def _simulation(setting: str) -> tuple[Simulation, Failing]:
    build, settings = SETTINGS[setting]
    device = Failing()
    return Simulation(build(), device, **settings), device


def _plain(sim: Simulation) -> None:
    sim.iteration(step=False)


def _prefetching(sim: Simulation) -> None:
    units = [unit for unit in sim.scheduler.units if unit.own_groups]
    for unit, following in itertools.pairwise(units):
        unit.forward_prefetch = units[units.index(following) :][:2]
        following.backward_prefetch = [unit]
    sim.iteration(step=False)


def _accumulating(sim: Simulation) -> None:
    _set_sync(sim, False)
    sim.iteration(step=False)
    _set_sync(sim, True)
    sim.iteration(step=False)


def _set_sync(sim: Simulation, sync: bool) -> None:
    for unit in sim.scheduler.units:
        unit.sync = sync


def _manual(sim: Simulation) -> None:
    sim.scheduler.manual = True
    sim.iteration(step=False)
    sim.finalize(wait=True)


ITERATIONS = {
    "plain": _plain,
    "prefetch": _prefetching,
    "accumulation": _accumulating,
    "manual": _manual,
}


def _names(device: VirtualDevice) -> Counter[str]:
    return Counter(allocation.name for allocation in device.live)


def _cases() -> list[Any]:
    """Every setting in a plain iteration and a plain model in every iteration; else extended."""
    return [
        pytest.param(s, i, marks=[] if "plain" in (s, i) else [pytest.mark.extended])
        for s in SETTINGS
        for i in ITERATIONS
    ]


@pytest.mark.parametrize(("setting", "iteration"), _cases())
def test_an_exception_at_any_operation(setting: str, iteration: str) -> None:
    run = ITERATIONS[iteration]
    sim, device = _simulation(setting)
    run(sim)
    sim.drop_gradients()
    sim.scheduler.reset()  # a root that stays gathered after forward is freed as well
    at_rest = _names(device)
    before = device.issued
    run(sim)
    number = device.issued - before
    sim.drop_gradients()
    assert number > 20
    for position in range(number):
        device.fail_at = device.issued + position
        with pytest.raises(Interruption):
            run(sim)
        sim.active.clear()
        sim.calls.clear()
        scheduler = sim.scheduler
        where = f"operation {position} of {number}: {device.trace[-1]}"
        assert (
            scheduler.iteration.in_backward
            or scheduler.iteration.forward_root is scheduler.units[0]
        ), where
        scheduler.reset()
        sim.drop_gradients()
        _set_sync(sim, True)
        assert {group.state for group in schedules.groups(sim)} == {GroupState.SHARDED}, where
        assert {unit.phase for unit in scheduler.units} == {Phase.IDLE}, where
        assert _names(device) == at_rest, where
        run(sim)
        sim.drop_gradients()
        scheduler.reset()
        assert device.races == [], where
        assert _names(device) == at_rest, where


def test_a_gather_on_request_that_fails_can_be_repeated() -> None:
    """Outside an iteration no reset follows: the group must know that it is not gathered."""
    sim, device = _simulation("packed")
    sim.iteration()
    unit = schedules.unit_of(sim, "a")
    at_rest = _names(device)

    def gather() -> int:
        before = device.issued
        sim.scheduler.unshard(unit)
        sim.scheduler.wait(unit)
        return device.issued - before

    for position in range(gather()):
        unit.reshard()
        device.fail_at = device.issued + position
        with pytest.raises(Interruption):
            gather()
        assert not unit.is_gathered
        assert _names(device) == at_rest
        gather()
        assert unit.is_gathered
        assert device.races == []
