"""Groups that several units use, on paper: when they are gathered, freed and reduced."""

from __future__ import annotations

import pytest

from fsdp2.core.schedule.unit import give_back
from fsdp2.testing.simulation import Node, Simulation
from tests.common import schedules
from tests.common.observing import observe

pytestmark = pytest.mark.alone

Moves = list[str]


def moves(sim: Simulation) -> Moves:
    """What happens to the group of a from now on."""
    heard: Moves = []
    observe(sim.scheduler.units, lambda what, of: heard.append(what) if of == "a" else None)
    return heard


def tied(*names: str, user: str = "c", owner: str = "a") -> Node:
    root = schedules.chain(*names)
    nodes = {node.name: node for node in root.children}
    nodes[owner].tied = [nodes[user]]
    return root


ONCE = ["all_gather", "finish", "reshard"]


@pytest.mark.parametrize("order", ["abc", "cba"], ids=["owner first", "owner last"])
def test_gathered_around_each_use_and_reduced_once(order: str) -> None:
    """If the owner's own end comes before the other unit's, the reduction waits for both."""
    sim = schedules.warm(tied(*order))
    heard = moves(sim)
    sim.forward()
    assert heard == ONCE * 2
    sim.backward()
    assert heard == [*ONCE * 4, "reduce"]
    assert sim.device.races == []


@pytest.mark.parametrize("owner", [True, False])
def test_a_unit_around_the_other(owner: bool) -> None:
    """It stays gathered as long as one of them runs."""
    inner, outer = schedules.leaf("inner"), Node("outer", shapes=((8, 8),), calls=[0, 0])
    outer.children = [inner]
    (outer if owner else inner).tied = [inner if owner else outer]
    sim = schedules.warm(Node("root", [outer], [0], shapes=()))
    heard: Moves = []
    name = "outer" if owner else "inner"
    observe(sim.scheduler.units, lambda what, of: heard.append(what) if of == name else None)
    sim.iteration()
    assert heard in ([*ONCE, *ONCE, "reduce"], [*ONCE, *ONCE[:2], "reduce", "reshard"])


@pytest.mark.parametrize("hooked", [False, True])
def test_a_backward_without_the_owner(hooked: bool) -> None:
    """Another unit's gradient is reduced in its stead; a step in a hook waits for the gather ahead
    that nobody has used.
    """
    root = tied("a", "b", "c")
    sim = schedules.warm(root)
    heard = moves(sim)
    root.children[0].used = False
    if hooked:
        sim.step_in_backward()
        sim.scheduler.is_last_backward = False
    sim.iteration(step=not hooked)
    assert heard.count("reduce") == 1
    assert sim.device.races == []


def test_earlier_gradients_are_not_reduced_before_the_others_came() -> None:
    root = tied("c", "b", "a")
    sim = schedules.warm(root)
    for unit in sim.scheduler.units:
        unit.sync = False
    sim.iteration(step=False)
    heard = moves(sim)
    for unit in sim.scheduler.units:
        unit.sync = True
    sim.iteration()
    assert heard.count("reduce") == 1


def test_a_group_is_a_plain_one_before_and_after() -> None:
    sim = schedules.warm(tied("a", "b", "c"))
    owner, user = schedules.unit_of(sim, "a"), schedules.unit_of(sim, "c")
    (group,) = owner.own_groups
    assert owner.ties[group] is user.ties[group]
    assert group in user.groups
    assert [unit.borrows(group) for unit in (owner, user)] == [False, True]
    assert group not in user.own_groups
    assert group.in_use is not None
    give_back(group, user)
    assert owner.groups == [group]
    assert group not in user.groups
    assert not owner.ties
    assert not user.ties
    assert group.in_use is None
