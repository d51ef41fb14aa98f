"""Modules changed after `fully_shard`: parameters deleted, moved, renamed, parametrized, pruned.

Each change happens to an unsharded model as well, whose state dict and outputs are the right ones.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

import fsdp2
from fsdp2 import fully_shard
from tests.common import parity
from tests.common.combinations import each_once
from tests.common.errors import raises
from tests.common.models import DIM
from tests.common.workers import ranks

Change = Callable[[Any], object]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Listed(nn.Module):
    """A linear layer, and matrices in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.matrices = nn.ParameterList(torch.randn(DIM, DIM) / 4 for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        return x


def build(before: Change) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), Listed())
    before(model[1])
    return model


def _nothing(_: Any) -> None: ...


def _parametrize(layer: Any) -> None:
    register_parametrization(layer.linear, "weight", Doubled())


def _unparametrize(layer: Any) -> None:
    remove_parametrizations(layer.linear, "weight", leave_parametrized=False)


def _unparametrize_and_leave(layer: Any) -> None:
    remove_parametrizations(layer.linear, "weight", leave_parametrized=True)


def _new_list(layer: Any) -> None:
    layer.matrices = nn.ParameterList(layer.matrices)


def _shorter_list(layer: Any) -> None:
    layer.matrices = nn.ParameterList([layer.matrices[1]])


def _new_module(layer: Any) -> None:
    """Adapters do this when they are removed."""
    linear = nn.Linear(DIM, DIM)
    linear.weight, linear.bias = layer.linear.weight, layer.linear.bias
    layer.linear = linear


def _bias_to_none(layer: Any) -> None:
    layer.linear.bias = None


def _bias_to_buffer(layer: Any) -> None:
    del layer.linear.bias
    layer.linear.register_buffer("bias", torch.ones(DIM))


def _rename(layer: Any) -> None:
    weight = layer.linear.weight
    del layer.linear.weight
    layer.linear.renamed = weight
    layer.linear.forward = lambda x: x @ layer.linear.renamed.t() + layer.linear.bias


def _none_and_back(layer: Any) -> None:
    bias = layer.linear.bias
    layer.linear.bias = None
    layer.linear.bias = bias


def _prune(layer: Any) -> None:
    prune.l1_unstructured(layer.linear, "weight", 0.5)


def _prune_by_identity(layer: Any) -> None:
    prune.identity(layer.linear, "weight")


def _prune_by_mask(layer: Any) -> None:
    prune.custom_from_mask(layer.linear, "weight", torch.eye(DIM))


def _unprune(layer: Any) -> None:
    prune.remove(layer.linear, "weight")


def _spectral_norm(layer: Any) -> None:
    torch.nn.utils.spectral_norm(layer.linear)


ANYWHERE: dict[str, tuple[Change, Change]] = {
    "a new list": (_nothing, _new_list),
    "a shorter list": (_nothing, _shorter_list),
    "a new module": (_nothing, _new_module),
    "None": (_nothing, _bias_to_none),
    "None and back": (_nothing, _none_and_back),
    "a buffer": (_nothing, _bias_to_buffer),
    "another name": (_nothing, _rename),
    "parametrized": (_nothing, _parametrize),
    "parametrization removed": (_parametrize, _unparametrize),
}
"""What is done before sharding, and after."""

GATHERED: dict[str, tuple[Change, Change]] = {
    "parametrization left": (_parametrize, _unparametrize_and_leave),
    "pruned": (_nothing, _prune),
    "pruned by identity": (_nothing, _prune_by_identity),
    "pruned by a mask": (_nothing, _prune_by_mask),
    "pruning removed": (_prune_by_mask, _unprune),
    "normalised": (_nothing, _spectral_norm),
}
"""What reads or writes values, and therefore needs `fsdp2.gathered`."""


def _train(model: Any, change: Change, first: bool) -> list[Tensor]:
    """Outputs of steps, the first of them before the change if ``first``."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        if step == (1 if first else 0):
            torch.manual_seed(1)
            change(model)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(2)
        output = model(torch.randn(3, DIM))
        output.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(output.detach())
    return found


def _shard(model: Any, inner: bool) -> None:
    if inner:
        fully_shard(model[1].linear)
    fully_shard(model[1])
    fully_shard(model)


def check(before: Change, change: Change, inner: bool, first: bool, whole: bool) -> None:
    plain, model = build(before), build(before)
    _shard(model, inner)

    def changed(each: Any) -> None:
        with fsdp2.gathered(each) if each is model and whole else contextlib.nullcontext():
            change(each[1])

    outputs = [_train(each, changed, first) for each in (plain, model)]
    for mine, right in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(mine, right)
    model.reshard()
    assert list(model.state_dict()) == list(plain.state_dict())
    parity.assert_close(parity.full_params(model), dict(plain.named_parameters()), parity.FP32)


@ranks(2)
@each_once(
    case=[case for case in ANYWHERE if "new module" not in case],
    inner={"unit": True, "in a unit": False},
    first={"after a step": True, "at once": False},
    whole={"sharded": False, "gathered": True},
)
def test_as_on_the_unsharded_model(case: str, inner: bool, first: bool, whole: bool) -> None:
    check(*ANYWHERE[case], inner, first, whole)


@ranks(2)
@each_once(
    case=list(GATHERED),
    inner={"unit": True, "in a unit": False},
    first={"after a step": True, "at once": False},
)
def test_what_needs_values(case: str, inner: bool, first: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, on the older of two ways
        check(*GATHERED[case], inner, first, whole=True)


@ranks(2)
@pytest.mark.parametrize("first", [True, False], ids=["after a step", "at once"])
def test_a_module_that_is_replaced(first: bool) -> None:
    """A unit around it goes on with the same parameters; a unit that it was itself is gone."""
    check(*ANYWHERE["a new module"], inner=False, first=first, whole=False)
    with raises("unit-gone"):
        check(*ANYWHERE["a new module"], inner=True, first=first, whole=False)


@ranks(2)
def test_classes_after_a_parametrization_is_removed() -> None:
    """As if it had never been parametrized."""
    layer = nn.Linear(DIM, DIM)
    for name in ("weight", "bias"):
        register_parametrization(layer, name, Doubled())
    fully_shard(layer)
    assert isinstance(layer, fsdp2.FSDPModule)
    assert type(layer).__name__ == "FSDPParametrizedLinear"
    for name in ("bias", "weight"):
        remove_parametrizations(layer, name, leave_parametrized=False)
    assert type(layer) is type(fully_shard(nn.Linear(DIM, DIM)))
    layer(torch.ones(1, DIM)).sum().backward()
