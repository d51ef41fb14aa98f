"""Our public names against those of the installed torch's FSDP2, read by ``inspect``.

Whatever torch's version exports must be here, with the same parameters in the same order, of the
same kind and with the same defaults. What we have beyond that takes no position that torch may use.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp import _fully_shard as torch_package
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_common

import fsdp2

pytestmark = pytest.mark.alone

ROOT = Path(fsdp2.__file__).parents[1]

EXPORTED = sorted(torch_package.__all__)
INTERNAL = {
    name: module
    for module, names in (
        (_fsdp_api, ("Comm", "AllGather", "ReduceScatter")),
        (_fsdp_common, ("ShardPlacementResult", "FSDPMeshInfo")),
    )
    for name in names
    if hasattr(module, name)
}
"""Names that torch's users import from its private modules, for want of public ones."""

# The public names of torch 2.15, so that they are here under older versions of it too.
NAMES_OF_2_15 = re.findall(
    r"\w+",
    """
    CPUOffloadPolicy DataParallelMeshDims FSDPModule GradientReductionHandle
    MixedPrecisionPolicy OffloadPolicy UnshardHandle fully_shard register_fsdp_forward_method
    share_comm_ctx
""",
)
METHODS_OF_2_15 = re.findall(
    r"\w+",
    """
    finalize_backward reset_iter_state reshard set_all_reduce_hook
    set_allocate_memory_from_process_group_for_comm set_custom_all_gather
    set_custom_reduce_scatter set_force_sum_reduction_for_comms set_gradient_divide_factor
    set_is_last_backward set_keep_unsharded_storage set_manual_backward_finalization
    set_modules_to_backward_prefetch set_modules_to_forward_prefetch set_post_optim_event
    set_reduce_scatter_divide_factor set_reduce_scatter_max_input_buffers
    set_reduce_scatter_unused_params set_requires_all_reduce set_requires_gradient_sync
    set_reshard_after_backward set_reshard_after_forward set_separate_reduce_scatter_group
    set_symm_mem_for_comm set_unshard_in_backward unshard
""",
)


def _torchs(name: str) -> Any:
    return getattr(INTERNAL.get(name, torch_fsdp), name)


def _public_methods(cls: type) -> Iterator[str]:
    for name, value in vars(cls).items():
        if not name.startswith("_") and inspect.isfunction(value):
            yield name


def _unwrapped(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(inspect.unwrap(function))


def _default(value: Any) -> Any:
    """Policies are equal where they are called the same and hold the same."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        known = {name: held for name, held in fields.items() if held is not None}
        return type(value).__name__, known
    return value


def _assert_accepts(ours: inspect.Signature, torchs: inspect.Signature, where: str) -> None:
    """Every call that torch's signature allows, ours allows with the same meaning."""
    expected = list(torchs.parameters.values())
    for position, wanted in enumerate(expected):
        assert wanted.name in ours.parameters, f"{where}: no parameter '{wanted.name}'"
        found = ours.parameters[wanted.name]
        assert found.kind == wanted.kind, f"{where}: '{wanted.name}' is {found.kind.description}"
        assert _default(found.default) == _default(wanted.default), (
            f"{where}: '{wanted.name}' defaults to {found.default!r}, torch's to {wanted.default!r}"
        )
        if wanted.kind is not inspect.Parameter.KEYWORD_ONLY:
            assert list(ours.parameters)[position] == wanted.name, f"{where}: another order"
    for name, found in ours.parameters.items():
        if name not in torchs.parameters:
            assert found.default is not inspect.Parameter.empty, f"{where}: '{name}' is required"


@pytest.mark.parametrize("name", sorted({*EXPORTED, *INTERNAL, *NAMES_OF_2_15}))
def test_every_name_of_torchs_is_ours(name: str) -> None:
    assert name in fsdp2.__all__
    if name in (*EXPORTED, *INTERNAL):
        assert inspect.isclass(getattr(fsdp2, name)) == inspect.isclass(_torchs(name))


@pytest.mark.parametrize("name", METHODS_OF_2_15)
def test_every_method_of_torch_2_15_is_ours(name: str) -> None:
    assert callable(getattr(fsdp2.FSDPModule, name))


@pytest.mark.parametrize(
    "name", [name for name in [*EXPORTED, *INTERNAL] if inspect.isfunction(_torchs(name))]
)
def test_functions_take_the_same_arguments(name: str) -> None:
    _assert_accepts(_unwrapped(getattr(fsdp2, name)), _unwrapped(_torchs(name)), name)


@pytest.mark.parametrize("name", list(_public_methods(torch_fsdp.FSDPModule)))
def test_methods_take_the_same_arguments(name: str) -> None:
    ours, torchs = getattr(fsdp2.FSDPModule, name), getattr(torch_fsdp.FSDPModule, name)
    _assert_accepts(_unwrapped(ours), _unwrapped(torchs), name)


@pytest.mark.parametrize("name", ["UnshardHandle", "GradientReductionHandle"])
def test_handles_have_the_same_methods(name: str) -> None:
    if name not in EXPORTED:
        assert callable(getattr(fsdp2, name).wait)  # this torch has no such handle
        return
    for method in _public_methods(_torchs(name)):
        ours, torchs = getattr(getattr(fsdp2, name), method), getattr(_torchs(name), method)
        _assert_accepts(_unwrapped(ours), _unwrapped(torchs), f"{name}.{method}")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in [*EXPORTED, *INTERNAL]
        if dataclasses.is_dataclass(_torchs(name)) and name != "FSDPMeshInfo"
    ],
)
def test_policies_are_made_alike(name: str) -> None:
    _assert_accepts(_unwrapped(getattr(fsdp2, name)), _unwrapped(_torchs(name)), name)


@pytest.mark.parametrize("name", ["AllGather", "ReduceScatter"])
def test_custom_collectives_are_called_alike(name: str) -> None:
    for method in ("__call__", "allocate"):
        ours, torchs = getattr(getattr(fsdp2, name), method), getattr(_torchs(name), method)
        _assert_accepts(_unwrapped(ours), _unwrapped(torchs), f"{name}.{method}")
        assert getattr(ours, "__isabstractmethod__", False)


def _other(first: str, second: str) -> tuple[inspect.Signature, inspect.Signature]:
    scope: dict[str, Any] = {}
    exec(f"def a({first}): ...\ndef b({second}): ...", scope)
    return inspect.signature(scope["a"]), inspect.signature(scope["b"])


@pytest.mark.parametrize(
    ("ours", "torchs", "message"),
    [
        ("x", "x, y", "no parameter 'y'"),
        ("x, y=1", "x, y=2", "'y' defaults to 1"),
        ("y, x", "x, y", "another order"),
        ("x, *, y=1", "x, y=1", "'y' is keyword-only"),
        ("x, z", "x", "'z' is required"),
    ],
)
def test_differences_are_noticed(ours: str, torchs: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        _assert_accepts(*_other(ours, torchs), "f")


# ---- the page


def _rows() -> dict[str, str]:
    """docs/compat.md: name -> the test that shows it, as ``path::test``."""
    text = (ROOT / "docs" / "compat.md").read_text(encoding="utf-8")
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            rows[cells[0].strip("`")] = cells[2]
    return rows


def _expected_rows() -> set[str]:
    expected = {*NAMES_OF_2_15, *EXPORTED, *INTERNAL}
    methods = {*METHODS_OF_2_15, *_public_methods(torch_fsdp.FSDPModule)}
    expected |= {f"FSDPModule.{name}" for name in methods}
    for name in ("fully_shard", "MixedPrecisionPolicy", "CPUOffloadPolicy", "DataParallelMeshDims"):
        for argument in inspect.signature(inspect.unwrap(getattr(fsdp2, name))).parameters:
            expected.add(f"{name}({argument})")
    return expected


def test_every_public_name_has_a_row() -> None:
    assert _expected_rows() - set(_rows()) == set()


def test_every_row_names_tests_that_exist() -> None:
    missing = []
    for name, tests in _rows().items():
        found = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", tests)
        assert found, f"the row of {name} names no test"
        for path, test in found:
            file = ROOT / "tests" / path
            if not file.is_file() or (test and f"def {test}(" not in file.read_text("utf-8")):
                missing.append(f"{name}: {path}::{test}")
    assert missing == []
