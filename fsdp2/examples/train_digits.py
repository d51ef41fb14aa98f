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

import argparse
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

from fsdp2 import MixedPrecisionPolicy, shard_model, xla

from . import launch
from .images import DTYPES, STRATEGIES, BatchNorm, Strategy, average_statistics, shared_out
from .options import GivenRanks, UsageError, count, rate, threads_for, world_size_of

MODULE = "fsdp2.examples.train_digits"
EVALUATED_AT_ONCE = 90
"""Images in one forward of an evaluation: the same for sharded and unsharded, so the same bits."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the joined files are another model or a worker failed, 2 wrong usage."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        ranks = GivenRanks.from_environment()
        options = parse(argv, ranks)
        if ranks is not None:
            launch.run_as_worker(lambda: _worker(options, ranks))
        if options.data is not None:
            read_mnist(options.data)  # what is wrong with it is said once, before workers start
    except UsageError as error:
        print(f"train_digits: {error}.", file=sys.stderr, flush=True)
        return 2
    with tempfile.TemporaryDirectory(prefix="fsdp2-digits-") as folder:
        if options.ckpt_prefix is None:
            argv = [*argv, "--ckpt_prefix", f"{folder}/final"]
        return launch.run_workers(MODULE, argv, options.nproc, options.threads, name="train_digits")


# --- options -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """A run, complete; names are those of the flags."""

    data: Path | None
    flat: bool
    nested: bool
    strategy: Strategy
    use_gradient_checkpointing: bool
    compute_dtype: torch.dtype
    batch_size: int  # images in one optimizer step, over all ranks
    num_epochs: int
    lr: float  # of the first step; it falls to zero along a cosine
    ckpt_prefix: str | None  # None: a folder that is removed at the end
    nproc: int
    threads: int
    seed: int


def parse(argv: Sequence[str], ranks: GivenRanks | None) -> Options:
    """The checked options of this run; `UsageError` says what is wrong with them."""
    args = _parser().parse_args(argv)
    if ranks is not None and args.ckpt_prefix is None:
        raise UsageError("--ckpt_prefix has to say where ranks that a launcher started save")
    nproc = world_size_of(args.nproc, ranks, default=2)
    if args.batch_size % nproc or args.batch_size < 2 * nproc:
        # Batch norm has no variance of a single image.
        raise UsageError(
            f"--batch_size {args.batch_size} does not divide into {nproc} ranks' slices of at "
            "least 2 images"
        )
    if args.strategy is not None and (args.flat or args.nested):
        raise UsageError("--strategy is for shard_model; leave it out with --flat and --nested")
    if args.data is None and importlib.util.find_spec("sklearn") is None:
        raise UsageError(
            "scikit-learn, which ships the images, is not installed: pip install scikit-learn, or "
            "name a folder with MNIST's files by --data"
        )
    return Options(
        data=args.data,
        flat=args.flat,
        nested=args.nested,
        strategy=args.strategy or "zero3",
        use_gradient_checkpointing=args.use_gradient_checkpointing,
        compute_dtype=DTYPES[args.compute_dtype],
        batch_size=args.batch_size,
        num_epochs=args.num_epochs,
        lr=args.lr,
        ckpt_prefix=args.ckpt_prefix,
        nproc=nproc,
        threads=args.threads or threads_for(nproc),
        seed=args.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_digits", description="Train a CNN on handwritten digits, sharded.",
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    wrappers = parser.add_mutually_exclusive_group()
    wrappers.add_argument(
        "--flat", action="store_true", help="one XLA wrapper around the model: ZeRO-2"
    )
    wrappers.add_argument(
        "--nested", action="store_true", help="XLA wrappers around blocks and model: ZeRO-3"
    )
    add("--strategy", choices=STRATEGIES, help="of shard_model, without wrappers (default: zero3)")
    add("--data", type=Path, metavar="FOLDER", help="MNIST's four files, as they are or unpacked")
    add("--use_gradient_checkpointing", action="store_true", help="recompute blocks in backward")
    add("--compute_dtype", choices=list(DTYPES), default="float32")
    add("--batch_size", type=count, default=64, help="images per step, over all ranks (64)")
    add("--drop_last", action="store_true", help="leave out what fills no batch: done always")
    add("--num_epochs", type=count, default=10, help="times through the images (10)")
    add("--lr", type=rate, default=0.05, help="learning rate of the first step (0.05)")
    add("--ckpt_prefix", metavar="PATH", help="what the files of ranks begin with, to keep them")
    add("--nproc", type=count, help="processes to start (2)")
    add("--threads", type=count, help="CPU threads per rank (default: CPUs / ranks)")
    add("--seed", type=count, default=1, help="fixes weights, split and order of images (1)")
    return parser


# --- images --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digits:
    """Images fp32 [n, 1, height, width] from 0 to 1, and labels int64 [n] from 0 to 9."""

    images: Tensor
    labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor


def load_digits(options: Options) -> Digits:
    """The images of this run, the same on every rank."""
    if options.data is not None:
        return read_mnist(options.data)
    found = importlib.import_module("sklearn.datasets").load_digits()
    images = torch.as_tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.as_tensor(found.target, dtype=torch.int64)
    # Neighbours were written by one hand: a split in their order would hold out whole writers.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(options.seed))
    out, kept = order[: len(order) // 5], order[len(order) // 5 :]
    return Digits(images[kept], labels[kept], images[out], labels[out])


def read_mnist(folder: Path) -> Digits:
    """MNIST's four files of a folder, as they are (.gz) or unpacked. `UsageError` names a bad one.

    The format is described at http://yann.lecun.com/exdb/mnist: two zero bytes, 8 for bytes, the
    number of dims, each dim's size as 4 bytes with the highest first, then the elements.
    """
    parts: list[Tensor] = []
    for split in ("train", "t10k"):
        images = _read_idx(folder, f"{split}-images-idx3-ubyte", dims=3)
        labels = _read_idx(folder, f"{split}-labels-idx1-ubyte", dims=1)
        if not len(labels) or len(images) != len(labels) or int(labels.max()) > 9:
            raise UsageError(
                f"{folder} has {len(images)} images and {len(labels)} labels for {split}; there "
                "must be as many, some, and labels from 0 to 9"
            )
        parts += [images[:, None].float() / 255, labels.long()]
    return Digits(*parts)


def _read_idx(folder: Path, name: str, dims: int) -> Tensor:
    paths = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not paths:
        raise UsageError(f"{folder / name} does not exist, nor with .gz")
    try:
        content = paths[0].read_bytes()
        content = gzip.decompress(content) if paths[0].suffix == ".gz" else content
    except (OSError, EOFError) as error:
        raise UsageError(f"{paths[0]} cannot be read: {error}") from error
    start = 4 + 4 * dims
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if content[:4] != bytes((0, 0, 8, dims)) or len(content) != start + math.prod(shape):
        raise UsageError(f"{paths[0]} is cut short, or is not in MNIST's format")
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
    dtype = None if options.compute_dtype == torch.float32 else options.compute_dtype
    if not (options.flat or options.nested):
        report = shard_model(
            model,
            {Block},
            strategy=options.strategy,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        )
        # A wrapper around what is sharded already only saves; copies of all shards are groups.
        groups = torch.arange(options.nproc).view(-1, report.mesh[-1]).tolist()
        return model, xla.XlaFullyShardedDataParallel(model, sharding_groups=groups), str(report)
    if options.nested:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = _wrapped(block, dtype)
        model.add_module("head", _wrapped(model.head, dtype))
    wrapper = _wrapped(model, dtype, reshard=options.nested)
    wrappers = [m for m in wrapper.modules() if isinstance(m, xla.XlaFullyShardedDataParallel)]
    return wrapper, wrapper, f"{len(wrappers)} of XLA's wrappers over {options.nproc} ranks"


def _wrapped(
    module: nn.Module, dtype: torch.dtype | None, reshard: bool = True
) -> xla.XlaFullyShardedDataParallel:
    return xla.XlaFullyShardedDataParallel(
        module,
        reshard_after_forward=reshard,
        compute_dtype=dtype,
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
    path: str  # the joined file


def _worker(options: Options, ranks: GivenRanks) -> int:
    torch.set_num_threads(options.threads)
    launch.init_process_group(ranks, "gloo", torch.device("cpu"))
    result = run(options, load_digits(options))
    dist.barrier()
    dist.destroy_process_group()
    if result.answers_that_differ and ranks.rank == 0:
        print(
            f"train_digits: the joined files are not the model that was trained: "
            f"{result.answers_that_differ} answers differ.",
            file=sys.stderr,
        )
    return 1 if result.answers_that_differ else 0


def run(options: Options, digits: Digits) -> Result:
    """Train, save, join and check, on the ranks of the default process group."""
    rank = dist.get_rank()
    model, saver, how = build_model(options)
    if rank == 0:
        numel = sum(param.numel() for param in model.parameters())
        dtype = str(options.compute_dtype).removeprefix("torch.")
        print(
            f"{len(digits.labels):,} images to train on, {len(digits.held_out_labels):,} held out; "
            f"{numel:,} parameters, {dtype}, threads per rank: {options.threads}\n{how}",
            flush=True,
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True)
    begin = time.perf_counter()
    answers = torch.empty(0)
    for epoch in range(options.num_epochs):
        loss = train_epoch(model, optimizer, digits, epoch, options)
        average_statistics(model)
        answers = answers_of(
            model, digits.held_out_images, dist.get_world_size(), options.compute_dtype
        )
        if rank == 0:
            print(
                f"epoch {epoch + 1:2d}/{options.num_epochs}  loss {loss:.4f}  "
                f"held out {accuracy(answers, digits):.2%}  {time.perf_counter() - begin:.1f} s",
                flush=True,
            )
    path = save(saver, options)
    joined = torch.empty_like(answers)
    if rank == 0:
        unsharded = load_unsharded(path, options)
        joined = answers_of(unsharded, digits.held_out_images, 1, options.compute_dtype)
    dist.broadcast(joined, 0)
    differ = int((joined != answers).sum())
    result = Result(accuracy(answers, digits), accuracy(joined, digits), differ, path)
    if rank == 0:
        print(
            f"sharded {result.accuracy:.2%}, unsharded from the joined files "
            f"{result.unsharded_accuracy:.2%}, {differ} answers differ",
            flush=True,
        )
    return result


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, digits: Digits, epoch: int, options: Options
) -> float:
    """Once through the images, in an order that (seed, epoch) fixes; the mean loss, in nats.

    Each rank takes its slice of each global batch. The last images that fill no batch are left out.
    """
    model.train()
    order = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
    batches = torch.randperm(len(digits.labels), generator=order).split(options.batch_size)
    if len(batches[-1]) < options.batch_size and len(batches) > 1:
        batches = batches[:-1]
    share = options.batch_size // options.nproc
    total = torch.zeros((), dtype=torch.float64)
    for i, batch in enumerate(batches):
        progress = (epoch + i / len(batches)) / options.num_epochs
        for group in optimizer.param_groups:
            group["lr"] = options.lr * 0.5 * (1 + math.cos(math.pi * progress))
        mine = batch[dist.get_rank() * share :][:share]
        logits = model(digits.images[mine].to(options.compute_dtype))
        loss = F.cross_entropy(logits.float(), digits.labels[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach().double()
    dist.all_reduce(total)
    return total.item() / len(batches) / options.nproc


@torch.no_grad()
def answers_of(model: nn.Module, images: Tensor, num_ranks: int, dtype: torch.dtype) -> Tensor:
    """The digit for each image, int64 [n], on every rank; forwards are shared out over ranks."""
    model.eval()
    rank = dist.get_rank() if num_ranks > 1 else 0
    answers = torch.zeros(len(images), dtype=torch.int64)
    for chunk, counts in shared_out(len(images), EVALUATED_AT_ONCE, rank, num_ranks):
        found = model(images[chunk].to(dtype)).argmax(1)
        if counts:
            answers[chunk] = found
    if num_ranks > 1:
        dist.all_reduce(answers)
    return answers


def accuracy(answers: Tensor, digits: Digits) -> float:
    """The share of right answers, from 0 to 1."""
    return (answers == digits.held_out_labels).double().mean().item()


# --- files ---------------------------------------------------------------------------------------


def save(saver: xla.XlaFullyShardedDataParallel, options: Options) -> str:
    """Save one file per rank, and merge them on rank 0; returns the path of the full file.

    If several groups of ranks hold all shards, each group's files make a model, and they are the
    same: the first group's files are merged.
    """
    assert options.ckpt_prefix is not None
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
        print(f"{saver.world_size} files {prefix}{suffix} -> {path}", flush=True)
    return path


def load_unsharded(path: str, options: Options) -> nn.Module:
    """A model that is not sharded, with what a full file holds; parameters in compute's dtype."""
    model = CNN()
    found = cast("dict[str, dict[str, Tensor]]", torch.load(path, weights_only=True))
    model.load_state_dict(found["model"])
    for param in model.parameters():
        param.data = param.data.to(options.compute_dtype)
    return model


if __name__ == "__main__":
    sys.exit(main())
