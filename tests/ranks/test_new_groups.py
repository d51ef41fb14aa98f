"""Process groups that fsdp2 makes are like the one around, and made without the other ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.core.device.process_groups import new_groups, timeout_of
from fsdp2.core.modules.registry import record_of
from tests.common.workers import ranks

CPU = torch.device("cpu")
CHOSEN = timedelta(seconds=77)


def _mesh() -> DeviceMesh:
    """Over a group that is not of the default group's backend string, nor of its time-out."""
    everyone = list(range(dist.get_world_size()))
    group = dist.new_group(everyone, timeout=CHOSEN, backend="cpu:gloo")
    return DeviceMesh.from_group(group, "cpu")


def _check(group: Any) -> None:
    assert dist.get_backend(group) == "cpu:gloo"
    assert timeout_of(group, CPU) == CHOSEN.total_seconds()


@ranks(4)
def test_backend_and_time_out_are_those_of_the_group_around() -> None:
    assert dist.get_backend() == "gloo"
    model: Any = nn.Linear(8, 8)
    fsdp2.fully_shard(model, mesh=_mesh(), reshard_after_forward=2)
    model.set_separate_reduce_scatter_group()
    (group,) = record_of(model).unit.own_groups  # type: ignore[union-attr]
    assert group.reducers.group is not group.collectives.group
    for collectives in (group.reducers, group.smaller_group.collectives):
        _check(collectives.group)
    model(torch.ones(2, 8)).sum().backward()
    assert model.weight.grad is not None


@ranks(4)
@pytest.mark.parametrize("bound", [False, True])
def test_a_default_group_that_is_bound_is_not_split(bound: bool) -> None:
    """One pair makes a group while the other waits, which a split would take part in."""
    world, device, rank = dist.group.WORLD, torch.device("cuda", 0), dist.get_rank()
    assert world is not None
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    made = dist.new_group
    seen: list[object] = []

    def new_group(*args: Any, **kwargs: Any) -> Any:
        seen.append(world.bound_device_id)
        return made(*args, **kwargs)

    bound_to = device if bound else None
    try:
        for number, pair in enumerate(pairs):
            if rank // 2 == number:
                line = [2 * number, 2 * number + 1]
                world.bound_device_id = bound_to
                with mock.patch.object(dist, "new_group", new_group):
                    (group,) = new_groups([pair], CPU, [line])  # type: ignore[list-item]
                assert world.bound_device_id == bound_to
                world.bound_device_id = None  # gloo would run the barrier there
                x = torch.ones(1)
                dist.all_reduce(x, group=group)
                assert x.item() == 2
            dist.barrier()
        assert seen == [None]
        assert group.bound_device_id is None
    finally:
        world.bound_device_id = None
