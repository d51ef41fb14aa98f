"""Observers of groups: they see what they ask for, in their order, and follow ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from fsdp2.core.schedule.observers import (
    GroupOperations,
    Observer,
    observed,
    observers_of,
)
from fsdp2.core.schedule.unit import inherit, lend, put_around
from fsdp2.testing.simulation import Simulation
from fsdp2.testing.virtual import VirtualDevice
from tests.common import schedules

pytestmark = pytest.mark.alone

LOWER, HIGHER = Observer(10, {}), Observer(11, {})


def noting(name: str, heard: list[object]) -> Callable[..., object]:
    def see(group: object, run: Callable[..., object], *args: object) -> object:
        heard.append((name, group, args))
        return run(*args)

    return see


def test_operations_are_seen_in_order_and_all_else_is_the_groups_own() -> None:
    heard: list[object] = []
    below: Any = mock.Mock()
    below.base = below
    low = Observer(1, {"reduce": noting("low", heard)})
    high = Observer(2, {"reduce": noting("high", heard)})
    group = observed(below, [low, high])
    assert group.reduce([], True) is below.reduce.return_value
    assert heard == [("high", below.base, ([], True)), ("low", below.base, ([], True))]
    below.reduce.assert_called_once_with([], True)
    assert group.reshard == below.reshard
    assert group.state is below.state
    assert group.base is below.base


def order(group: GroupOperations) -> list[Observer]:
    return list(observers_of(group))


def test_a_tie_that_is_made_and_inherited_while_groups_are_observed() -> None:
    sim = Simulation(schedules.chain("a", "b"), VirtualDevice())
    owner, user = schedules.unit_of(sim, "a"), schedules.unit_of(sim, "b")
    put_around([owner, user], HIGHER, True)
    (group,) = owner.own_groups
    lend(group, owner, user)
    put_around([owner, user], LOWER, True)
    assert [order(each) for each in (*owner.groups, *user.groups)] == [[HIGHER, LOWER]] * 3
    sim.iteration()
    inherit(user, lambda unit: unit is owner)
    assert user.own_groups[0] is group
    assert [order(each) for each in user.groups] == [[HIGHER, LOWER]] * 2
    assert group.options is user.options
    put_around([owner, user], HIGHER, False)
    put_around([owner, user], LOWER, False)
    assert user.groups == user.own_groups
