"""Random programs that write weights by hand, evaluate, swap averages in and load checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.common import written as common_written

pytestmark = pytest.mark.ranks

EVALUATE = common_written.Statement("evaluate", "with torch.no_grad():\n    out(model(x(1)))")
TRAIN = common_written.Statement(
    "train",
    "loss(model(x(2))).backward()\nfinish(model)\noptimizer.step()\noptimizer.zero_grad()",
)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_programs(world: int) -> None:
    assert common_written.check_many(range(4 if world == 2 else 2), world).failed == {}


@pytest.mark.extended
@pytest.mark.parametrize("world", [2, 3, 4])
def test_other_programs(world: int) -> None:
    assert common_written.check_many(range(1000, 1006), world).failed == {}


@pytest.mark.extended
@pytest.mark.parametrize("world", [2, 4])
def test_writes_between_forward_and_backward(world: int) -> None:
    assert common_written.check_many(range(2000, 2005), world, between=True).failed == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world", "count"), [(2, 600), (3, 200), (4, 200)])
def test_a_thousand_programs(world: int, count: int) -> None:
    assert common_written.check_many(range(count), world).failed == {}


def test_programs_that_reshard_by_hand() -> None:
    """After each statement: so nothing depends on what stays unsharded."""
    assert common_written.check_many(range(4), 2, reshards=True).failed == {}


@pytest.mark.extended
@pytest.mark.parametrize("world", [2, 3, 4])
def test_more_programs_that_reshard_by_hand(world: int) -> None:
    assert common_written.check_many(range(100, 106), world, reshards=True).failed == {}


def test_a_failure_is_shown_as_the_smallest_program() -> None:
    """A write that only the sharded model has stands for one that is lost."""
    wrong = common_written.Statement("write", "with torch.no_grad():\n    model.scale.mul_(2)", "")
    script = common_written.written(0, 2)
    units = ((f"model.blocks[{len(script.blocks) - 1}]", False), ("model", True))
    script = replace(
        script, units=units, reshards=True, statements=(EVALUATE, TRAIN, wrong, TRAIN, EVALUATE)
    )
    found = common_written.failure_of(script)
    assert "3: train[0]: 15 of 15 elements differ" in found
    small = common_written.shrunk(script)
    assert small.statements == (wrong,)
    assert small.units == (("model", None),)
    assert small.text().splitlines()[-2:] == [
        "with torch.no_grad():  # the plain model: nothing",
        "    model.scale.mul_(2)",
    ]
    compile(small.text(), "program", "exec")


def test_what_is_no_failure() -> None:
    """A program that names what was left out, and one that is refused."""
    script = replace(common_written.written(1, 2), statements=(EVALUATE,), reshards=True)
    assert common_written.failure_of(script) == ""
    nothing = replace(script, statements=(common_written.Statement("swap", "ema[0]"),))
    assert common_written.failure_of(nothing) == "0: not a program: name 'ema' is not defined"
    clip = common_written.Statement(
        "write",
        "model.unshard()\nfsdp2.clip_grad_norm_(model.parameters(), 1.0)",
        "",
    )
    imported = common_written.Statement("import", "import fsdp2")
    refused = replace(script, statements=(imported, clip))
    assert common_written.failure_of(refused).startswith(
        "1: refused: 'scale' is a gathered parameter"
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--keep", "0"), "passes"),
        pytest.param((), '{"programs": 2, "ranks": 2, "failed": 0', marks=pytest.mark.extended),
    ],
)
def test_the_command(more: tuple[str, ...], said: str) -> None:
    """It runs chosen statements, and leaves no process behind."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.common.written", "--seeds", "0..1", "--reshard", *more]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run(
        command, cwd=root, env=environment, timeout=300, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert said in run.stdout
