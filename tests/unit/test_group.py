"""The state machine of one group, on a device that exists only on paper."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fsdp2 import MixedPrecisionPolicy, ShardingStateError
from fsdp2.core.group import GroupOptions, OptimizerSteps, ParamGroup, State
from fsdp2.core.simulate import Node, Simulation
from fsdp2.core.virtual import VirtualDevice


def _group(
    world_size: int = 2, precision: MixedPrecisionPolicy | None = None
) -> tuple[ParamGroup, VirtualDevice]:
    device = VirtualDevice()
    sim = Simulation(Node("block"), device, world_size=world_size, precision=precision)
    (unit,) = sim.scheduler.units
    (group,) = unit.groups
    return group, device


ACTIONS: dict[str, Callable[[ParamGroup], None]] = {
    "start_unshard": ParamGroup.start_unshard,
    "finish_unshard": ParamGroup.finish_unshard,
    "reshard": ParamGroup.reshard,
}

PATHS = {
    State.SHARDED: [],
    State.GATHERING: ["start_unshard"],
    State.UNSHARDED: ["start_unshard", "finish_unshard"],
}

MOVES = {
    (State.SHARDED, "start_unshard"): State.GATHERING,
    (State.SHARDED, "reshard"): State.SHARDED,  # nothing to free
    (State.GATHERING, "finish_unshard"): State.UNSHARDED,
    (State.GATHERING, "reshard"): State.SHARDED,
    (State.UNSHARDED, "reshard"): State.SHARDED,
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("state", State)
def test_every_move(state: State, action: str) -> None:
    group, device = _group()
    group.bind()
    for name in PATHS[state]:
        ACTIONS[name](group)
    assert group.state is state
    target = MOVES.get((state, action))
    if target is None:
        message = rf"cannot {action} the parameters of 'block', which are {state.value}; .*reset"
        with pytest.raises(ShardingStateError, match=message):
            ACTIONS[action](group)
        assert group.state is state
    else:
        ACTIONS[action](group)
        assert group.state is target
    assert group.is_unsharded == (group.state is State.UNSHARDED)
    assert device.races == []


@pytest.mark.parametrize("state", [State.GATHERING, State.UNSHARDED])
def test_memory_is_not_moved_while_it_is_gathered(state: State) -> None:
    group, _ = _group()
    group.bind()
    for name in PATHS[state]:
        ACTIONS[name](group)
    with pytest.raises(ShardingStateError, match=rf"cannot adopt 'block' while .* {state.value}"):
        group.adopt()
    group.rebind()
    with pytest.raises(ShardingStateError, match=rf"cannot bind 'block' while .* {state.value}"):
        group.bind()


@pytest.mark.parametrize("world_size", [1, 2])
def test_observer_hears_of_every_move(world_size: int) -> None:
    group, _ = _group(world_size)
    heard: list[tuple[str, str]] = []
    group.observer = lambda *what: heard.append(what)
    group.bind()
    group.start_unshard()
    group.finish_unshard()
    group.reshard()
    group.reshard()
    names = ["all_gather", "finish", "reshard"] if world_size > 1 else ["finish", "reshard"]
    assert heard == [(name, "block") for name in names]


def test_parameters_of_before_a_step_are_out_of_date() -> None:
    group, _ = _group()
    group.bind()
    group.start_unshard()
    group.finish_unshard()
    group.free_if_outdated()
    assert group.is_unsharded
    OptimizerSteps.count += 1
    group.free_if_outdated()
    assert group.state is State.SHARDED
    group.free_if_outdated()
    assert group.state is State.SHARDED


def test_bind_does_nothing_twice() -> None:
    group, device = _group()
    group.bind()
    length = len(device.trace)
    group.bind()
    assert len(device.trace) == length
    group.rebind()
    group.bind()
    assert len(device.trace) > length


def test_integers_are_gathered_as_they_are() -> None:
    group, _ = _group(precision=MixedPrecisionPolicy(torch.bfloat16))
    assert group.compute_dtype(torch.float32) is torch.bfloat16
    assert group.compute_dtype(torch.float64) is torch.bfloat16
    assert group.compute_dtype(torch.uint8) is torch.uint8


def test_options_are_replaced_as_a_whole_and_take_effect_before_the_next_reduction() -> None:
    group, device = _group()
    group.bind()
    before = [len(reduction.on_reduce) for reduction in group._reductions]
    group.set_options(GroupOptions(divide_factor=3.0))
    after = [len(reduction.on_reduce) for reduction in group._reductions]
    assert [new - old for old, new in zip(before, after, strict=True)] == [1] * len(before)
    assert device.races == []
