"""docs/compat_xla.md has a row for each name and argument of `fsdp2.xla`, and each names tests."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

import fsdp2.xla
from fsdp2.examples import train_digits, train_imagenet
from fsdp2.examples.flags import GivenRanks
from fsdp2.wrap.wrapper_module import WrapperModule
from fsdp2.xla import XlaFullyShardedDataParallel as Wrapper

pytestmark = pytest.mark.alone

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
    public = [name for kind in (Wrapper, WrapperModule) for name in vars(kind) if name[0] != "_"]
    wanted |= {f"XlaFullyShardedDataParallel.{name}" for name in public}
    rows = {row[0].strip("`") for row in ROWS}
    assert wanted <= rows
    assert {row for row in rows if re.fullmatch(r"[\w.]+(\(\w+\))?", row)} - wanted == {
        "XlaFullyShardedDataParallel.load_state_dict",
    }


def test_the_constructor_takes_what_the_document_names() -> None:
    assert set(inspect.signature(Wrapper).parameters) == set(DOCUMENT)


# ---- the commands that the document shows


@pytest.fixture
def as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are read before scikit-learn and torchvision are imported."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: name)


EIGHT = GivenRanks(0, 8, 0, 8)
"""The cores of one TPU v3."""


@pytest.mark.usefixtures("as_if_installed")
def test_the_command_of_digits() -> None:
    command = "--batch_size 16 --drop_last --num_epochs 2 --ckpt_prefix /tmp/mnist-fsdp/final_ckpt"
    more = "--nested --use_gradient_checkpointing --compute_dtype bfloat16"
    options = train_digits.parse(f"{command} {more}".split(), EIGHT)
    assert (options.batch_size, options.num_epochs, options.nested) == (16, 2, True)
    assert options.use_gradient_checkpointing
    assert options.dtype == torch.bfloat16


@pytest.mark.usefixtures("as_if_installed")
def test_the_command_of_imagenet() -> None:
    command = (
        "--datadir /datasets/imagenet-1k --drop_last --model resnet50 --test_set_batch_size 64 "
        "--eval_interval 10 --lr 0.4 --batch_size 128 --num_warmup_epochs 5 "
        "--lr_scheduler_divide_every_n_epochs 30 --lr_scheduler_divisor 10 --num_epochs 100"
    )
    more = "--use_gradient_checkpointing --compute_dtype bfloat16"
    options = train_imagenet.parse(f"{command} {more}".split(), EIGHT)
    assert options.datadir == Path("/datasets/imagenet-1k")
    assert (options.model, options.batch_size, options.test_set_batch_size) == ("resnet50", 128, 64)
    assert (options.num_epochs, options.eval_interval) == (100, 10)
    rates = [train_imagenet.learning_rate(options, epoch, 1.0) for epoch in (0, 4, 29, 30, 90)]
    assert rates == pytest.approx([0.08, 0.4, 0.4, 0.04, 0.0004])
    assert options.use_gradient_checkpointing
    assert options.dtype == torch.bfloat16


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("`"))
def test_each_row_names_a_test(row: list[str]) -> None:
    found = re.findall(r"`([\w/]+\.py)::(\w+)`", row[-1])
    assert len(row) == 3
    assert found
    for path, name in found:
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
