"""Convolutions in ``channels_last``: strides are kept through shard, gather and gradient."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2.optim import FlatOptimizer
from tests.common.errors import raises
from tests.common.looped import coalescing
from tests.common.workers import ranks

LAST = torch.channels_last


class Net(nn.Module):
    """Convolutions whose rows ranks share evenly, unevenly and not at all; one of 1 x 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.blocks = nn.ModuleList([nn.Conv2d(8, 5, 3, padding=1), nn.Conv2d(5, 1, 3, padding=1)])
        self.point = nn.Conv2d(1, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.depthwise(self.first(x).relu())
        for block in self.blocks:
            x = block(x).relu()
        out: torch.Tensor = self.head(self.point(x).mean((2, 3)))
        return out


def _pair(**options: Any) -> tuple[Net, Any]:
    """(unsharded, sharded)"""
    torch.manual_seed(0)
    model = Net().to(memory_format=LAST)
    reference = copy.deepcopy(model)
    for block in model.blocks:
        fsdp2.fully_shard(block, **options)
    return reference, fsdp2.fully_shard(model, **options)


def _batch(step: int) -> torch.Tensor:
    """The same on every rank, so that the mean over them is what each has, to the bit."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 3, 6, 6, generator=generator).to(memory_format=LAST)


def _assert_equal(reference: nn.Module, model: nn.Module, gradients: bool = False) -> None:
    for (name, whole), param in zip(reference.named_parameters(), model.parameters(), strict=True):
        expected, found = (whole.grad, param.grad) if gradients else (whole, param)
        assert isinstance(found, DTensor), name
        assert expected is not None
        assert torch.equal(found.full_tensor(), expected), name
        assert found.to_local().stride() == param.to_local().stride(), name  # type: ignore[attr-defined]


@ranks(1, 2, extended=[4])
@pytest.mark.parametrize("reshard", [True, False])
def test_training(reshard: bool) -> None:
    reference, model = _pair(reshard_after_forward=reshard)
    local = model.first.weight.to_local()
    assert local.is_contiguous(memory_format=LAST)
    assert not local.is_contiguous()
    seen: list[bool] = []
    model.first.register_forward_pre_hook(
        lambda module, _: seen.append(module.weight.is_contiguous(memory_format=LAST))
    )
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (reference, model)]
    for step in range(3):
        for each in (reference, model):
            each(_batch(step)).square().sum().backward()
        _assert_equal(reference, model, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _assert_equal(reference, model)
    assert seen == [True] * 3


@ranks(2)
def test_gradients_in_other_ways() -> None:
    for kind in ("accumulated", "coalesced", "kept", "flat", "added", "hsdp"):
        print("kind:", kind)  # in the report of a failure
        _train_in_another_way(kind)


def _train_in_another_way(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s")) if kind == "hsdp" else None
    # Coalesced, gradients are the reduction's inputs as they are: nothing is copied.
    with coalescing() if kind == "coalesced" else nullcontext():
        reference, model = _pair(mesh=mesh)
    found = {way for r in fsdp2.report(model).groups for way in r.transport.split("+")}
    assert ("coalesced" in found) is (kind == "coalesced")
    if kind == "kept":
        model.set_tuning(keep_gradients=True)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    ours: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "flat":
        ours = FlatOptimizer(model, torch.optim.AdamW, lr=1e-2)
    for step in range(2):
        for micro in range(2):
            if kind == "accumulated":
                model.set_requires_gradient_sync(micro == 1)
            for each in (reference, model):
                each(_batch(2 * step + micro)).square().sum().backward()
        _assert_equal(reference, model, gradients=True)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
        _assert_equal(reference, model)


@ranks(2)
@pytest.mark.parametrize("coalesced", [True, False])
def test_mixed_precision(coalesced: bool) -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with coalescing() if coalesced else nullcontext():
        reference, model = _pair(mp_policy=policy)
    reference.to(torch.bfloat16)
    for each in (reference, model):
        each(_batch(0).bfloat16()).float().square().sum().backward()
    for whole, param in zip(reference.parameters(), model.parameters(), strict=True):
        assert whole.grad is not None
        assert torch.equal(param.grad.full_tensor(), whole.grad.float())


@ranks(4)
def test_a_smaller_group_after_forward() -> None:
    reference, model = _pair(reshard_after_forward=2)
    for each in (reference, model):
        each(_batch(0)).square().sum().backward()
    _assert_equal(reference, model, gradients=True)


@ranks(2)
def test_state_dicts_meta_device_and_conversions() -> None:
    reference, model = _pair()
    options = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(model, options=options)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(whole[name], tensor), name
    with torch.device("meta"):
        empty: Any = Net().to(memory_format=LAST)
    fsdp2.fully_shard(empty)
    empty.to_empty(device="cpu")
    set_model_state_dict(empty, reference.state_dict(), options=options)
    _assert_equal(reference, empty)
    assert empty.first.weight.to_local().is_contiguous(memory_format=LAST)
    assert torch.equal(empty(_batch(0)), reference(_batch(0)))
    empty.to(memory_format=torch.contiguous_format).to(torch.float64)
    reference.to(torch.float64)
    assert torch.equal(empty(_batch(0).double()), reference(_batch(0).double()))


@ranks(2)
def test_other_dims_than_the_first_are_refused() -> None:
    model = nn.Conv2d(4, 4, 3).to(memory_format=LAST)
    with raises("non-contiguous-dim"):
        fsdp2.fully_shard(model, shard_placement_fn=lambda _: Shard(1))
    assert not isinstance(model.weight, DTensor)
    assert dist.get_world_size() == 2
