"""Modules changed after `fully_shard`: parameters deleted, moved, renamed, parametrized, pruned."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

import fsdp2
from fsdp2 import fully_shard
from tests.common.cases import in_turn
from tests.common.combinations import each_once
from tests.common.errors import raises
from tests.common.models import DIM
from tests.common.workers import ranks
from tests.ties.stories import Shard, as_without_sharding, train

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


def _unprune(layer: Any) -> None:
    prune.remove(layer.linear, "weight")


def _spectral_norm(layer: Any) -> None:
    torch.manual_seed(1)
    torch.nn.utils.spectral_norm(layer.linear)


ANYWHERE: dict[str, tuple[Change, Change]] = {
    "a new list": (_nothing, _new_list),
    "a shorter list": (_nothing, _shorter_list),
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
    "pruning removed": (_prune, _unprune),
    "normalised": (_nothing, _spectral_norm),
}
"""What reads or writes values, and therefore needs `fsdp2.gathered`."""

X = torch.randn(3, DIM, generator=torch.Generator().manual_seed(2))


def check(case: tuple[Change, Change], inner: bool, first: bool, whole: bool) -> None:
    """Trained after the change, and before it if ``first``; ``inner``: the layer is a unit."""
    before, change = case

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(DIM, DIM), Listed())
        before(model[1])
        return model

    def story(model: Any, shard: Shard) -> list[Tensor]:
        shard(*([model[1].linear] if inner else []), model[1], model)
        outputs = train(model, X) if first else []
        model.zero_grad()
        is_sharded = isinstance(model, fsdp2.FSDPModule)
        with fsdp2.gathered(model) if whole and is_sharded else contextlib.nullcontext():
            change(model[1])
        return [*outputs, *train(model, X, X)]

    as_without_sharding(make, story)


@ranks(2)
@each_once(
    inner={"unit": True, "in a unit": False},
    first={"after a step": True, "at once": False},
    whole={"sharded": False, "gathered": True},
)
def test_as_on_the_unsharded_model(inner: bool, first: bool, whole: bool) -> None:
    in_turn(ANYWHERE, partial(check, inner=inner, first=first, whole=whole))


@ranks(2)
@each_once(
    inner={"unit": True, "in a unit": False},
    first={"after a step": True, "at once": False},
)
def test_what_needs_values(inner: bool, first: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, on the older of two ways
        in_turn(GATHERED, partial(check, inner=inner, first=first, whole=True))


@ranks(2)
@pytest.mark.parametrize("first", [True, False], ids=["after a step", "at once"])
def test_a_module_that_is_replaced(first: bool) -> None:
    """A unit around it goes on with the same parameters; a unit that it was itself is gone."""
    kept: list[nn.Module] = []

    def replace(layer: Any) -> None:
        kept.extend([layer.linear] if first else [])  # gone from the model, if not from memory
        _new_module(layer)

    check((_nothing, replace), inner=False, first=first, whole=False)
    with raises("unit-gone"):
        check((_nothing, replace), inner=True, first=first, whole=False)


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
