"""`shard_model`: what becomes a unit, what is left alone, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import FSDPModule, shard_model
from fsdp2.core.modules.registry import require_record
from fsdp2.testing.null_group import init_null_group
from fsdp2.wrap import CustomPolicy
from tests.common.errors import raises

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    init_null_group(4)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Tied(nn.Module):
    """An embedding and its head in different blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(nn.Embedding(8, 4))
        self.middle = Block(nn.Linear(4, 4))
        self.last = Block(nn.Linear(4, 8, bias=False))
        self.last.inner.weight = self.first.inner.weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)) * self.scale)


def test_tied_modules_of_different_blocks_are_one_unit() -> None:
    model = Tied()
    report = shard_model(model, {Block})
    assert model.first.inner.weight is model.last.inner.weight
    assert {g.name: g.num_params for g in report.groups} == {
        "first.inner, last.inner": 1,
        "first": 2,
        "middle": 4,
        "last": 2,
        "(root)": 1,
    }
    assert str(report) == str(fsdp2.report(model))


def test_a_tie_that_the_model_itself_registers_is_shared() -> None:
    model = Tied()
    model.first.norm.weight = model.scale
    report = shard_model(model, {Block})
    assert "(root), first" not in [group.name for group in report.groups]
    assert isinstance(model.scale, DTensor)
    assert model.scale is model.first.norm.weight


@pytest.mark.parametrize("how", ["names", "objects"])
def test_ignored(how: str) -> None:
    model = Tied()
    modules: Any = ["middle", "scale"] if how == "names" else [model.middle, model.scale]
    report = shard_model(model, {Block}, ignored=modules)
    left = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    assert left == {"scale", *(f"middle.{name}" for name, _ in model.middle.named_parameters())}
    assert set(report.left) == left
    model.first.unshard()  # type: ignore[operator]  # an FSDPModule
    assert fsdp2.report(model) == report
    assert not isinstance(model.middle, FSDPModule)
    assert "in no unit: scale, middle.inner.weight" in str(report)


def test_options_of_a_module() -> None:
    def choose(module: nn.Module) -> Any:
        if isinstance(module, nn.Embedding):
            return {"reshard_after_forward": False}
        return isinstance(module, nn.Linear)

    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    offload = fsdp2.CPUOffloadPolicy(pin_memory=False)
    report = shard_model(model, CustomPolicy(choose), mp_policy=policy, offload_policy=offload)
    frees = {group.name: group.reshard_after_forward for group in report.groups}
    assert frees == {"0": False, "1": True, "(root)": False}
    assert {(group.mp_policy, group.offloaded) for group in report.groups} == {(policy, True)}
    assert ", offloaded" in str(report)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_strategy_is_settings(strategy: Any) -> None:
    model = Tied()
    report = shard_model(model, {Block}, strategy=strategy)
    assert isinstance(model.middle, FSDPModule)
    (middle,) = [group for group in report.groups if group.name == "middle"]
    assert middle.ranks == 4
    assert middle.reshard_after_forward is (strategy == "zero3")
    assert {group.reshard_after_backward for group in report.groups} == {strategy != "zero1"}
    freed = {"zero1": "no pass", "zero2": "backward", "zero3": "forward, backward"}
    assert f"  {freed[strategy]}  " in str(report)


def test_misuse(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wrong = Tied(), "zero4"
    with raises("strategy"):
        shard_model(model, {Block}, strategy=wrong)  # type: ignore[arg-type]
    for unknown in ("nothing", nn.Linear(1, 1), nn.Parameter(torch.ones(1))):
        with raises("ignored-unknown"):
            shard_model(model, {Block}, ignored=[unknown])
    with raises("ignored-model"):
        shard_model(model, {Block}, ignored=[model])
    mesh = init_device_mesh("cpu", (4,))
    for strategy in ("hybrid", "replicated"):
        with raises("strategy-mesh"):
            shard_model(model, {Block}, strategy=strategy, mesh=mesh)  # type: ignore[arg-type]
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for strategy in ("zero3", "replicated"):
        with raises("strategy-mesh"):
            shard_model(model, {Block}, strategy=strategy, mesh=two)  # type: ignore[arg-type]
    for size in (None, "3", "x"):
        if size is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
        with raises("local-world-size"):
            shard_model(model, {Block}, strategy="hybrid")
    policy = CustomPolicy(lambda m: {"sharding": 1} if isinstance(m, Block) else False)
    with raises("policy-option"):
        shard_model(model, policy)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


class Scale(nn.Module):
    """One parameter, on a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def test_deferred_takes_a_modules_own_options() -> None:
    """As `shard_model` does: what `CustomPolicy` gives a module comes before the call's own."""
    policy = fsdp2.wrap.CustomPolicy(
        lambda module: (
            {"reshard_after_forward": False}
            if isinstance(module, Scale)
            else isinstance(module, nn.Linear)
        )
    )
    with fsdp2.wrap.deferred(None, policy, reshard_after_forward=True):
        model = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 4))
    for module in (model[0], model[2]):
        assert require_record(module).unit.frees_after_forward
    assert not require_record(model[1]).unit.frees_after_forward
