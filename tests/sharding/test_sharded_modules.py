"""What a sharded module is: its class, its names, how often it communicates.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from torch import nn

import fsdp2
from fsdp2 import FSDPModule, fully_shard
from tests.common import models, parity
from tests.common.running import (
    mlp,
)
from tests.common.workers import ranks


@ranks(2)
def test_classes_and_names() -> None:
    """A sharded module is still what it was, and an FSDPModule; torch's own names fit."""
    model = mlp()
    before = [name for name, _ in model.named_parameters()]
    parity.shard(parity.OURS, model)
    assert isinstance(model, models.MLP)
    assert isinstance(model, FSDPModule)
    assert isinstance(model.layers[0], nn.Linear)
    assert isinstance(model.layers[0], FSDPModule)
    assert type(model).__name__ == "FSDPMLP"
    assert [name for name, _ in model.named_parameters()] == before
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())
    for name in ("OffloadPolicy", "MixedPrecisionPolicy"):
        assert hasattr(fsdp2, name)
    assert fully_shard(
        nn.Linear(2, 2), mesh=parity.world_mesh(), offload_policy=fsdp2.OffloadPolicy()
    )


@ranks(2)
def test_fully_shard_returns_the_module() -> None:
    linear = nn.Linear(models.DIM, models.DIM)
    assert fully_shard(linear, mesh=parity.world_mesh()) is linear
    pair = [nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM)]
    assert fully_shard(pair, mesh=parity.world_mesh()) == pair
