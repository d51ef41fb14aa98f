"""``fsdp2.examples.train_digits``: it learns, and its joined files are what it has learned."""

from __future__ import annotations

import gzip
import importlib.util
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from fsdp2.examples import images, train_digits
from fsdp2.examples.flags import GivenRanks, UsageError
from tests.common import jobs
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks

RANKS = GivenRanks(0, 2, 0, 2)
WAYS = {
    "flat": ("--flat", "--compute_dtype", "bfloat16"),
    "nested": ("--nested", "--use_gradient_checkpointing"),
    "zero1": ("--strategy", "zero1", "--compute_dtype", "bfloat16"),
    "hybrid": ("--strategy", "hybrid"),
    "replicated": ("--strategy", "replicated"),
}


def write_mnist(folder: Path, zipped: bool, images: int = 90, side: int = 28) -> None:
    """Random images in MNIST's four files."""
    torch.manual_seed(0)
    for split in ("train", "t10k"):
        for kind, shape, end in (
            ("images-idx3", (images, side, side), 256),
            ("labels-idx1", (images,), 10),
        ):
            sizes = b"".join(size.to_bytes(4, "big") for size in shape)
            elements = torch.randint(end, shape, dtype=torch.uint8)
            content = bytes((0, 0, 8, len(shape))) + sizes + bytes(elements.flatten().tolist())
            path = folder / f"{split}-{kind}-ubyte"
            if zipped:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
            else:
                path.write_bytes(content)


# --- files and flags -----------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
def test_mnists_files(tmp_path: Path, zipped: bool) -> None:
    write_mnist(tmp_path, zipped, images=3, side=8)
    digits = train_digits.read_mnist(tmp_path)
    torch.manual_seed(0)
    images = torch.randint(256, (3, 8, 8), dtype=torch.uint8)
    labels = torch.randint(10, (3,), dtype=torch.uint8)
    found, numbers = digits.train.tensors
    assert torch.equal(found, images[:, None].float() / 255)
    assert torch.equal(numbers, labels.long())
    assert digits.held_out.tensors[0].shape == (3, 1, 8, 8)
    assert not torch.equal(digits.held_out.tensors[0], found)


def test_files_that_are_not_mnists(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="train-images-idx3-ubyte cannot be read"):
        train_digits.read_mnist(tmp_path)
    write_mnist(tmp_path, zipped=False)
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    whole = labels.read_bytes()
    fewer = whole[:7] + b"\x59" + whole[8:-1]  # 89 labels of 90 images
    for content, says in ((whole[:-1], "is cut short"), (fewer, "90 images and 89 labels")):
        labels.write_bytes(content)
        with pytest.raises(UsageError, match=says):
            train_digits.read_mnist(tmp_path)
    labels.unlink()
    labels.with_name(labels.name + ".gz").write_bytes(gzip.compress(whole)[:-9])
    with pytest.raises(UsageError, match=r"ubyte cannot be read, nor with \.gz"):
        train_digits.read_mnist(tmp_path)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--strategy", "zero2", "--flat"], "exclude each other"),
        (["--flat", "--nested"], "exclude each other"),
        (["--batch_size", "63"], "does not divide"),
        (["--batch-size", "2"], "at least 2 images"),
        (["--nproc", "3"], "contradicts"),
        (["--ckpt_prefix", ""], "ckpt_prefix"),
    ],
)
def test_flags_that_do_not_fit(tmp_path: Path, argv: list[str], says: str) -> None:
    write_mnist(tmp_path, zipped=False)
    with pytest.raises(UsageError, match=says):
        train_digits.parse(["--data", str(tmp_path), "--ckpt_prefix", "x", *argv], RANKS)


# --- runs ----------------------------------------------------------------------------------------


needs_images = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn ships the images"
)


def noisy_digits(sizes: tuple[int, int] = (320, 200)) -> images.Images:
    """Ten random pictures under noise, which a CNN tells apart after a few steps, but not all."""
    torch.manual_seed(0)
    pictures = torch.rand(10, 1, 8, 8)
    labels = torch.arange(sum(sizes)) % 10
    seen = pictures[labels] + 0.4 * torch.randn(len(labels), 1, 8, 8)
    return images.Images(*map(TensorDataset, seen.split(sizes), labels.split(sizes)))


def _options(folder: Path, *argv: str) -> train_digits.Options:
    given = ["--ckpt_prefix", f"{folder}/final", "--num_epochs", "2", *argv]
    with mock.patch.object(importlib.util, "find_spec"):  # of scikit-learn
        return train_digits.parse(given, GivenRanks(dist.get_rank(), 2, dist.get_rank(), 2))


@ranks(2)
def test_each_way_is_joined_to_what_was_evaluated(tmp_path: Path) -> None:
    digits = noisy_digits()
    for name, argv in WAYS.items():
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
            result = train_digits.run(_options(tmp_path / name, *argv), digits)
        assert result.answers_that_differ == 0, name
        assert result.accuracy == result.unsharded_accuracy, name
        assert 0.3 < result.accuracy < 1, name
        copies = ["final_copy-0_rank-0-of-1.pth", "final_copy-1_rank-0-of-1.pth"]
        rows = ["final_rank-0-of-2.pth", "final_rank-1-of-2.pth"]
        saved = copies if name == "replicated" else rows
        files = sorted(path.name for path in (tmp_path / name).iterdir())
        assert files == ["final_consolidated.pth", *saved], name
    _another_model_is_noticed(_options(tmp_path / "wrong", "--flat"), digits)


def _another_model_is_noticed(options: train_digits.Options, digits: images.Images) -> None:
    right = train_digits.load_unsharded

    def load_wrong(path: str, options: train_digits.Options) -> nn.Module:
        model = right(path, options)
        with torch.no_grad():
            model.blocks[1].norm.running_mean += 1
        return model

    with mock.patch.object(train_digits, "load_unsharded", load_wrong):
        result = train_digits.run(options, digits)
    assert result.answers_that_differ > 0


@ranks(2)
def test_running_statistics_are_averaged() -> None:
    model = train_digits.CNN()
    torch.manual_seed(dist.get_rank())
    model(torch.randn(4, 1, 8, 8))
    mine = model.blocks[0].norm.running_var.clone()
    both = [torch.empty_like(mine), torch.empty_like(mine)]
    dist.all_gather(both, mine)
    assert not torch.equal(*both)
    images.average_statistics(model)
    assert torch.equal(model.blocks[0].norm.running_var, (both[0] + both[1]) / 2)


def test_answers_that_differ_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    options = train_digits.parse(["--ckpt_prefix", "x"], RANKS)
    monkeypatch.setattr(train_digits.launch, "process_group", lambda *_: nullcontext())
    monkeypatch.setattr(train_digits, "load_digits", lambda *_: None)
    for differ, code in ((0, 0), (3, 1)):
        result = train_digits.Result(1.0, 0.99, differ)
        monkeypatch.setattr(train_digits, "run", lambda *_, found=result: found)
        assert train_digits._worker(options) == code
    assert "3 answers differ" in capsys.readouterr().err


def _run(*argv: str) -> str:
    code, out, err = jobs.Run(sys.executable, "-m", "fsdp2.examples.train_digits", *argv).finish()
    assert code == 0, err
    return out


@needs_images
@pytest.mark.extended
@pytest.mark.parametrize("argv", [(), ("--nested",), ("--flat", "--compute_dtype", "bfloat16")])
def test_the_whole_run_learns(argv: tuple[str, ...], tmp_path: Path) -> None:
    out = _run(*argv, "--ckpt_prefix", str(tmp_path / "final"))
    found = re.search(r"sharded (\S+)%, unsharded from the joined files (\S+)%", out)
    assert found is not None, out
    assert found[1] == found[2]
    assert float(found[1]) >= 97
    assert (tmp_path / "final_consolidated.pth").is_file()


@pytest.mark.extended
def test_the_whole_run_on_mnists_files(tmp_path: Path) -> None:
    write_mnist(tmp_path, zipped=True)
    out = _run("--data", str(tmp_path), "--num_epochs", "1")
    assert "90 images to train on, 90 held out" in out
    assert "0 answers differ" in out
