"""A rank heals from its peer where shards are on the stand-in: pieces come through host memory."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch

import fsdp2
from fsdp2 import elastic
from fsdp2.core.layout.mesh import local_of
from fsdp2.testing.stand_in import device, group
from tests.accelerator import test_lanes as lanes
from tests.accelerator.test_offloaded_states import _step as step_of
from tests.common import parity, workers

TIME = datetime.timedelta(seconds=30)


def _seen(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Parameters and states by name, on the host, behind all that the device was asked for."""
    found = fsdp2.checkpoint.snapshot(model, optimizer)
    tensors = dict(found.model)
    assert found.optimizer is not None
    for name, entries in found.optimizer["state"].items():
        tensors |= {f"{name}.{key}": value for key, value in entries.items()}
    return {name: local_of(value).detach().cpu().clone() for name, value in tensors.items()}


@pytest.mark.parametrize("offload", [False, True])
@workers.ranks(2)
def test_the_same_bits_on_the_same_devices(offload: bool) -> None:
    """States come back on the device, or on the host, as they were; no lane is out of order."""
    mesh = lanes._mesh(device.NAME, group.COALESCING, (2,))
    models = [lanes._build(mesh, "usual") for _ in range(2)]
    optimizers = [
        fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, lr=1e-2, foreach=False, offload=offload)
        for model in models
    ]
    sends, joins = (
        elastic.ShardTransport(model, optimizer, host="localhost")
        for model, optimizer in zip(models, optimizers, strict=True)
    )
    device.races()
    for step in range(2):
        step_of(models[0], optimizers[0], mesh, step, clips=False)
    sends.send_checkpoint([1], 2, {"own": sends.state_dict()}, TIME)
    joins.load_state_dict(joins.recv_checkpoint(0, sends.metadata(), 2, TIME)["own"])
    sends.disallow_checkpoint()
    kinds = [
        {
            local_of(value).device.type
            for entries in optimizer.state.values()
            for key, value in entries.items()
            if key != "step"
        }
        for optimizer in optimizers
    ]
    assert kinds[0] == kinds[1] == {"cpu" if offload else device.NAME}
    for step in (2, 3):
        first, second = (_seen(*each) for each in zip(models, optimizers, strict=True))
        parity.assert_equal(second, first)
        for model, optimizer in zip(models, optimizers, strict=True):
            step_of(model, optimizer, mesh, step, clips=False)
    lanes._assert_ordered()
    for transport in (sends, joins):
        transport.shutdown()
