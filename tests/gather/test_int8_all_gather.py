"""The int8 example: trains close to full precision, and sends a quarter of the bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.examples.int8_all_gather import Int8Gathered, gather_in_int8
from tests.common import parity
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks


def _blocks(quantised: bool, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
    if quantised:
        assert gather_in_int8(model) == 3
    for layer in model:
        fsdp2.fully_shard(layer)
    return fsdp2.fully_shard(model)


def _sent(model: nn.Module) -> int:
    """Elements that a rank puts into all-gathers: those of the collectives' inputs."""
    for _ in range(2):  # the first gather also compares what ranks send
        with parity.CountCollectives() as counted:
            model(torch.ones(2, 64))
        model.reshard()
        for layer in model:
            layer.reshard()
    return counted.elements["all_gather"] // (1 + dist.get_world_size())


@ranks(2, 4)
def test_a_quarter_of_the_bytes() -> None:
    full, int8 = _sent(_blocks(quantised=False)), _sent(_blocks(quantised=True))
    rows = 3 * 64 // dist.get_world_size()
    assert full == rows * 64  # in fp32
    assert int8 == rows * (64 + 4)  # bytes: codes, and a scale a row


def _losses(quantised: bool) -> list[float]:
    """Of 40 steps in which a model learns to imitate another one."""
    model = _blocks(quantised)
    teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        inputs = torch.randn(128, 64)
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@ranks(2)
def test_trains_close_to_full_precision() -> None:
    full, int8 = _losses(quantised=False), _losses(quantised=True)
    assert full[-1] < 0.2 * full[0]
    for a, b in zip(full, int8, strict=True):
        assert abs(a - b) < 0.02 * full[0]
    assert full != int8


@ranks(2)
def test_values_are_those_of_the_rows() -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 5)  # uneven
    layer = nn.Linear(5, 7)
    layer.weight = nn.Parameter(weight.clone())
    gather_in_int8(layer)
    fsdp2.fully_shard(layer, mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16))
    for _ in range(2):  # made, then filled again
        layer.unshard()
        gathered = layer.weight.detach()
        assert gathered.dtype is torch.bfloat16
        step = weight.abs().amax(1, keepdim=True) / 127
        assert ((gathered - weight).abs() <= step / 2 + weight.abs() / 128).all()
        layer.reshard()
    assert type(layer.weight.to_local()) is Int8Gathered


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_replaced_once(tied: bool) -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    if tied:
        model[3].weight = model[1].weight
    assert gather_in_int8(model) == (1 if tied else 2)
    assert (model[3].weight is model[1].weight) == tied
    assert isinstance(model[1].weight, Int8Gathered)
    assert type(model[0].weight) is nn.Parameter
