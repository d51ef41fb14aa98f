"""``python -m fsdp2.examples.vit_10b``: its size by hand, its memory, two ranks for real."""

from __future__ import annotations

import io
import re
from contextlib import nullcontext, redirect_stdout
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp2.examples import vit_10b
from fsdp2.examples.flags import GivenRanks
from fsdp2.examples.vit_10b import SIZES, construction, main, parse
from fsdp2.planning.presets import Model
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks


def test_its_size_is_what_a_hand_computes() -> None:
    width, depth, classes, ranks = 5120, 32, 1000, 8
    # q, k, v and out are squares, up and down four each; two norms, and biases of up and down.
    block = 12 * width**2 + 9 * width
    root = 3 * 14**2 * width + width + 2 * width + width * classes
    assert depth * block + root == 10_075_950_080
    found = construction(parse(["--nproc", str(ranks), "--device", "cpu"], None))
    assert found == (4 * (depth * block + root) // ranks, 4 * block, 4 * root)


@ranks(2)
def test_two_ranks_train_as_one_process_does_and_hold_what_is_planned() -> None:
    rank = dist.get_rank()
    argv = ("--size", "tiny", "--device", "cpu", "--steps", "3", "--lr", "1e-3", "--seed", "7")
    here = nullcontext(torch.device("cpu"))
    printed = io.StringIO()
    with (
        mock.patch.object(vit_10b.launch, "process_group", return_value=here),
        redirect_stdout(printed),
    ):
        assert vit_10b.train(parse(argv, GivenRanks(rank, 2, rank, 2))) == 0
    out = printed.getvalue()
    if rank:
        assert out == ""
        return
    shape = SIZES["tiny"]
    torch.manual_seed(7)
    model = Model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = [
        vit_10b.train_step(model, optimizer, *vit_10b.images_and_labels(shape, 7, step, 4)).item()
        for step in range(3)
    ]
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
