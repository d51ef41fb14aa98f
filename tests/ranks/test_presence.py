"""Ranks of one process group all run fsdp2, or those that do raise."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from fsdp2.checks import presence
from fsdp2.core.device import backends
from fsdp2.core.device import process_groups as asked
from fsdp2.interop import TORCHS_NAMES
from tests.common import backends as backends_of
from tests.common.errors import raises
from tests.common.workers import ranks

SHORT = timedelta(seconds=0.3)


def _mesh(timeout: timedelta | None = SHORT) -> DeviceMesh:
    """Over a new process group."""
    return DeviceMesh.from_group(dist.new_group([0, 1], timeout=timeout), "cpu")


def _replicas() -> DeviceMesh:
    """Of one rank each, over new process groups."""
    alone = [dist.new_group([rank], timeout=SHORT) for rank in range(2)]
    groups = [dist.new_group([0, 1], timeout=SHORT), alone[dist.get_rank()]]
    names = ("replicate", "shard")
    return DeviceMesh.from_group(groups, "cpu", mesh=[[0], [1]], mesh_dim_names=names)


@ranks(2)
def test_a_rank_of_torchs() -> None:
    """It would wait in the same collective, of the same sizes."""
    mesh = _mesh()
    if dist.get_rank() == 1:
        TORCHS_NAMES["fully_shard"](nn.Linear(4, 4), mesh=mesh)
    else:
        model = fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh)
        for _ in range(2):
            with raises("other-implementation"), pytest.warns(UserWarning, match="waits for ranks"):
                model(torch.ones(2, 4))
    dist.barrier()


@ranks(2)
def test_a_replica_of_torchs() -> None:
    """Forward gathers from nobody else here, and backward would sum with it."""
    mesh = _replicas()
    if dist.get_rank() == 1:
        model = fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh)
        with raises("other-implementation"), pytest.warns(UserWarning, match="ranks 0"):
            model(torch.ones(2, 4))
    dist.barrier()


@ranks(2)
def test_each_process_group_is_met_once() -> None:
    looks: list[int] = []
    waiting = presence._wait

    def wait(*args: Any) -> None:
        looks.append(1)
        waiting(*args)

    presence._wait = wait
    try:
        mesh = init_device_mesh("cpu", (2,))
        dist.barrier()
        asked._met.discard(mesh.get_group())
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fsdp2.fully_shard(model[0], mesh=mesh)
        fsdp2.fully_shard(model, mesh=mesh)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    finally:
        presence._wait = waiting
    assert len(looks) == 1


@ranks(2)
def test_ranks_whose_backends_differ() -> None:
    """One would gather packed, the other not: its environment has chosen another backend."""
    kind = "nccl2" if dist.get_rank() else "nccl-legacy"
    with mock.patch.dict(backends._KNOWN, {"ProcessGroupGloo": backends_of.known(kind)}):
        model = fsdp2.fully_shard(nn.Linear(4, 4), mesh=_mesh(None))
        with raises("backends-differ") as caught:
            model(torch.ones(2, 4))
    assert "nccl-legacy on rank 0, nccl2 on rank 1" in str(caught.value)
    dist.barrier()
