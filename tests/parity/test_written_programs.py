"""Random programs that write weights by hand, evaluate, swap averages in and load checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parity import written as common_written

pytestmark = pytest.mark.ranks

EVALUATE = common_written.Statement("evaluate", "with torch.no_grad():\n    out(model(x(1)))")
TRAIN = common_written.Statement(
    "train",
    "loss(model(x(2))).backward()\nfinish(model)\noptimizer.step()\noptimizer.zero_grad()",
)


def _cases() -> list[Any]:
    """Seeds, ranks, whether units are resharded by hand, and whether forwards are cut by writes."""
    extended, exhaustive = pytest.mark.extended, pytest.mark.exhaustive
    runs: list[tuple[range, tuple[int, ...], bool, bool, Any]] = [
        (range(4), (2,), False, False, ()),
        (range(2), (3, 4), False, False, ()),
        (range(4), (2,), True, False, ()),
        (range(1000, 1006), (2, 3, 4), False, False, extended),
        (range(100, 106), (2, 3, 4), True, False, extended),
        (range(2000, 2005), (2, 4), False, True, extended),
        (range(4, 600), (2,), False, False, exhaustive),
        (range(2, 200), (3, 4), False, False, exhaustive),
    ]
    return [
        pytest.param(seeds, world, reshards, between, marks=marks)
        for seeds, worlds, reshards, between, marks in runs
        for world in worlds
    ]


@pytest.mark.parametrize(("seeds", "world", "reshards", "between"), _cases())
def test_programs(seeds: range, world: int, reshards: bool, between: bool) -> None:
    for seed in seeds:
        common_written.check(seed, world, reshards=reshards, between=between)


def test_a_lost_write_is_noticed() -> None:
    """A write that only the sharded model has stands for one that is lost."""
    wrong = common_written.Statement("write", "with torch.no_grad():\n    model.scale.mul_(2)", "")
    script = replace(common_written.written(0, 2), statements=(EVALUATE, TRAIN, wrong, TRAIN))
    found = common_written.failure_of(script)
    assert "3: train[0]: 15 of 15 elements differ" in found
    assert "model.scale.mul_(2)" in script.text()
    compile(script.text(), "program", "exec")


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
