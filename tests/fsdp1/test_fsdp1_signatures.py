"""FSDP1's names against those of the installed torch, read by ``inspect``; and its rows in docs.

Every parameter of torch's is ours: in the same order, of the same kind, with the same default.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import fsdp2
from fsdp2 import fsdp1
from fsdp2.wrap.wrapper_module import WrapperModule

pytestmark = pytest.mark.alone

DOCS = Path(fsdp2.__file__).parents[1] / "docs" / "compat_fsdp1.md"

ENUMS = ["ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType"]
DATACLASSES = [
    "MixedPrecision",
    "CPUOffload",
    "StateDictConfig",
    "FullStateDictConfig",
    "LocalStateDictConfig",
    "ShardedStateDictConfig",
    "OptimStateDictConfig",
    "FullOptimStateDictConfig",
    "LocalOptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "StateDictSettings",
]
METHODS = [
    "__init__",
    "__getitem__",
    "apply",
    "check_is_root",
    "clip_grad_norm_",
    "forward",
    "fsdp_modules",
    "no_sync",
    "register_comm_hook",
    "summon_full_params",
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "get_state_dict_type",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "set_state_dict_type",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
    "state_dict_type",
]
FROM_MODULE = ["named_buffers", "named_parameters"]
"""torch's take anything, and pass it on to ``nn.Module``'s."""


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    signature = inspect.signature(inspect.unwrap(function))
    return [(p.name, p.kind, _comparable(p.default)) for p in signature.parameters.values()]


def _comparable(default: Any) -> Any:
    return default.name if isinstance(default, enum.Enum) else default


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_torchs_arguments(name: str) -> None:
    ours = getattr(fsdp1.FullyShardedDataParallel, name)
    assert _parameters(ours) == _parameters(getattr(torchs.FullyShardedDataParallel, name))
    for kind in (staticmethod, property):
        mine, theirs = (
            isinstance(inspect.getattr_static(api.FullyShardedDataParallel, name), kind)
            for api in (fsdp1, torchs)
        )
        assert mine == theirs, kind


def test_methods_of_modules_take_their_arguments() -> None:
    for name in FROM_MODULE:
        ours = getattr(fsdp1.FullyShardedDataParallel, name)
        assert _parameters(ours) == _parameters(getattr(nn.Module, name)), name
    for api in (fsdp1, torchs):
        assert isinstance(vars(api.FullyShardedDataParallel)["module"], property)


def test_every_public_method_of_torchs_is_ours() -> None:
    own = {**vars(WrapperModule), **vars(fsdp1.FullyShardedDataParallel)}
    missing = {
        name
        for name in vars(torchs.FullyShardedDataParallel)
        if not name.startswith("_") and name not in own
    }
    assert missing == set()


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_torchs_members(name: str) -> None:
    ours, theirs = getattr(fsdp1, name), getattr(torchs, name)
    assert [(m.name, m.value) for m in ours] == [(m.name, m.value) for m in theirs]
    assert list(ours) == list(theirs)
    assert list(theirs) == list(ours)
    assert [hash(member) for member in ours] == [hash(member) for member in theirs]


@pytest.mark.parametrize("name", DATACLASSES)
def test_dataclasses_have_torchs_fields(name: str) -> None:
    ours, theirs = (
        [(field.name, field.default) for field in dataclasses.fields(getattr(api, name))]
        for api in (fsdp1, torchs)
    )
    assert ours == theirs
    assert _parameters(getattr(fsdp1, name)) == _parameters(getattr(torchs, name))


def test_the_scaler_takes_torchs_arguments() -> None:
    assert _parameters(fsdp1.ShardedGradScaler) == _parameters(ShardedGradScaler)
    for name in ("scale", "unscale_", "update", "step"):
        ours = getattr(fsdp1.ShardedGradScaler, name)
        assert _parameters(ours) == _parameters(getattr(ShardedGradScaler, name))


# ---- the page


def _rows() -> set[str]:
    return set(re.findall(r"^\| `([^`]+)`", DOCS.read_text(encoding="utf-8"), re.MULTILINE))


def test_the_page_has_a_row_for_every_argument() -> None:
    rows = _rows()
    wrapper = fsdp1.FullyShardedDataParallel
    named = {p for p, _, _ in _parameters(wrapper.__init__)[1:]}  # type: ignore[misc]
    assert named <= rows
    assert {*METHODS[2:], *FROM_MODULE, "module"} <= {row.partition("(")[0] for row in rows}
    fields = {field.name for field in dataclasses.fields(fsdp1.MixedPrecision)}
    assert {f"MixedPrecision.{field}" for field in fields} <= rows
    members = {f"{name}.{member.name}" for name in ENUMS for member in getattr(fsdp1, name)}
    assert members <= rows


def test_the_pages_tests_exist() -> None:
    tests = Path(__file__).parents[1]
    found = re.findall(r"`([\w/]+\.py)::(\w+)`", DOCS.read_text(encoding="utf-8"))
    assert len(found) >= 40
    for path, name in set(found):
        assert f"def {name}(" in (tests / path).read_text(encoding="utf-8"), (path, name)
