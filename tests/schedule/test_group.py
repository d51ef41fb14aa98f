"""The state machine of one group, on a device that exists only on paper."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fsdp2 import MixedPrecisionPolicy, errors
from fsdp2.core.gather.keeping import SmallerGroup
from fsdp2.core.progress import Counts
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.states import GroupState
from fsdp2.core.schedule.unit import free_if_outdated
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.virtual import VirtualCollectives, VirtualDevice, VirtualTensor

pytestmark = pytest.mark.alone


def _group(
    world_size: int = 2,
    precision: MixedPrecisionPolicy | None = None,
    smaller: int | None = None,
) -> tuple[ParamGroup, VirtualDevice]:
    device = VirtualDevice()
    sim = Simulation(Node("block"), device, world_size=world_size, precision=precision)
    (unit,) = sim.scheduler.units
    (group,) = unit.own_groups
    if smaller is not None:
        neighbours = VirtualCollectives(device, smaller, coalesces=True)
        group.set_smaller_group(SmallerGroup(neighbours, None))  # type: ignore[arg-type]  # no mesh
    return group, device


ACTIONS: dict[str, Callable[[ParamGroup], None]] = {
    "start_unshard": ParamGroup.start_unshard,
    "finish_unshard": ParamGroup.finish_unshard,
    "shard_smaller": ParamGroup.shard_smaller,
    "reshard": ParamGroup.reshard,
    "hide": ParamGroup.hide,
    "retain": lambda group: group.hide(GroupState.RETAINED),
    "grant": ParamGroup.grant,
    "show": ParamGroup.show,
    "drop_retained": ParamGroup.drop_retained,
}

PATHS = {
    GroupState.SHARDED: [],
    GroupState.GATHERING: ["start_unshard"],
    GroupState.UNSHARDED: ["start_unshard", "finish_unshard"],
    GroupState.RESHARDED: ["start_unshard", "finish_unshard", "shard_smaller"],
    GroupState.HIDDEN: ["start_unshard", "finish_unshard", "hide"],
    GroupState.RETAINED: ["start_unshard", "finish_unshard", "retain"],
    GroupState.GRANTED: ["start_unshard", "finish_unshard", "retain", "grant"],
}

MOVES = {
    (GroupState.SHARDED, "start_unshard"): GroupState.GATHERING,
    (GroupState.GATHERING, "finish_unshard"): GroupState.UNSHARDED,
    (GroupState.GATHERING, "reshard"): GroupState.SHARDED,
    (GroupState.UNSHARDED, "shard_smaller"): GroupState.RESHARDED,
    (GroupState.UNSHARDED, "reshard"): GroupState.SHARDED,
    (GroupState.UNSHARDED, "hide"): GroupState.HIDDEN,
    (GroupState.UNSHARDED, "retain"): GroupState.RETAINED,
    (GroupState.HIDDEN, "show"): GroupState.UNSHARDED,
    (GroupState.RETAINED, "grant"): GroupState.GRANTED,
    (GroupState.RETAINED, "start_unshard"): GroupState.GATHERING,
    (GroupState.RETAINED, "drop_retained"): GroupState.SHARDED,
    (GroupState.GRANTED, "show"): GroupState.UNSHARDED,
    (GroupState.GRANTED, "drop_retained"): GroupState.SHARDED,
    (GroupState.HIDDEN, "reshard"): GroupState.SHARDED,
    (GroupState.RESHARDED, "start_unshard"): GroupState.GATHERING,
    (GroupState.RESHARDED, "reshard"): GroupState.SHARDED,
}
NOTHING_TO_DO = [
    *((state, "reshard") for state in GroupState if state.is_sharded),
    *((state, "drop_retained") for state in GroupState if "retained" not in state.value),
    *((state, "grant") for state in GroupState if state is not GroupState.RETAINED),
    *(
        (state, action)
        for action in ("hide", "retain", "shard_smaller")
        for state in GroupState
        if state is not GroupState.UNSHARDED
    ),
]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("state", GroupState)
def test_every_move(state: GroupState, action: str) -> None:
    group, device = _group(world_size=4, smaller=2)
    group.bind()
    for name in PATHS[state]:
        ACTIONS[name](group)
    assert group.state is state
    target = state if (state, action) in NOTHING_TO_DO else MOVES.get((state, action))
    if target is None:
        message = rf"cannot {action} the parameters of 'block', which are {state.value}; .*reset"
        with pytest.raises(errors.ShardingStateError, match=message):
            ACTIONS[action](group)
        assert group.state is state
    else:
        ACTIONS[action](group)
        assert group.state is target
    assert group.is_unsharded == (group.state is GroupState.UNSHARDED)
    assert device.races == []


def test_parameters_of_before_a_step_are_out_of_date() -> None:
    group, _ = _group()
    group.bind()
    group.start_unshard()
    group.finish_unshard()
    free_if_outdated(group)
    assert group.is_unsharded
    Counts.steps += 1
    free_if_outdated(group)
    assert group.state is GroupState.SHARDED
    free_if_outdated(group)
    assert group.state is GroupState.SHARDED


def _leave_gradients(group: ParamGroup, device: VirtualDevice, dtype: torch.dtype) -> None:
    for param in group.params:
        owner = device.empty((1,), dtype, f"gradient {param.name}").owner
        param.full_grad = VirtualTensor(owner, param.shape, dtype)
        device.run("gradient", [], [param.full_grad])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("grad", [None, torch.bfloat16])
@pytest.mark.parametrize("reduce", [None, torch.float32, torch.bfloat16])
def test_accumulated_gradients_arrive_in_the_dtype_of_the_shard(
    reduce: torch.dtype | None, grad: torch.dtype | None, world_size: int
) -> None:
    group, device = _group(world_size, MixedPrecisionPolicy(grad, reduce))
    group.bind()
    _leave_gradients(group, device, grad or torch.float32)
    group.accumulate()
    group.reduce(group.collect(all_reduce=True, fill=True), all_reduce=True)
    for param in group.params:
        assert param.gradient.dtype is param.dtype is torch.float32
    assert device.races == []
