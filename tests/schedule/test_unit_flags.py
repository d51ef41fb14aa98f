"""Flags of units and options of groups: how often they reduce, what stays alive, what follows."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions, MixedPrecisionPolicy
from fsdp2.core.device.streams import Lane
from fsdp2.core.gather.keeping import SmallerGroup
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.virtual import VirtualCollectives, VirtualDevice
from fsdp2.tracing.record.notes import HOST, operations
from tests.common import random_models, schedules
from tests.common.observing import observe

pytestmark = pytest.mark.alone


def _params(sim: Simulation) -> list[Any]:
    return [param for group in schedules.groups(sim) for param in group.params]


def _reductions(sim: Simulation) -> Counter[str]:
    """Counts from now on how often each group reduces."""
    counts: Counter[str] = Counter()

    def count(operation: str, name: str) -> None:
        if operation == "reduce":
            counts[name] += 1

    observe(sim.scheduler.units, count)
    return counts


# ---- how often


@pytest.mark.parametrize("unused", [True, False])
@pytest.mark.parametrize("inputs", [True, False])
def test_unused_units_are_reduced_once_if_asked_for(inputs: bool, unused: bool) -> None:
    root = schedules.chain("a", "b", "c", grad_to_input=inputs)
    root.children[1].used = False
    sim = schedules.warm(root, options=GroupOptions(pack_below=0, reduce_unused=unused))
    counts = _reductions(sim)
    sim.iteration()
    assert counts == {"a": 1, "c": 1} | ({"b": 1} if unused else {})
    sim.iteration(step=False)
    assert [param.gradient is not None for param in _params(sim)] == [True, unused, True]


def test_unused_units_are_reduced_once_by_a_caller_who_ends_backwards() -> None:
    root = schedules.chain("a", "b")
    root.children[1].used = False
    sim = schedules.warm(root, options=GroupOptions(pack_below=0, reduce_unused=True))
    sim.scheduler.manual = True
    counts = _reductions(sim)
    for _ in range(2):
        sim.iteration(step=False)
        assert counts == {"a": 1, "b": 1}  # where a rank that uses it reduces it
        sim.finalize(wait=True)
        assert counts == {"a": 1, "b": 1}
        counts.clear()
        sim.optimizer_step()


def test_gradients_that_are_to_come_are_not_taken_as_zeros() -> None:
    """A unit that is called twice has its gradients when backward leaves its first call."""
    root = Node("root", [schedules.leaf("a")], [0, 0], shapes=())
    sim = schedules.warm(root, options=GroupOptions(pack_below=0, reduce_unused=True))
    counts = _reductions(sim)
    sim.iteration()
    assert counts == {"a": 1}


def test_a_unit_without_parameters_that_was_called_on_its_own_before() -> None:
    """That forward was thrown away: what is known of it is not taken for the next one's call."""
    box = Node("box", [schedules.leaf("b")], [0], shapes=())
    root = Node("root", [Node("a", [box], [0]), schedules.leaf("c")], [0, 1], shapes=())
    sim = schedules.warm(root, options=GroupOptions(pack_below=0, reduce_unused=True))
    for thrown_away in range(3):
        for _ in range(thrown_away):
            sim.forward(start=box)
            sim.calls.clear()
        counts = _reductions(sim)
        sim.iteration()
        assert counts == {"a": 1, "b": 1, "c": 1}
        assert sim.device.races == []


def test_waiting_partial_sums_are_reduced_without_new_gradients() -> None:
    root = schedules.chain("a", "b")
    sim = schedules.warm(root, copies=2)
    counts = _reductions(sim)
    unit = sim.scheduler.units[1]
    unit.all_reduce = False
    sim.iteration(step=False)
    root.children[0].used = False
    sim.iteration(step=False)
    assert counts["a"] == 1
    unit.all_reduce = True
    sim.iteration(step=False)
    assert counts["a"] == 2
    assert all(param.gradient is not None for param in _params(sim))
    assert sim.device.races == []


# ---- what follows once partial sums are gone


def test_part_without_elements_waits_for_the_other_parts() -> None:
    """Partial sums of a unit count for all its parameters, empty ones too."""
    root = Node("root", shapes=((8, 8), (0, 8)))
    sim = Simulation(root, VirtualDevice(), copies=2, offload=CPUOffloadPolicy())
    (unit,) = sim.scheduler.units
    whole, empty = _params(sim)
    unit.all_reduce = False
    sim.iteration(step=False)
    assert whole.gradient is None
    assert empty.gradient is None
    unit.all_reduce = True
    sim.iteration(step=False)
    assert whole.gradient.allocation.lane is HOST
    assert empty.gradient is not None
    assert sim.device.races == []


# ---- what stays alive


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("offload", [None, CPUOffloadPolicy(), CPUOffloadPolicy(False)])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("coalesces", [True, False])
def test_full_gradients_go_with_their_reduce_scatters(
    coalesces: bool, window: int, offload: CPUOffloadPolicy | None, copies: int
) -> None:
    names = [f"block{i}" for i in range(8)]
    sim = schedules.warm(
        schedules.chain(*names), copies=copies, offload=offload, coalesces=coalesces
    )
    sim.scheduler.units[0].input_buffers = window
    sim.scheduler.refresh()
    most: Counter[str] = Counter()

    def look(*_: object) -> None:
        live = Counter(allocation.name.split()[0] for allocation in sim.device.live)
        for kind in ("gradient", "reduce-scatter"):
            most[kind] = max(most[kind], live[kind])

    observe(sim.scheduler.units, look)
    sim.iteration(step=False)
    assert most["gradient"] <= 1 + window  # of a block in backward, and being reduced
    if offload is not None:  # else the shard-sized outputs become .grad
        assert most["reduce-scatter"] <= 2 * (window + 1)


# ---- offloaded shards


def _offloaded(shapes: Any, world_size: int = 1, **settings: Any) -> tuple[ParamGroup, Simulation]:
    settings |= {"world_size": world_size, "offload": CPUOffloadPolicy()}
    sim = Simulation(Node("root", shapes=shapes), VirtualDevice(), **settings)
    (group,) = schedules.groups(sim)
    return group, sim


def test_parameters_stay_views_of_the_mirror_when_gathers_are_rerouted() -> None:
    group, sim = _offloaded(((8, 8), (8,)))
    sim.iteration()
    gathered = [param.gathered for param in group.params]
    neighbours = VirtualCollectives(sim.device, 1, coalesces=True)
    group.set_smaller_group(SmallerGroup(neighbours, None))  # type: ignore[arg-type]  # no mesh
    group.set_smaller_group(None)  # back to where it was, but noticed
    sim.iteration()
    assert [param.gathered for param in group.params] == gathered
    assert all(view.owner is group.bound.mirror for view in gathered)
    assert sim.device.races == []


@pytest.mark.parametrize(
    ("shapes", "world_size", "precision", "during"),
    [
        (((8, 8),), 1, None, True),  # the gathered parameters are views of the mirror
        (((8, 8),), 1, MixedPrecisionPolicy(torch.bfloat16), False),
        (((8, 8),), 2, None, False),
        (((8, 8), (0, 4)), 2, None, False),  # empty ones need no mirror
        (((0, 8), (3, 0)), 2, None, False),
    ],
)
def test_mirror_is_there_only_while_it_is_read(
    shapes: Any, world_size: int, precision: MixedPrecisionPolicy | None, during: bool
) -> None:
    group, sim = _offloaded(shapes, world_size, precision=precision)
    group.bind()
    assert not group.bound.mirror.allocated
    for _ in range(2):
        group.start_unshard()
        group.finish_unshard()
        assert group.bound.mirror.allocated == during
        group.reshard()
        assert not group.bound.mirror.allocated
    found = operations(sim.device.trace)
    loads = [op for op in found if op.kind == "load" and op.lane is Lane.COPY_IN]
    assert len(loads) == (0 if (0, 8) in shapes else 2)
    assert sim.device.races == []


# ---- windows of reductions


def test_groups_of_a_unit_count_as_one_in_the_window() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        root = random_models.random_tree(rng)
        for node in root.walk():
            node.more = [((8, 8),)]
        watch = random_models.Watch(rng, root, bounded=False)
        scheduler = watch.sim.scheduler
        most = 0

        def look(scheduler: Any = scheduler) -> None:
            nonlocal most
            names = [pending.params[0].name for pending in scheduler._in_flight.holding]
            units = {name.partition(".")[0].partition("/")[0] for name in names}
            most = max(most, len(units))

        watch.at_each_step = look
        for _ in range(2):
            watch.sim.iteration()
        watch.check_trace()
        assert watch.problems == [], f"seed {seed}"
        assert most <= 1
