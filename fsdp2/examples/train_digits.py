"""Recognize handwritten digits: a CNN with batch norm, in XLA's wrappers or by a strategy.

    python -m fsdp2.examples.train_digits                   # two processes on this machine's CPUs
    python -m fsdp2.examples.train_digits --nested --use_gradient_checkpointing
    python -m fsdp2.examples.train_digits --strategy zero1 --compute_dtype bfloat16
    torchrun --nproc-per-node 4 -m fsdp2.examples.train_digits --flat --ckpt_prefix out/final

The images are scikit-learn's: 1,797 of 8 x 8 pixels, a fifth of them held out. ``--data FOLDER``
reads MNIST's own files instead.

At the end each rank saves its rows in a file of its own, rank 0 merges them, and an unsharded
model loads the result. It must give the same answer for every held-out image as the sharded model
did; otherwise the exit code is 1.
"""

from __future__ import annotations

import functools
import gzip
import importlib
import importlib.util
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fsdp2 import shard_model, xla

from . import launch
from .flags import GivenRanks, UsageError, check, flag, parsed
from .images import BatchNorm, ImageOptions, Images, Run
from .reporting import say

MODULE = "fsdp2.examples.train_digits"
EVALUATED_AT_ONCE = 90
"""Images in one forward of an evaluation: the same for sharded and unsharded, so the same bits."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the joined files are another model or a worker failed, 2 wrong usage."""
    given = sys.argv[1:] if argv is None else list(argv)
    with tempfile.TemporaryDirectory(prefix="fsdp2-digits-") as folder:
        # Used by a run whose own arguments, which come later, name none; removed at the end.
        started = [] if GivenRanks.from_environment() else [f"--ckpt_prefix={folder}/final"]
        return launch.main(MODULE, [*started, *given], parse, _worker)


@dataclass(frozen=True)
class Options(ImageOptions):
    """A run, complete."""

    device: str = "cpu"
    flat: bool = flag("one XLA wrapper around the model: ZeRO-2")
    nested: bool = flag("XLA wrappers around blocks and model: ZeRO-3")
    data: Path | None = flag("MNIST's four files, as they are or unpacked", Path, metavar="FOLDER")
    ckpt_prefix: str = flag("what the files of ranks begin with, to keep them", str, "")


def parse(argv: Sequence[str], ranks: GivenRanks | None) -> Options:
    """The checked options of this run; `UsageError` says what is wrong with them."""
    options = parsed(Options, "train_digits", __doc__.partition("\n")[0], argv, ranks)
    ways = [options.flat, options.nested, options.strategy is not None]
    check(
        (not options.ckpt_prefix, "--ckpt_prefix has to say where ranks of a launcher save"),
        (
            # Batch norm has no variance of a single image.
            options.batch_size % options.world_size or options.batch_size < 2 * options.world_size,
            f"--batch_size {options.batch_size} does not divide into {options.world_size} ranks' "
            "slices of at least 2 images",
        ),
        (sum(ways) > 1, "--flat, --nested and --strategy exclude each other: name one"),
        (
            options.data is None and importlib.util.find_spec("sklearn") is None,
            "scikit-learn, which ships the images, is not installed: pip install scikit-learn, or "
            "name a folder with MNIST's files by --data",
        ),
    )
    if options.data is not None:
        read_mnist(options.data)
    return options


# --- images --------------------------------------------------------------------------------------


def load_digits(options: Options) -> Images:
    """The images of this run, 1 channel and labels from 0 to 9, the same on every rank."""
    if options.data is not None:
        return read_mnist(options.data)
    found = importlib.import_module("sklearn.datasets").load_digits()
    images = torch.as_tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.as_tensor(found.target, dtype=torch.int64)
    # Neighbours were written by one hand: a split in their order would hold out whole writers.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(options.seed))
    out, kept = order[: len(order) // 5], order[len(order) // 5 :]
    return Images(*(TensorDataset(images[part], labels[part]) for part in (kept, out)))


def read_mnist(folder: Path) -> Images:
    """MNIST's four files of a folder, as they are (.gz) or unpacked. `UsageError` names a bad one.

    The format is described at http://yann.lecun.com/exdb/mnist: two zero bytes, 8 for bytes, the
    number of dims, each dim's size as 4 bytes with the highest first, then the elements.
    """
    parts: list[TensorDataset] = []
    for split in ("train", "t10k"):
        images = _read_idx(folder / f"{split}-images-idx3-ubyte", dims=3)
        labels = _read_idx(folder / f"{split}-labels-idx1-ubyte", dims=1)
        fits = 0 < len(labels) == len(images) and int(labels.max()) < 10
        counts = f"{len(images)} images and {len(labels)} labels for {split}"
        check((not fits, f"{folder} has {counts}; pass as many of both, with labels from 0 to 9"))
        parts.append(TensorDataset(images[:, None].float() / 255, labels.long()))
    return Images(*parts)


def _read_idx(path: Path, dims: int) -> Tensor:
    try:
        if path.exists():
            content = path.read_bytes()
        else:
            content = gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())
    except (OSError, EOFError) as error:
        raise UsageError(f"{path} cannot be read, nor with .gz: {error}") from error
    start = 4 + 4 * dims
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    is_whole = content[:4] == bytes((0, 0, 8, dims)) and len(content) == start + math.prod(shape)
    check((not is_whole, f"{path} is cut short, or is not in MNIST's format"))
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(shape)


# --- the model -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Convolution, batch norm, ReLU: [n, inputs, h, w] to [n, outputs, h, w]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = BatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class CNN(nn.Module):
    """Images of any size at least 8 x 8 to logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(1, 32), Block(32, 64)])
        self.head = nn.Sequential(nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        first, second = self.blocks
        x = F.adaptive_max_pool2d(first(images), 8)
        x = F.max_pool2d(second(x), 2)
        logits: Tensor = self.head(x.flatten(1))
        return logits


def build_model(options: Options) -> tuple[nn.Module, xla.XlaFullyShardedDataParallel, str]:
    """The sharded model, what saves this rank's rows of it, and a word on how it is sharded."""
    torch.manual_seed(options.seed)  # every rank starts from the same weights
    model = CNN()
    if options.use_gradient_checkpointing:
        # The second forward updates batch norm's running statistics once more.
        for block in model.blocks:
            xla.checkpoint_module(block)
    if not (options.flat or options.nested):
        strategy = options.strategy or "zero3"
        report = shard_model(model, {Block}, strategy=strategy, mp_policy=options.policy)
        # A wrapper around what is sharded already only saves; copies of all shards are groups.
        groups = torch.arange(options.world_size).view(-1, report.groups[0].ranks).tolist()
        return model, xla.XlaFullyShardedDataParallel(model, sharding_groups=groups), str(report)
    if options.nested:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = _wrapped(block, options)
        model.add_module("head", _wrapped(model.head, options))
    wrapper = _wrapped(model, options)
    wrappers = [m for m in wrapper.modules() if isinstance(m, xla.XlaFullyShardedDataParallel)]
    return wrapper, wrapper, f"{len(wrappers)} of XLA's wrappers over {options.world_size} ranks"


def _wrapped(module: nn.Module, options: Options) -> xla.XlaFullyShardedDataParallel:
    return xla.XlaFullyShardedDataParallel(
        module,
        reshard_after_forward=options.nested,
        compute_dtype=options.policy.param_dtype,
        buffer_dtype=torch.float32,
        fp32_reduce_scatter=True,
    )


# --- training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The results of a run, equal on every rank. Shares of the held-out images, from 0 to 1."""

    accuracy: float  # of the sharded model
    unsharded_accuracy: float  # of an unsharded one that has loaded the joined files
    answers_that_differ: int  # images that the two take for different digits


def _worker(options: Options) -> int:
    with launch.process_group(options):
        differ = run(options, load_digits(options)).answers_that_differ
    if differ and options.rank == 0:
        print(
            f"train_digits: the joined files are not the model that was trained: {differ} answers "
            "differ.",
            file=sys.stderr,
        )
    return 1 if differ else 0


def run(options: Options, images: Images) -> Result:
    """Train, save, join and check, on the ranks of the default process group."""
    model, saver, how = build_model(options)
    numel = sum(param.numel() for param in model.parameters())
    say(
        f"{len(images.train):,} images to train on, {len(images.held_out):,} held out; "
        f"{numel:,} parameters, {options.compute_dtype}, threads per rank: {options.threads}\n"
        f"{how}"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True)
    run = Run(options, images, torch.device("cpu"), model, optimizer)
    begin = time.perf_counter()
    answers = torch.empty(0)
    for epoch in range(options.num_epochs):
        loss = run.train(epoch, functools.partial(learning_rate, options, epoch))
        answers = run.answers(EVALUATED_AT_ONCE)[:, 0].contiguous()
        say(
            f"epoch {epoch + 1:2d}/{options.num_epochs}  loss {loss:.4f}  "
            f"held out {accuracy(answers, images):.2%}  {time.perf_counter() - begin:.1f} s"
        )
    path = save(saver, options)
    joined = torch.empty_like(answers)
    if dist.get_rank() == 0:
        joined = run.answers(EVALUATED_AT_ONCE, load_unsharded(path, options))[:, 0].contiguous()
    dist.broadcast(joined, 0)
    differ = int((joined != answers).sum())
    result = Result(accuracy(answers, images), accuracy(joined, images), differ)
    say(
        f"sharded {result.accuracy:.2%}, unsharded from the joined files "
        f"{result.unsharded_accuracy:.2%}, {differ} answers differ"
    )
    return result


def learning_rate(options: Options, epoch: int, done: float) -> float:
    """A cosine over all epochs; ``done`` is the completed share of one (more than 0, to 1)."""
    return options.lr * 0.5 * (1 + math.cos(math.pi * (epoch + done) / options.num_epochs))


def accuracy(answers: Tensor, images: Images) -> float:
    """The share of right answers, from 0 to 1."""
    return (answers == images.held_out.tensors[1]).double().mean().item()


# --- files ---------------------------------------------------------------------------------------


def save(saver: xla.XlaFullyShardedDataParallel, options: Options) -> str:
    """Save one file per rank, and merge them on rank 0; returns the path of the full file.

    If several groups of ranks hold all shards, each group's files make a model, and they are the
    same: the first group's files are merged.
    """
    copies = dist.get_world_size() // saver.world_size
    copy = dist.get_rank() // saver.world_size
    prefix = options.ckpt_prefix + (f"_copy-{copy}" if copies > 1 else "")
    file = Path(f"{prefix}_rank-{saver.rank}-of-{saver.world_size}.pth")
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": saver.state_dict(), "shard_metadata": saver.get_shard_metadata()}, file)
    dist.barrier()  # all files are there
    path = f"{options.ckpt_prefix}_consolidated.pth"
    if dist.get_rank() == 0:
        suffix = f"_rank-*-of-{saver.world_size}.pth"
        xla.consolidate_sharded_model_checkpoints(prefix, suffix, path)
        say(f"{saver.world_size} files {prefix}{suffix} -> {path}")
    return path


def load_unsharded(path: str, options: Options) -> nn.Module:
    """A model that is not sharded, with what a full file holds; parameters in compute's dtype."""
    model = CNN()
    found = cast("dict[str, dict[str, Tensor]]", torch.load(path, weights_only=True))
    model.load_state_dict(found["model"])
    for param in model.parameters():
        param.data = param.data.to(options.dtype)
    return model


if __name__ == "__main__":
    sys.exit(main())
