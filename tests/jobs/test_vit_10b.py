"""``python -m fsdp2.examples.vit_10b``: its size by hand, its memory, two ranks for real."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from fsdp2.examples import vit_10b
from fsdp2.examples.vit_10b import SIZES, construction, main, parse
from fsdp2.planning.presets import Model
from tests.common import jobs

pytestmark = pytest.mark.ranks

TINY = ("--size", "tiny", "--device", "cpu", "--nproc", "2")


def test_its_size_is_what_a_hand_computes() -> None:
    width, depth, classes, ranks = 5120, 32, 1000, 8
    # q, k, v and out are squares, up and down four each; two norms, and biases of up and down.
    block = 12 * width**2 + 9 * width
    root = 3 * 14**2 * width + width + 2 * width + width * classes
    assert depth * block + root == 10_075_950_080
    found = construction(parse(["--nproc", str(ranks), "--device", "cpu"], None))
    assert found == (4 * (depth * block + root) // ranks, 4 * block, 4 * root)


def test_two_ranks_train_as_one_process_does_and_hold_what_is_planned() -> None:
    argv = (*TINY, "--steps", "3", "--lr", "1e-3", "--seed", "7")
    job = jobs.Run(sys.executable, "-m", "fsdp2.examples.vit_10b", *argv)
    shape = SIZES["tiny"]
    torch.manual_seed(7)
    model = Model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = [
        vit_10b.train_step(model, optimizer, *vit_10b.images_and_labels(shape, 7, step, 4)).item()
        for step in range(3)
    ]
    code, out, err = job.finish()
    assert code == 0, err
    found = [float(loss) for loss in re.findall(r"^step \d/3  loss (\d\.\d{4}) ", out, re.M)]
    assert found == pytest.approx(expected, abs=1.01e-4)
    assert len(set(found)) == 3
    held = re.search(r"each rank holds (\S+ \S+), (\S+ \S+); 4 x shards are (\S+ \S+)\n", out)
    assert held is not None, out
    sizes = [float(size.split()[0]) for size in held.groups()]
    assert sizes[:2] == pytest.approx([sizes[2]] * 2, rel=0.01)


def test_wrong_usage_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        ("--nproc", "3", "--batch-size", "4"): "--batch-size 4 does not divide over 3 ranks",
        ("--image", "30"): "--image 30 is no multiple of a patch's 14 pixels",
    }
    for argv, says in wrong.items():
        assert main(argv) == 2
        assert says in capsys.readouterr().err
