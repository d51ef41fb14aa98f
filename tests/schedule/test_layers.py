"""Layers around groups: they pass on all that they do not override, and follow ties."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest

from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.layers import GroupOperations, Layer, layers_of
from fsdp2.core.schedule.ties import inherit, lend
from fsdp2.core.schedule.unit import put_around
from fsdp2.testing.simulation import Simulation
from fsdp2.testing.virtual import VirtualDevice
from tests.common import schedules

pytestmark = pytest.mark.alone

OPERATIONS = [name for name in vars(Layer) if not name.startswith("_") and name != "below"]
ASKED_OF_THE_GROUP = {"base", "is_whole", "stale", "state"}  # at once, whatever is between


class Lower(Layer):
    __slots__ = ()

    height = 10


class Higher(Layer):
    __slots__ = ()

    height = 11


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_layer_passes_everything_on(name: str) -> None:
    below: Any = mock.Mock()
    layer = Layer(below)
    declared = inspect.getattr_static(ParamGroup, name)
    if not inspect.isfunction(declared):
        owner = below.base if name in ASKED_OF_THE_GROUP - {"base"} else below
        assert getattr(layer, name) is getattr(owner, name)
        return
    keys = inspect.signature(declared).parameters
    given = {key: object() for key in keys if key not in ("self", "forced")}
    assert getattr(layer, name)(**given) in (None, getattr(below, name).return_value)
    (call,) = getattr(below, name).call_args_list
    assert [*call.args, *call.kwargs.values()] == list(given.values())


@pytest.mark.parametrize("name", OPERATIONS)
def test_layers_take_what_the_group_takes(name: str) -> None:
    declared = inspect.getattr_static(ParamGroup, name)
    found = inspect.getattr_static(Layer, name)
    assert not hasattr(Layer, "__getattr__")
    if inspect.isfunction(declared):
        taken = [key for key in inspect.signature(declared).parameters if key != "forced"]
        assert list(inspect.signature(found).parameters) == taken


def kinds(group: GroupOperations) -> list[type]:
    return [type(layer) for layer in layers_of(group)]


def test_a_tie_that_is_made_and_inherited_while_layers_are_there() -> None:
    sim = Simulation(schedules.chain("a", "b"), VirtualDevice())
    owner, user = schedules.unit_of(sim, "a"), schedules.unit_of(sim, "b")
    put_around([owner, user], Higher, True)
    (group,) = owner.own_groups
    lend(group, owner, user)
    put_around([owner, user], Lower, True)
    assert kinds(owner.groups[0]) == [Higher, Lower]
    assert [kinds(each) for each in user.groups] == [[Higher, Lower]] * 2
    sim.iteration()
    inherit(user, lambda unit: unit is owner)
    assert user.own_groups[0] is group
    assert [kinds(each) for each in user.groups] == [[Higher, Lower]] * 2
    assert group.options is user.options
    put_around([owner, user], Higher, False)
    put_around([owner, user], Lower, False)
    assert user.groups == user.own_groups
