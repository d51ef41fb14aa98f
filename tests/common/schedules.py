"""Small models whose schedules are asserted, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.unit import Unit
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.virtual import VirtualDevice
from tests.common.render import render

SHAPES = ((8, 8),)


def leaf(name: str, **settings: Any) -> Node:
    """One aligned parameter."""
    return Node(name, shapes=SHAPES, **settings)


def chain(*names: str, **settings: Any) -> Node:
    """A root without parameters of its own that calls one leaf a name."""
    leaves = [leaf(name, **settings) for name in names]
    return Node("root", leaves, list(range(len(leaves))), shapes=())


def bound(root: Node, **settings: Any) -> Simulation:
    """A simulation before its first forward, all buffers bound."""
    sim = Simulation(root, VirtualDevice(), **settings)
    for group in groups(sim):
        group.bind()
    return sim


def warm(root: Node, **settings: Any) -> Simulation:
    """A simulation after its first iteration."""
    sim = bound(root, **settings)
    sim.iteration()
    return sim


def groups(sim: Simulation) -> list[ParamGroup]:
    """All units' groups."""
    return [group for unit in sim.scheduler.units for group in unit.own_groups]


def unit_of(sim: Simulation, name: str) -> Unit:
    """The unit of that name."""
    return next(unit for unit in sim.scheduler.units if unit.name == name)


def emitted(sim: Simulation, action: Callable[[], None]) -> str:
    """What ``action`` emits, rendered."""
    start = len(sim.device.trace)
    action()
    assert sim.device.races == []
    return render(sim.device.trace, start)
