"""What `fully_shard` makes of arguments and modules; misuses are in `test_misuses.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import FSDPModule, OffloadPolicy, fully_shard
from fsdp2.core.modules.registry import record_of
from fsdp2.testing.null_group import init_null_group, null_mesh
from tests.common import models, parity
from tests.common.errors import raises

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    init_null_group(4)
    yield null_mesh(4)
    dist.destroy_process_group()


def test_int_reshard_values() -> None:
    """The mesh's size means True, 1 means False."""
    fully_shard(nn.Linear(4, 4), reshard_after_forward=4, offload_policy=OffloadPolicy())
    freed = fully_shard(nn.Linear(4, 4), reshard_after_forward=4)
    freed(torch.randn(1, 4))
    kept = fully_shard(nn.Linear(4, 4), reshard_after_forward=1)
    kept(torch.randn(1, 4))
    assert isinstance(freed.weight, DTensor)
    assert not isinstance(kept.weight, DTensor)
    for size in (0, -1, 5, 8):
        with raises("reshard-size"):
            fully_shard(nn.Linear(4, 4), reshard_after_forward=size)


def test_ignored_and_attributes() -> None:
    model = nn.Linear(4, 4)
    model.weight.tag = "decay"
    fully_shard(model, ignored_params={model.bias})
    assert not isinstance(model.bias, DTensor)
    assert isinstance(model.weight, DTensor)
    assert model.weight.tag == "decay"
    model.unshard()
    assert model.weight.tag == "decay"


def test_plain_modules_have_no_fsdp_methods_but_may_register() -> None:
    plain = nn.Linear(4, 4)
    fsdp2.register_fsdp_forward_method(plain, "anything")  # a no-op, as documented
    assert "anything" not in plain.__dict__


def test_no_policy_means_the_default() -> None:
    """verl and NeMo pass on ``None`` where their users chose nothing."""
    model = fully_shard(nn.Linear(8, 8), mp_policy=None, offload_policy=None)
    (group,) = record_of(model).unit.own_groups  # type: ignore[union-attr]  # it is sharded
    assert group.options.precision == fsdp2.MixedPrecisionPolicy()
    assert group.offload is None
    assert model(torch.ones(2, 8)).dtype == torch.float32


def test_classes_and_names() -> None:
    """A sharded module is still what it was, and an FSDPModule; torch's own names fit."""
    model = models.MLP()
    before = [name for name, _ in model.named_parameters()]
    parity.shard(fsdp2, model, mesh=null_mesh(4))
    assert isinstance(model, models.MLP)
    assert isinstance(model, FSDPModule)
    assert isinstance(model.layers[0], nn.Linear)
    assert isinstance(model.layers[0], FSDPModule)
    assert type(model).__name__ == "FSDPMLP"
    assert [name for name, _ in model.named_parameters()] == before
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())


def test_fully_shard_returns_the_module() -> None:
    linear = nn.Linear(4, 4)
    assert fully_shard(linear) is linear
    pair = [nn.Linear(4, 4), nn.Linear(4, 4)]
    assert fully_shard(pair) == pair
