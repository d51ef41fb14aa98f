"""Where the first collective makes the communicator, it runs before the first gather."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from fsdp2.core.device import backends
from fsdp2.core.modules.registry import record_of
from fsdp2.core.schedule import connections
from fsdp2.core.schedule.group import ParamGroup
from tests.common.backends import pretended
from tests.common.workers import ranks

KIND = "ProcessGroupGloo"


@contextmanager
def _late() -> Iterator[list[str]]:
    """Gloo counts as a backend that connects late; what is connected and gathered, in order."""
    seen: list[str] = []
    labels: dict[object, str] = {}
    connecting, gathering = connections.run_first_collective, ParamGroup.start_unshard

    def connect(group: Any, device: torch.device) -> None:
        seen.append(",".join(map(str, dist.get_process_group_ranks(group))))
        labels[group] = seen[-1]
        connecting(group, device)

    def gather(group: ParamGroup) -> None:
        seen.append("gather")
        gathering(group)

    traits = replace(backends._KNOWN[KIND], connects_late=True)
    with (
        mock.patch.dict(backends._KNOWN, {KIND: traits}),
        mock.patch.object(connections, "run_first_collective", connect),
        mock.patch.object(ParamGroup, "start_unshard", gather),
    ):
        yield seen


def _model(mesh: DeviceMesh, **arguments: Any) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for module in (*model, model):
        fsdp2.fully_shard(module, mesh=mesh, **arguments)
    return model


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


def _connected(seen: list[str]) -> list[str]:
    """What was connected before the first gather; afterwards nothing was."""
    first = seen.index("gather")
    assert set(seen[first:]) == {"gather"}
    before = seen[:first]
    seen.clear()
    return before


def _forget(*groups: Any) -> None:
    """These have run no collective yet."""
    connections._connected.difference_update(groups)


def _grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@ranks(4)
def test_each_group_once_in_one_order() -> None:
    """Rank 0's groups are {0, 1} and {0, 2}, rank 1's {0, 1} and {1, 3}, and so on."""
    rank = dist.get_rank()
    shard, copies = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    with _late() as seen:
        mesh = _grid()
        _forget(*mesh.get_all_groups())
        model = _model(mesh)
        _step(model)
        names = sorted(",".join(map(str, each)) for each in (shard, copies))
        assert _connected(seen) == names
        _step(model)
        assert _connected(seen) == []
        assert record_of(model).scheduler.connected
        _step(_model(mesh))  # another root over the same groups
        assert _connected(seen) == []


@ranks(4)
def test_a_forward_without_backward_leaves_replicas_alone() -> None:
    """One replica may evaluate while the other does not: nothing here is between them."""
    rank = dist.get_rank()
    with _late() as seen:
        mesh = _grid()
        model = _model(mesh)
        _forget(*mesh.get_all_groups())
        if rank < 2:
            with torch.no_grad():
                model(torch.ones(2, 8))
            assert _connected(seen) == ["0,1"]
        dist.barrier()
        _step(model)
        copies = f"{rank % 2},{rank % 2 + 2}"
        assert _connected(seen) == ([copies] if rank < 2 else sorted(["2,3", copies]))


@ranks(4)
def test_groups_that_are_made_later_are_connected_by_the_next_forward() -> None:
    with _late() as seen:
        model = _model(init_device_mesh("cpu", (4,)))
        _step(model)
        seen.clear()
        model.set_separate_reduce_scatter_group()
        _step(model)
        assert _connected(seen) == ["0,1,2,3"]


@ranks(4)
def test_smaller_groups_are_connected_for_a_backward() -> None:
    half = dist.get_rank() // 2 * 2
    with _late() as seen:
        mesh = init_device_mesh("cpu", (4,))
        model = _model(mesh, reshard_after_forward=2)
        (group,) = record_of(model[0]).unit.own_groups
        _forget(mesh.get_group(), group.smaller_group.collectives.group)
        with torch.no_grad():
            model(torch.ones(2, 8))
        assert _connected(seen) == ["0,1,2,3"]
        _step(model)
        assert _connected(seen) == [f"{half},{half + 1}"]


@ranks(4)
def test_stages_with_groups_of_their_own() -> None:
    """As in a pipeline: the second stage begins when the first has sent, on other groups."""
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    rank = dist.get_rank()
    with _late() as seen:
        model = _model(stages["shard"])
        _forget(stages.get_group("shard"))
        x = torch.ones(2, 8)
        if rank >= 2:
            dist.recv(x, rank - 2)
        loss = model(x).sum()
        if rank < 2:
            dist.send(x, rank + 2)
        loss.backward()
        half = rank // 2 * 2
        assert _connected(seen) == [f"{half},{half + 1}"]


@ranks(2)
def test_gloo_is_not_connected() -> None:
    if pretended() in ("nccl-legacy", "nccl2"):
        return  # it is taken for another
    model = _model(init_device_mesh("cpu", (2,)))
    with mock.patch.object(connections, "run_first_collective", side_effect=AssertionError):
        _step(model)
    assert record_of(model).scheduler.connected
