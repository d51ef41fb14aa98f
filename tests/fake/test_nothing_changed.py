"""A sharding call that raises leaves the whole model as it was, through every entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.testing.null_group import init_null_group
from fsdp2.wrap import CustomPolicy
from tests.common.errors import raises
from tests.fake.test_errors import AT_FULLY_SHARD

OF_ARGUMENTS_THAT_A_POLICY_HAS_NOT = {
    "dims-type",
    "dims-unknown",
    "ignored-type",
    "not-replicated",
    "other-full-mesh",
    "plain-on-full-mesh",
}
NO_MODULES = {"not-a-module", "not-a-module-or-list", "empty-list", "listed-twice"}
OF_A_MODULE = [
    entry
    for entry in AT_FULLY_SHARD
    if entry not in {*NO_MODULES, *OF_ARGUMENTS_THAT_A_POLICY_HAS_NOT, "container"}
]
"""What is wrong with one module, or with what is chosen for it; a policy leaves containers out."""


@pytest.fixture
def sent() -> Iterator[list[str]]:
    """The collectives that were launched."""
    sent: list[str] = []
    init_null_group(4, observer=lambda name, _: sent.append(name))
    yield sent
    dist.destroy_process_group()


def _state(model: nn.Module) -> dict[str, Any]:
    """All that sharding changes: classes, what is registered, hooks, what modules keep, groups."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_backward_hooks")
    found: dict[str, Any] = {"groups": len(dist.distributed_c10d._world.pg_map)}
    for name, module in model.named_modules():
        kept = [(key, id(value)) for key, value in module._parameters.items()]
        kept += [(key, id(value)) for key, value in module._buffers.items()]
        marks = [sorted(p.__dict__) for p in module._parameters.values() if p is not None]
        own = [list(getattr(module, hook)) for hook in hooks]
        found[name] = (type(module), kept, marks, own, sorted(module.__dict__))
    return found


@pytest.mark.parametrize("entry", OF_A_MODULE)
def test_shard_model(entry: str, sent: list[str]) -> None:
    """The last unit but one is wrong: those before it stay as they are."""
    target, arguments = AT_FULLY_SHARD[entry]()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), target, nn.Linear(4, 4))
    before, units = _state(model), {model[0], model[1], model[3]}
    options = {key: value for key, value in arguments.items() if key != "ignored_params"}
    policy = CustomPolicy(lambda m: (options or True) if m is target else m in units)
    with raises(entry):
        fsdp2.shard_model(model, policy)
    assert _state(model) == before
    assert sent == []


@pytest.mark.parametrize("entry", OF_A_MODULE)
def test_a_list(entry: str, sent: list[str]) -> None:
    target, arguments = AT_FULLY_SHARD[entry]()
    modules = nn.ModuleList([nn.Linear(4, 4), target])
    before = _state(modules)
    with raises(entry):
        fsdp2.fully_shard(list(modules), **arguments)
    assert _state(modules) == before
    assert sent == []


NEW: dict[str, Callable[[], nn.Module]] = {
    entry: lambda entry=entry: AT_FULLY_SHARD[entry]()[0]
    for entry in (
        "scalar-parameter",
        "lazy-parameter",
        "sparse-parameter",
        "non-contiguous-parameter",
        "owner-gone",
        "renormalised",
        "shared-memory",
        "hooks-missing",
    )
}


@pytest.mark.parametrize("entry", NEW)
def test_shard_new_parameters(entry: str, sent: list[str]) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    fsdp2.fully_shard(model)
    model(torch.ones(1, 4))
    model.append(NEW[entry]())
    sent.clear()
    before = _state(model)
    with raises(entry):
        model.shard_new_parameters()
    assert _state(model) == before
    assert sent == []


class Head(nn.Module):
    """Has a weight of its own, and a module that is a unit: so it stays one by itself."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x @ self.weight)


def _tied() -> tuple[Any, set[nn.Module]]:
    """A model, and its units to be: the last has a parameter of the first."""
    first = nn.Linear(4, 4)
    head = Head(first.weight)
    return nn.Sequential(first, nn.Linear(4, 4), head), {first, head, head.inner}


def test_a_tie_of_two_units_to_be(sent: list[str]) -> None:
    """The second unit has a parameter of the first, which is not sharded when that is found."""
    model, units = _tied()
    before = _state(model)
    mixed = {"mp_policy": fsdp2.MixedPrecisionPolicy(torch.bfloat16)}
    policy = CustomPolicy(lambda m: mixed if m is model[0] else m in units)
    with raises("tied-dtypes"):
        fsdp2.shard_model(model, policy)
    assert _state(model) == before
    assert sent == []


def test_what_is_planned_together_is_what_single_calls_make(sent: list[str]) -> None:
    """Ties among units of one call, and parameters that are left for the model."""
    made = []
    for together in (True, False):
        model, units = _tied()
        if together:
            fsdp2.shard_model(model, CustomPolicy(lambda m, units=units: m in units))
        else:
            for module in (model[0], model[2].inner, model[2], model):
                fsdp2.fully_shard(module)
        model(torch.ones(1, 4)).sum().backward()
        made.append(fsdp2.group_reports(model))
    assert made[0] == made[1]
    assert len(made[0]) == 3
