"""``python -m fsdp2.examples.vit_10b``: its plan by hand and by the units; two ranks for real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fsdp2
from fsdp2.examples import vit_10b
from fsdp2.examples.vit_10b import SIZES, VisionTransformer, main, make_plan, shard_numel
from fsdp2.testing.null_group import null_world

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
KIB = 1024


def test_the_plan_of_128_ranks_is_what_a_hand_computes(capsys: pytest.CaptureFixture[str]) -> None:
    width, depth, classes, ranks = 5120, 32, 1000, 128
    # qkv, out, up and down hold 3 + 1 + 4 + 4 squares; their biases and two norms 9 + 4 rows.
    block = 12 * width**2 + 13 * width
    root = (3 * 14**2 + 1) * width + 16**2 * width + 2 * width + (width + 1) * classes
    assert depth * block + root == 10_077_917_160
    begin = time.perf_counter()
    plan = make_plan(SIZES["10b"], ranks)
    assert time.perf_counter() - begin < 5
    assert [unit.numel for unit in plan.units] == [block] * depth + [root]
    # All first dims but the head's 1000 classes are multiples of 128: 24 rows of padding.
    padding = 24 * (width + 1)
    shards = (4 * (depth * block + root + padding)) // ranks
    assert plan.total("shards") == plan.total("gradients") == shards
    assert plan.total("state") == 4 * shards
    assert plan.construction == shards + 4 * block + 4 * root
    assert plan.gathered == 2 * 4 * block + 4 * (root + padding)
    assert make_plan(SIZES["10b"], ranks, compute_bytes=2).gathered * 2 == plan.gathered

    assert main(["--plan"]) == 0
    said = capsys.readouterr().out
    row = re.search(r"^model +([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)", said, re.M)
    assert row is not None
    assert row[1] == "10,077,917,160"
    assert [float(cell) for cell in row.groups()[1:]] == [
        pytest.approx(factor * shards / 2**30, abs=1e-4) for factor in (1, 1, 2, 4)
    ]


@pytest.mark.parametrize("ranks", [6, 128, 1536])
def test_the_plan_says_what_the_units_hold(ranks: int) -> None:
    config = SIZES["1b"]
    plan = make_plan(config, ranks)
    with null_world(ranks):
        with torch.device("meta"):
            model = VisionTransformer(config)
        for block in model.blocks:
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(model)
        reports = {report.name: report for report in fsdp2.group_reports(model)}
    assert reports.keys() == {unit.name for unit in plan.units}
    for unit in plan.units:
        assert unit.numel == reports[unit.name].numel
        assert 0 <= reports[unit.name].shard_bytes - unit.shards < KIB
    if ranks == 1536:  # 1000 classes on dim 0 would pad more than half
        assert shard_numel((1000, 2048), ranks) == 2000


@pytest.mark.extended
def test_two_ranks_train_as_one_process_does_and_hold_what_is_planned() -> None:
    command = [sys.executable, "-m", "fsdp2.examples.vit_10b", "--size", "tiny", "--nproc", "2"]
    with subprocess.Popen(
        [*command, "--device", "cpu", "--steps", "3", "--lr", "1e-3", "--seed", "7"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        expected = _losses_of_one_process(seed=7, steps=3, lr=1e-3)  # meanwhile
        try:
            out, err = process.communicate(timeout=90)
        finally:
            process.kill()  # where it still runs; its workers leave with it
    assert process.returncode == 0, err
    found = [float(loss) for loss in re.findall(r"^step \d/3  loss (\d\.\d{4}) ", out, re.M)]
    assert found == pytest.approx(expected, abs=1.01e-4)
    assert len(set(found)) == 3

    plan = make_plan(SIZES["tiny"], 2)
    made, held = re.findall(r"^rank \d .*\n(?:rank \d .*\n?)", out, re.M)
    for line in made.splitlines():
        shards, block, root, bound, live, _ = (_bytes(cell) for cell in _cells(line))
        assert shards == pytest.approx(plan.total("shards"), abs=KIB)
        assert shards < live <= bound * 1.02
        assert bound == pytest.approx(plan.construction, rel=0.01) == shards + block + root
    for line in held.splitlines():
        planned, state, _ = _cells(line)
        assert planned == state


def test_wrong_usage_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        ("--world-size", "8"): "--world-size belongs to --plan",
        ("--nproc", "3", "--batch-size", "4"): "--batch-size 4 does not divide over 3 ranks",
        ("--image", "30"): "--image 30 is no multiple of a patch's 14 pixels",
    }
    for argv, says in wrong.items():
        with pytest.raises(SystemExit, match="2"):
            main(argv)
        assert says in capsys.readouterr().err


def _losses_of_one_process(seed: int, steps: int, lr: float) -> list[float]:
    config = SIZES["tiny"]
    torch.manual_seed(seed)
    model = VisionTransformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return [
        vit_10b.train_step(
            model, optimizer, *vit_10b.images_and_labels(config, seed, step, 4)
        ).item()
        for step in range(steps)
    ]


def _cells(line: str) -> list[str]:
    return re.findall(r"[\d.]+ [KMG]?i?B", line)


def _bytes(cell: str) -> float:
    number, unit = cell.split()
    return float(number) * {"B": 1, "KiB": KIB, "MiB": KIB**2, "GiB": KIB**3}[unit]
