"""Alike units share what is planned; each has its own where it differs. All by counts of calls.

On a null process group of 8 ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.core.layout import layout
from fsdp2.core.modules import registry
from fsdp2.core.modules.registry import records_below
from fsdp2.core.reduce import binding
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.testing.blocks import tiny_blocks
from fsdp2.testing.null_group import init_null_group, null_mesh

pytestmark = pytest.mark.alone

UNITS = 5
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    init_null_group(8)
    yield
    dist.destroy_process_group()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each plan was made."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        function: Callable[..., object] = getattr(owner, name)

        def counted(*args: object, **kwargs: object) -> object:
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(layout, "build_layout")
    count(binding, "lay_flat")
    count(binding, "plan_division")
    return calls


def _blocks(meta: bool = False) -> Any:
    with torch.device("meta" if meta else "cpu"):
        model = tiny_blocks(UNITS, 4)
    if not meta:
        model.reset_parameters()
    return model


def _shard(model: Any, **of_last: Any) -> None:
    for block in model.blocks:
        own = of_last if block is model.blocks[-1] else {}
        fsdp2.fully_shard(block, mesh=null_mesh(8), **own)
    fsdp2.fully_shard(model, mesh=null_mesh(8))


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 16)).sum().backward()


def _groups(model: nn.Module) -> list[ParamGroup]:
    return [group for record in records_below(model) for group in record.unit.own_groups]


def test_alike_units_are_planned_once(planned: Counter[str]) -> None:
    model = _blocks()
    _shard(model)
    _step(model)
    assert planned == {"build_layout": 1, "lay_flat": 1, "plan_division": 1}
    groups = _groups(model)
    assert len(groups) == UNITS
    assert len({id(group.layout) for group in groups}) == 1
    assert len({id(group.shard) for group in groups}) == UNITS  # memory is each one's own


def _frozen(model: Any) -> dict[str, Any]:
    model.blocks[-1].layers[1].weight.requires_grad_(False)
    return {}


def _tied(model: Any) -> dict[str, Any]:
    model.blocks[-1].layers[0].weight = model.blocks[0].layers[0].weight
    return {}


def _in_bf16(model: Any) -> dict[str, Any]:
    model.blocks[-1].to(BF16)
    return _mixed(model)  # and its inputs are


def _mixed(model: Any) -> dict[str, Any]:
    return {"mp_policy": fsdp2.MixedPrecisionPolicy(BF16, torch.float32, torch.float32)}


def _reduced_in_bf16(model: Any) -> dict[str, Any]:
    return {"mp_policy": fsdp2.MixedPrecisionPolicy(reduce_dtype=BF16)}


def _on_another_dim(model: Any) -> dict[str, Any]:
    return {"shard_placement_fn": lambda _: torch.distributed.tensor.Shard(1)}


@pytest.mark.parametrize(
    ("differs", "layouts", "flats", "divisions"),
    [
        (_frozen, 1, 2, 1),  # of fewer members
        (_tied, 2, 2, 2),
        (_in_bf16, 2, 2, 2),
        (_mixed, 2, 2, 2),
        (_reduced_in_bf16, 1, 2, 2),
        (_on_another_dim, 2, 2, 2),
    ],
)
def test_a_unit_that_differs_has_its_own(
    differs: Callable[[Any], dict[str, Any]],
    layouts: int,
    flats: int,
    divisions: int,
    planned: Counter[str],
) -> None:
    model = _blocks()
    _shard(model, **differs(model))
    _step(model)
    assert planned == {"build_layout": layouts, "lay_flat": flats, "plan_division": divisions}


def test_modules_are_walked_as_often_for_many_units_as_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: Counter[nn.Module] = Counter()
    plain = registry.records_below

    def counted(module: nn.Module, recurse: bool = True) -> object:
        looks[module] += 1
        return plain(module, recurse)

    model = _blocks()
    _shard(model)
    monkeypatch.setattr(registry, "records_below", counted)
    _step(model)
    assert set(looks) == {model}  # none of the blocks by itself
