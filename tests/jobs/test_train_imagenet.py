"""``fsdp2.examples.train_imagenet``: its schedule, its slices, a run that is resumed exactly."""

from __future__ import annotations

import importlib
import importlib.util
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2 import checkpoint, full_parameters
from fsdp2.examples import train_imagenet
from fsdp2.examples.flags import GivenRanks, UsageError
from fsdp2.examples.images import batches_of, shared_out
from fsdp2.examples.train_imagenet import Options, learning_rate, main, parse
from tests.common import jobs
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks

RANKS = GivenRanks(0, 2, 0, 2)
CLASSES = ("ant", "bee")

needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None or importlib.util.find_spec("PIL") is None,
    reason="torchvision has the models, pillow reads images: pip install -e '.[imagenet]'",
)
needs_digits = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn ships the images"
)


@pytest.fixture
def as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are checked before torchvision is imported: that it can be found is enough."""
    found: Callable[..., Any] = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return found("torch") if name == "torchvision" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def given(*argv: str) -> Options:
    return parse(["--datadir", "nowhere", "--device", "cpu", *argv], RANKS)


# --- flags, rates, slices ------------------------------------------------------------------------


@pytest.mark.usefixtures("as_if_installed")
def test_the_rate_rises_and_then_is_divided() -> None:
    flags = ("--lr", "0.4", "--num_warmup_epochs", "2", "--lr_scheduler_divisor", "10")
    options = given(*flags, "--lr_scheduler_divide_every_n_epochs", "3")
    steps = [(epoch, done) for epoch in range(8) for done in (0.5, 1.0)]
    found = [learning_rate(options, epoch, done) for epoch, done in steps]
    rises, whole, tenth, last = [0.1, 0.2, 0.3, 0.4], [0.4] * 2, [0.04] * 6, [0.004] * 4
    assert found == pytest.approx([*rises, *whole, *tenth, *last])
    at_once = replace(options, num_warmup_epochs=0)
    assert learning_rate(at_once, 0, 0.01) == 0.4


@pytest.mark.usefixtures("as_if_installed")
def test_ranks_take_slices_of_the_same_batches() -> None:
    options = given("--batch_size", "4")
    mine = [batches_of(options, 11, epoch=3, rank=rank) for rank in (0, 1)]
    assert [len(batch) for rank in mine for batch in rank] == [2] * 4
    taken = [index for rank in mine for batch in rank for index in batch]
    assert len(set(taken)) == 8  # the last three fill no batch
    assert set(taken) <= set(range(11))
    assert mine[0] == batches_of(options, 11, epoch=3, rank=0)
    assert mine[0] != batches_of(options, 11, epoch=4, rank=0)


@pytest.mark.parametrize(("images", "at_once", "num_ranks"), [(10, 3, 3), (7, 7, 2), (8, 2, 4)])
def test_an_evaluation_is_shared_out(images: int, at_once: int, num_ranks: int) -> None:
    each = [shared_out(images, at_once, rank, num_ranks) for rank in range(num_ranks)]
    assert len({len(forwards) for forwards in each}) == 1
    run = {i for forwards in each for chunk in forwards for i in chunk}
    assert sorted(run) == list(range(images))
    assert all(0 < len(chunk) <= at_once for forwards in each for chunk in forwards)


@pytest.mark.usefixtures("as_if_installed")
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "--datadir names the folder"),
        (["--datadir", "x", "--make-sample", "y"], "--datadir names the folder"),
        (["--datadir", "x", "--resume"], "--resume needs --checkpoint"),
        (["--datadir", "x", "--nproc", "2", "--batch_size", "3"], "does not divide over 2 ranks"),
        (["--datadir", "x", "--min_crop", "2"], "'2' is not a number from 0 to 1"),
        (["--datadir", "x", "--model", "alexnet"], "'alexnet'"),
        (["--datadir", "does/not/exist"], "does/not/exist/train cannot be read"),
        (["--make-sample", "."], ". is there already"),
    ],
)
def test_wrong_usage_is_one_sentence(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--make-sample" in argv[:1] and importlib.util.find_spec("sklearn") is None:
        says = "--make-sample needs scikit-learn"
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("as_if_installed")
def test_folders_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("train/ant", "train/bee", "val/ant"):
        (tmp_path / folder).mkdir(parents=True)
    assert main(["--datadir", str(tmp_path)]) == 2
    assert "2 classes in train and 1 in val" in capsys.readouterr().err
    (tmp_path / "val/bee").mkdir()
    saved = tmp_path / "saved" / "step-00000003"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    assert main(["--datadir", str(tmp_path), "--checkpoint", str(saved.parent)]) == 2
    assert "already holds a checkpoint: add --resume" in capsys.readouterr().err


# --- runs ----------------------------------------------------------------------------------------


def write_images(folder: Path, train: int = 6, val: int = 3, side: int = 40) -> None:
    """Random pictures of two classes, one reddish and one bluish."""
    image = importlib.import_module("PIL.Image")
    drawn = random.Random(0)
    for split, number in (("train", train), ("val", val)):
        for channel, kind in ((0, "ant"), (2, "bee")):
            (folder / split / kind).mkdir(parents=True)
            for index in range(number):
                pixels = bytearray(drawn.randrange(160) for _ in range(3 * side * side))
                pixels[channel::3] = bytes(drawn.randrange(96, 256) for _ in range(side * side))
                picture = image.frombytes("RGB", (side, side), bytes(pixels))
                picture.save(folder / split / kind / f"{index}.png")


def _options(folder: Path, *argv: str) -> Options:
    given = ["--datadir", str(folder / "images"), "--model", "resnet18", "--image_size", "32"]
    given += ["--batch_size", "4", "--test_set_batch_size", "2", "--num_workers", "0"]
    given += ["--num_warmup_epochs", "1", "--lr", "0.05", "--device", "cpu", *argv]
    rank = dist.get_rank()
    return parse(given, GivenRanks(rank, 2, rank, 2))


def _bits(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> tuple[train_imagenet.Result, dict[str, torch.Tensor]]:
    """A run's result, and all that it trained: whole parameters, momentum, buffers."""
    runs: list[train_imagenet.Run] = []
    resume = train_imagenet.resume

    def watched(options: Options, run: train_imagenet.Run) -> int:
        runs.append(run)
        return resume(options, run)

    monkeypatch.setattr(train_imagenet, "resume", watched)
    result = train_imagenet.train(options, torch.device("cpu"))
    monkeypatch.setattr(train_imagenet, "resume", resume)
    model, optimizer = runs[0].model, runs[0].optimizer
    found = {name: value.clone() for name, value in full_parameters(model)}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, param in model.named_parameters():
        found[f"{name}.momentum"] = optimizer.state[param]["momentum_buffer"].full_tensor()
    return result, found


@needs_torchvision
@ranks(2)
def test_a_run_is_resumed_exactly(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        write_images(tmp_path / "images")
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        saves = ("--checkpoint", str(tmp_path / "saved"))
        whole, expected = _bits(_options(tmp_path, "--num_epochs", "2"), patch)
        first, before = _bits(_options(tmp_path, "--num_epochs", "1", *saves), patch)
        assert checkpoint.steps(tmp_path / "saved") == [3]
        resumed = ("--resume", "--num_epochs", "2", *saves)
        result, found = _bits(_options(tmp_path, *resumed), patch)
    assert first.epochs == 1
    assert checkpoint.steps(tmp_path / "saved") == [3, 6]
    assert result == whole
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert not torch.equal(before["fc.weight"], found["fc.weight"])
    other = _options(tmp_path, *resumed, "--lr", "0.1")
    with pytest.raises(UsageError, match="of a run with another lr"):
        train_imagenet.train(other, torch.device("cpu"))


@needs_torchvision
@pytest.mark.extended
@ranks(2)
def test_each_way_learns_colours(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        write_images(tmp_path / "images", train=16, val=4)
    dist.barrier()
    losses = []
    for argv in (
        ("--strategy", "zero1", "--compute_dtype", "bfloat16"),
        ("--strategy", "zero1"),
        ("--strategy", "replicated", "--use_gradient_checkpointing"),
    ):
        given = ("--num_epochs", "10", "--batch_size", "8", "--lr", "0.002", *argv)
        result = train_imagenet.train(_options(tmp_path, *given), torch.device("cpu"))
        assert result.top5 == 1, argv
        losses.append(result.loss)
    assert losses[0] < 0.6  # of one of two colours, a guess has 0.69
    assert losses[1] == losses[2] < 0.6


@needs_torchvision
@needs_digits
@pytest.mark.extended
def test_the_sample_as_commands(tmp_path: Path) -> None:
    sample, saved = str(tmp_path / "sample"), str(tmp_path / "saved")

    def run(*argv: str) -> str:
        job = jobs.Run(sys.executable, "-m", "fsdp2.examples.train_imagenet", *argv)
        code, out, err = job.finish()
        assert code == 0, err
        return out

    assert "1,438 images to train on and 359 held out" in run("--make-sample", sample)
    argv = ["--datadir", sample, "--model", "resnet18", "--image_size", "16", "--no_flip"]
    argv += ["--min_crop", "0.7", "--batch_size", "64", "--num_warmup_epochs", "0", "--lr", "0.02"]
    argv += ["--test_set_batch_size", "90", "--eval_interval", "2", "--checkpoint", saved]
    first = run(*argv, "--num_epochs", "1")
    second = run(*argv, "--num_epochs", "6", "--resume")
    assert "resumed from" in second
    accuracies = [
        float(share) for out in (first, second) for share in re.findall(r"held out (\S+)%", out)
    ]
    assert len(accuracies) == 4  # of epochs 1, 2, 4 and 6
    assert accuracies[-1] > 80
