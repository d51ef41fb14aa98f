"""docs/compat_xla.md has a row for each name and argument of `fsdp2.xla`, and each names tests."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import fsdp2.xla
from fsdp2.xla import XlaFullyShardedDataParallel as Wrapper

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs" / "compat_xla.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith(("| name", "| there"))
]

DOCUMENT = (
    *("module", "reshard_after_forward", "flatten_parameters", "execute_sharding_on_init"),
    *("optimization_barrier_in_forward", "optimization_barrier_in_backward"),
    *("sync_on_finalization", "compute_dtype", "buffer_dtype", "fp32_reduce_scatter"),
    *("sharding_groups", "sharding_rank", "sharding_world_size", "shard_param_on_dim_0"),
    *("pin_layout_in_collective_ops", "reduce_scatter_bucket_size_mb"),
    *("coalesce_all_gather_ops", "disable_reshard_on_root", "auto_wrap_policy"),
    *("auto_wrapper_callable", "param_init_fn"),
)


def _arguments(name: str, function: object) -> list[str]:
    found = inspect.signature(function).parameters  # type: ignore[arg-type]
    return [f"{name}({argument})" for argument in found]


def test_every_name_and_argument_has_a_row() -> None:
    functions = [n for n in fsdp2.xla.__all__ if inspect.isfunction(getattr(fsdp2.xla, n))]
    wanted = set(fsdp2.xla.__all__)
    for name in functions:
        wanted |= {*_arguments(name, getattr(fsdp2.xla, name))}
    wanted |= {*_arguments("XlaFullyShardedDataParallel", Wrapper)}
    public = [name for name in vars(Wrapper) if not name.startswith("_")]
    wanted |= {f"XlaFullyShardedDataParallel.{name}" for name in public}
    rows = {row[0].strip("`") for row in ROWS}
    assert wanted <= rows
    assert {row for row in rows if re.fullmatch(r"[\w.]+(\(\w+\))?", row)} - wanted == {
        "XlaFullyShardedDataParallel.load_state_dict",
    }


def test_the_constructor_takes_what_the_document_names() -> None:
    assert set(inspect.signature(Wrapper).parameters) == set(DOCUMENT)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("`"))
def test_each_row_names_a_test(row: list[str]) -> None:
    found = re.findall(r"`([\w/]+\.py)::(\w+)`", row[-1])
    assert len(row) == 3
    assert found
    for path, name in found:
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
