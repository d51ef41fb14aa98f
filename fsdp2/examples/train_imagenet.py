"""Train a ResNet on a folder of images in ImageNet's layout, sharded by a strategy.

    python -m fsdp2.examples.train_imagenet --make-sample sample      # digits as PNG files
    python -m fsdp2.examples.train_imagenet --datadir sample --model resnet18 --image_size 32 …
    torchrun --nproc-per-node 8 -m fsdp2.examples.train_imagenet --datadir /datasets/imagenet-1k \\
        --batch_size 1024 --lr 0.4 --num_warmup_epochs 5 --num_epochs 100 --eval_interval 10 \\
        --checkpoint ckpt --resume

    DATADIR/train/<class>/<image>      every class of val is one of train
    DATADIR/val/<class>/<image>

Each residual block is a unit. The rate rises over the warm-up, then is divided by
``--lr_scheduler_divisor`` at regular intervals of epochs; epochs are counted from the start.

A run is a function of its flags: the order of images depends on (seed, epoch), their crops on
(seed, epoch, rank). A resumed run is therefore bitwise identical to an uninterrupted one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import checkpoint, shard_model, xla
from fsdp2.errors import CheckpointError

from . import checkpointing, launch, reporting
from .flags import (
    GivenRanks,
    UsageError,
    check,
    count,
    cpu_count,
    flag,
    not_negative,
    parsed,
    rate,
    share,
)
from .images import BatchNorm, ImageOptions, Images, Run, import_torchvision
from .reporting import amount, say

MODULE = "fsdp2.examples.train_imagenet"
MODELS = (
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
    *("wide_resnet50_2", "wide_resnet101_2"),
)
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels
RESIZED = 256 / 224  # of an image that is evaluated, before its middle is cut out
KEEP = 2  # checkpoints


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a worker failed, 2 wrong usage, 128 + n ended by signal n."""
    return launch.main(MODULE, argv, prepare, work)


@dataclass(frozen=True)
class Options(ImageOptions):
    """A run, complete."""

    datadir: Path = flag("with train/<class>/* and val/<class>/*", Path, metavar="FOLDER")
    make_sample: Path | None = flag("write such a folder, and leave", Path, metavar="FOLDER")
    model: str = flag("of torchvision (resnet50)", choices=MODELS, default="resnet50")
    image_size: int = flag("pixels per side of what the model sees", count, 224)
    min_crop: float = flag("least share of an image's area in a crop in training", share, 0.08)
    no_flip: bool = flag("mirror no images in training")
    batch_size: int = flag("images per step, over all ranks", count, 256)
    test_set_batch_size: int = flag("images per forward and rank", count, 64)
    num_epochs: int = flag("times through the images", count, 90)
    eval_interval: int = flag("epochs from evaluation to evaluation", count, 1)
    lr: float = flag("learning rate behind the warm-up", rate, 0.1)
    num_warmup_epochs: int = flag("in which the rate rises", not_negative, 5)
    lr_scheduler_divide_every_n_epochs: int = flag("epochs", count, 30, metavar="N")
    lr_scheduler_divisor: float = flag("what the rate is divided by", rate, 10.0)
    momentum: float = flag("of SGD", share, 0.9)
    weight_decay: float = flag("of SGD", share, 1e-4)
    checkpoint: Path | None = flag(f"save here; the last {KEEP} stay", Path, metavar="FOLDER")
    checkpoint_interval: int = flag("epochs from save to save", count, 1)
    resume: bool = flag("go on from the newest checkpoint, if there is one")
    num_workers: int | None = flag("processes per rank that read images", not_negative)


def parse(argv: Sequence[str], ranks: GivenRanks | None) -> Options:
    """The checked options of this run; `UsageError` says what is wrong with them."""
    options = parsed(Options, "train_imagenet", __doc__.partition("\n")[0], argv, ranks)
    check(
        (
            bool(options.datadir) == bool(options.make_sample),
            "--datadir names the folder of images, or --make-sample one to be made",
        ),
        (
            options.datadir and importlib.util.find_spec("torchvision") is None,
            "torchvision, which has the models, is not installed: pip install --no-deps the "
            "torchvision of this torch, and pillow",
        ),
        (
            options.resume and options.checkpoint is None,
            "--resume needs --checkpoint FOLDER to say what to resume from",
        ),
        (
            options.batch_size % options.world_size,
            f"--batch_size {options.batch_size} does not divide over {options.world_size} ranks",
        ),
    )
    if options.num_workers is None:
        workers = max(0, cpu_count() // options.local_world_size - 1)
        options = replace(options, num_workers=workers)
    return options


def prepare(argv: Sequence[str], ranks: GivenRanks | None) -> Options | int:
    """Check what can be wrong before workers start."""
    options = parse(argv, ranks)
    if options.make_sample is not None:
        print(make_sample(options.make_sample))
        return 0
    classes = {}
    for split in ("train", "val"):
        folder = options.datadir / split
        try:
            classes[split] = sorted(path.name for path in folder.iterdir() if path.is_dir())
        except OSError as error:
            raise UsageError(f"--datadir: {folder} cannot be read: {error.strerror}") from error
    check(
        (
            not classes["train"] or classes["train"] != classes["val"],
            f"--datadir: {options.datadir} has {len(classes['train'])} classes in train and "
            f"{len(classes['val'])} in val; both must have the same, at least one",
        )
    )
    checkpointing.find(options.checkpoint, options.resume, facts_of(options))
    return options


# --- images --------------------------------------------------------------------------------------


def make_sample(folder: Path) -> str:
    """Write scikit-learn's handwritten digits as PNG files in ImageNet's layout; what was written.

    1,797 images of 8 x 8 pixels in ten classes, a fifth of them in ``val``.
    """
    for package, name in (("sklearn", "scikit-learn"), ("PIL", "pillow")):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"--make-sample needs {name}: pip install {name}")
    if folder.exists():
        raise UsageError(f"--make-sample: {folder} is there already")
    digits = importlib.import_module("sklearn.datasets").load_digits()
    image_of = importlib.import_module("PIL.Image").fromarray
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = len(order) // 5
    for place, index in enumerate(order):
        split = "val" if place < held_out else "train"
        path = folder / split / f"digit_{digits.target[index]}" / f"{index:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image_of((digits.images[index] * 15.9375).astype("uint8")).save(path)
    return f"{len(order) - held_out:,} images to train on and {held_out:,} held out in {folder}"


def open_images(options: Options) -> Images:
    """Two of torchvision's folders, with random crops of the former; only names are read."""
    import_torchvision()
    transforms = importlib.import_module("torchvision.transforms")
    folder = importlib.import_module("torchvision.datasets").ImageFolder
    last = [transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION)]
    size = options.image_size
    crop = transforms.RandomResizedCrop(size, scale=(options.min_crop, 1.0))
    flips = [] if options.no_flip else [transforms.RandomHorizontalFlip()]
    middle = [transforms.Resize(round(size * RESIZED)), transforms.CenterCrop(size)]
    return Images(
        folder(options.datadir / "train", transforms.Compose([crop, *flips, *last])),
        folder(options.datadir / "val", transforms.Compose([*middle, *last])),
    )


# --- the model and its rate ----------------------------------------------------------------------


def build_model(options: Options, classes: int, device: torch.device) -> tuple[nn.Module, str]:
    """The sharded model, its blocks as units, and a word on how it is sharded."""
    import_torchvision()
    resnet = importlib.import_module("torchvision.models.resnet")
    torch.manual_seed(options.seed)  # every rank starts from the same weights
    model: nn.Module = getattr(resnet, options.model)(num_classes=classes, norm_layer=BatchNorm)
    kinds = (resnet.BasicBlock, resnet.Bottleneck)
    if options.use_gradient_checkpointing:
        # The second forward updates batch norm's running statistics once more.
        for block in [block for block in model.modules() if isinstance(block, kinds)]:
            xla.checkpoint_module(block)
    strategy = options.strategy or "zero3"
    report = shard_model(model.to(device), kinds, strategy=strategy, mp_policy=options.policy)
    return model, str(report)


def learning_rate(options: Options, epoch: int, done: float) -> float:
    """The rate of a step; ``done`` is the completed share of its epoch (more than 0, to 1)."""
    if epoch < options.num_warmup_epochs:
        return options.lr * (epoch + done) / options.num_warmup_epochs
    divisions = epoch // options.lr_scheduler_divide_every_n_epochs
    return options.lr / options.lr_scheduler_divisor**divisions


# --- training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The results of a run, equal on every rank."""

    epochs: int  # done in all
    loss: float  # nats, mean over the last epoch; 0 where nothing was left to do
    top1: float  # share of the held-out images, from 0 to 1
    top5: float


def work(options: Options) -> int:
    """A rank's work; its exit code."""
    with launch.process_group(options) as device:
        try:
            train(options, device)
        except CheckpointError as error:  # on all ranks alike
            raise UsageError(str(error)) from error
    return 0


def train(options: Options, device: torch.device) -> Result:
    """Train, evaluate and save, on the ranks of the default process group."""
    images = open_images(options)
    model, how = build_model(options, len(images.train.classes), device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
    )
    run = Run(options, images, device, model, optimizer)
    start = resume(options, run)
    steps = len(images.train) // options.batch_size
    numel = sum(param.numel() for param in model.parameters())
    say(
        f"{len(images.train):,} images to train on, {len(images.held_out):,} held out, "
        f"{len(images.train.classes):,} classes; {options.model} with {numel:,} parameters, "
        f"{options.compute_dtype}, {options.world_size} rank(s) on "
        f"{options.device}, threads per rank: {options.threads}\n{how}"
    )
    if start:
        say(f"resumed from {options.checkpoint} behind epoch {start}")
    held = amount(reporting.peak_memory(device))
    say(f"{steps} steps an epoch; peak memory so far {held}")
    loss, top1, top5 = 0.0, 0.0, 0.0
    for epoch in range(start, options.num_epochs):
        begin = time.perf_counter()
        rank = dist.get_rank()  # each has crops of its own
        torch.manual_seed(random.Random(f"{options.seed} {epoch} of {rank}").getrandbits(63))
        loss = run.train(epoch, functools.partial(learning_rate, options, epoch))
        seconds = time.perf_counter() - begin
        done, last = epoch + 1, epoch + 1 == options.num_epochs
        line = f"epoch {done}/{options.num_epochs}  loss {loss:.4f}"
        if last or done % options.eval_interval == 0:
            top1, top5 = evaluate(options, run)
            line += f"  held out {top1:.2%}, in the first five {top5:.2%}"
        if options.checkpoint is not None and (last or done % options.checkpoint_interval == 0):
            step, extra = done * steps, {"epochs": done, "alike": facts_of(options)}
            checkpoint.save(options.checkpoint, model, optimizer, step=step, extra=extra, keep=KEEP)
        say(f"{line}  {steps * options.batch_size / seconds:,.0f} images/s  {seconds:.1f} s")
    if start >= options.num_epochs:
        top1, top5 = evaluate(options, run)
        say(f"nothing is left to do: held out {top1:.2%}, in the first five {top5:.2%}")
    return Result(max(start, options.num_epochs), loss, top1, top5)


def evaluate(options: Options, run: Run) -> tuple[float, float]:
    """The shares of held-out images whose class is the likeliest, and among the likeliest five."""
    answers = run.answers(options.test_set_batch_size).cpu()
    found = answers == torch.tensor(run.images.held_out.targets)[:, None]
    return found[:, 0].double().mean().item(), found.any(1).double().mean().item()


# --- checkpoints ---------------------------------------------------------------------------------


def facts_of(options: Options) -> checkpointing.Facts:
    """The settings that a resumed run must share."""
    names = (
        *("model", "image_size", "min_crop", "no_flip", "batch_size", "lr", "num_warmup_epochs"),
        *("lr_scheduler_divide_every_n_epochs", "lr_scheduler_divisor", "momentum"),
        *("weight_decay", "use_gradient_checkpointing", "compute_dtype", "seed"),
    )
    classes = sorted(path.name for path in (options.datadir / "train").iterdir())
    return {name: getattr(options, name) for name in names} | {"classes": classes}


def resume(options: Options, run: Run) -> int:
    """Load the newest checkpoint, if there is one to continue from; the number of epochs done."""
    if options.checkpoint is None:
        return 0
    step = checkpointing.find(options.checkpoint, options.resume, facts_of(options))
    loaded = checkpointing.load(options.checkpoint, step, run.model, run.optimizer)
    return 0 if loaded is None else int(loaded.extra["epochs"])


if __name__ == "__main__":
    sys.exit(main())
