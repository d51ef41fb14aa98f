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
from torch.distributed.tensor._dtensor_spec import DTensorSpec

import fsdp2
from fsdp2.core.device.buffers import FlatBuffer
from fsdp2.core.layout import layout, mesh
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
    count(binding, "plan_flat")
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
    assert planned == {"build_layout": 1, "plan_flat": 1, "plan_division": 1}
    groups = _groups(model)
    assert len(groups) == UNITS
    assert len({id(group.layout) for group in groups}) == 1
    assert len({id(group.shard) for group in groups}) == UNITS  # memory is each one's own


def test_plans_go_with_the_last_unit(planned: Counter[str]) -> None:
    for _ in range(2):
        model = _blocks()
        _shard(model)
        del model
    assert planned["build_layout"] == 2


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
    assert planned == {"build_layout": layouts, "plan_flat": flats, "plan_division": divisions}


def test_a_divide_factor_of_one_unit_is_its_own(planned: Counter[str]) -> None:
    model = _blocks()
    _shard(model)
    model.blocks[0].set_gradient_divide_factor(3.0)
    _step(model)
    assert planned == {"build_layout": 1, "plan_flat": 1, "plan_division": 2}


def test_a_packing_threshold_of_one_unit_is_its_own(planned: Counter[str]) -> None:
    model = _blocks()
    _shard(model)
    model.blocks[0].set_packing_threshold(0)
    _step(model)
    transports = [group.layout.transports for group in _groups(model) if group.layout]
    assert sorted(transports) == ["coalesced", *["packed"] * (UNITS - 1)]
    assert planned == {"build_layout": 2, "plan_flat": 2, "plan_division": 2}


def test_alike_parameters_have_one_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[DTensorSpec] = []

    def make(*args: Any, **kwargs: Any) -> DTensorSpec:
        made.append(DTensorSpec(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(mesh, "DTensorSpec", make)
    block = nn.ModuleList([*(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 8, bias=False)])
    block[2].to(BF16)
    fsdp2.fully_shard(nn.Sequential(*block), mesh=null_mesh(8))
    kinds = {(param.shape, param.dtype) for param in block.parameters()}
    assert len(kinds) == 5
    assert len(made) == len(kinds)


def test_no_rows_move_where_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _blocks(meta=True)
    _shard(model)
    moved: list[object] = []
    monkeypatch.setattr(FlatBuffer, "pieces", lambda *given: moved.append(given))
    model.set_packing_threshold(0)
    assert moved == []
    assert {group.layout.transports for group in _groups(model) if group.layout} == {"coalesced"}
    monkeypatch.undo()
    model.to_empty(device="cpu")
    model.reset_parameters()
    before = [param.to_local().clone() for param in model.parameters()]
    _step(model)
    after = [param.to_local() for param in model.parameters()]
    assert all(map(torch.equal, after, before))
    assert all(param.is_in_place for group in _groups(model) for param in group.params)


def test_a_threshold_that_packs_nothing_else_moves_nothing() -> None:
    model = _blocks()
    _shard(model)
    shards = [group.shard for group in _groups(model)]
    model.set_packing_threshold(1 << 20)  # all were packed before
    assert [group.shard for group in _groups(model)] == shards
    assert all(group.stale for group in _groups(model))


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
