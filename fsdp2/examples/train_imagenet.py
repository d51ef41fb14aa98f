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

A run is a function of its flags: the order of images depends on (seed, epoch), an image's crop on
(seed, epoch, image). A resumed run therefore equals an uninterrupted one, bit for bit.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed
from torch.utils.data import DataLoader, Dataset

from fsdp2 import CheckpointError, MixedPrecisionPolicy, checkpoint, shard_model

from . import launch, reporting
from .images import (
    DTYPES,
    STRATEGIES,
    BatchNorm,
    Strategy,
    average_statistics,
    import_torchvision,
    shared_out,
)
from .options import (
    GivenRanks,
    Parser,
    UsageError,
    backend_for,
    count,
    cpu_count,
    device_named,
    number,
    rate,
    seed,
    threads_for,
    world_size_of,
)

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
    """Exit code: 0 done, 2 wrong usage, 128 + n ended by signal n, else a worker's failure."""
    argv = sys.argv[1:] if argv is None else list(argv)
    ranks: GivenRanks | None = None
    try:
        ranks = GivenRanks.from_environment()
        options = parse(argv, ranks)
        if options.make_sample is not None:
            print(make_sample(options.make_sample))
            return 0
        check_folders(options)
    except UsageError as error:
        if ranks is None or ranks.rank == 0:
            return _complain(error)
        launch.let_rank_0_speak()
        return 2
    if ranks is not None:
        launch.run_as_worker(lambda: _worker(options, ranks))
    return launch.run_workers(
        MODULE, argv, options.world_size, options.threads, name="train_imagenet"
    )


def _complain(error: Exception) -> int:
    print(f"train_imagenet: {str(error).removesuffix('.')}.", file=sys.stderr, flush=True)
    return 2


# --- options -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """A run, complete; names are those of the flags."""

    datadir: Path
    make_sample: Path | None
    model: str
    image_size: int  # pixels a side of what the model sees
    min_crop: float  # of an image's area, in training
    flip: bool
    batch_size: int  # images in one optimizer step, over all ranks
    test_set_batch_size: int  # images in one forward of one rank
    num_epochs: int
    eval_interval: int  # epochs
    lr: float  # behind the warm-up
    num_warmup_epochs: int
    lr_scheduler_divide_every_n_epochs: int
    lr_scheduler_divisor: float
    momentum: float
    weight_decay: float
    use_gradient_checkpointing: bool
    compute_dtype: torch.dtype
    strategy: Strategy
    checkpoint: Path | None
    checkpoint_interval: int  # epochs
    resume: bool
    num_workers: int  # processes of a rank that read images; 0: the rank itself
    world_size: int
    local_world_size: int
    device: str
    threads: int
    seed: int


def parse(argv: Sequence[str], ranks: GivenRanks | None) -> Options:
    """The checked options of this run; `UsageError` says what is wrong with them."""
    args = _parser().parse_args(argv)
    if (args.datadir is None) == (args.make_sample is None):
        raise UsageError("--datadir names the folder of images, or --make-sample one to be made")
    if args.make_sample is None and importlib.util.find_spec("torchvision") is None:
        raise UsageError(
            "torchvision, which has the models, is not installed: pip install --no-deps the "
            "torchvision of this torch, and pillow"
        )
    if args.resume and args.checkpoint is None:
        raise UsageError("--resume needs --checkpoint FOLDER to say what to resume from")
    device = device_named(args.device)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    world_size = world_size_of(args.nproc, ranks, default=max(2, gpus))
    local = ranks.local_world_size if ranks else world_size
    if args.batch_size % world_size:
        raise UsageError(f"--batch_size {args.batch_size} does not divide over {world_size} ranks")
    given = vars(args) | {
        "datadir": args.datadir or Path(),
        "flip": not args.no_flip,
        "compute_dtype": DTYPES[args.compute_dtype],
        "num_workers": cpu_count() // local - 1 if args.num_workers is None else args.num_workers,
        "world_size": world_size,
        "local_world_size": local,
        "device": device,
        "threads": args.threads or threads_for(local),
    }
    given["num_workers"] = max(0, given["num_workers"])
    return Options(**{name: given[name] for name in Options.__dataclass_fields__})


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="train_imagenet", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    not_negative = number(int, 0, 2**31 - 1, "a whole number of at least 0")
    share = number(float, 0, 1, "a number from 0 to 1")
    add("--datadir", type=Path, metavar="FOLDER", help="with train/<class>/* and val/<class>/*")
    add("--make-sample", type=Path, metavar="FOLDER", help="write such a folder, and leave")
    add("--model", choices=MODELS, default="resnet50", help="of torchvision (resnet50)")
    add("--image_size", type=count, default=224, help="pixels a side (224)")
    add("--min_crop", type=share, default=0.08, help="least area of a crop in training (0.08)")
    add("--no_flip", action="store_true", help="mirror no images in training")
    add("--batch_size", type=count, default=256, help="images per step, over all ranks (256)")
    add("--test_set_batch_size", type=count, default=64, help="images per forward and rank (64)")
    add("--drop_last", action="store_true", help="leave out what fills no batch: done always")
    add("--num_epochs", type=count, default=90, help="times through the images (90)")
    add("--eval_interval", type=count, default=1, help="epochs from evaluation to evaluation (1)")
    add("--lr", type=rate, default=0.1, help="learning rate behind the warm-up (0.1)")
    add("--num_warmup_epochs", type=not_negative, default=5, help="in which it rises (5)")
    add("--lr_scheduler_divide_every_n_epochs", type=count, default=30, metavar="N", help="(30)")
    add("--lr_scheduler_divisor", type=rate, default=10, help="what it is divided by (10)")
    add("--momentum", type=share, default=0.9, help="of SGD (0.9)")
    add("--weight_decay", type=share, default=1e-4, help="of SGD (1e-4)")
    add("--use_gradient_checkpointing", action="store_true", help="recompute blocks in backward")
    add("--compute_dtype", choices=list(DTYPES), default="float32")
    add("--strategy", choices=STRATEGIES, default="zero3", help="of shard_model (zero3)")
    add("--checkpoint", type=Path, metavar="FOLDER", help=f"save here; the last {KEEP} stay")
    add("--checkpoint_interval", type=count, default=1, help="epochs from save to save (1)")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--num_workers", type=not_negative, help="processes per rank that read images")
    add("--nproc", type=count, help="processes to start (2, or one a GPU)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--threads", type=count, help="CPU threads per rank (default: CPUs / ranks)")
    add("--seed", type=seed, default=1, help="fixes weights, order and crops (1)")
    return parser


def check_folders(options: Options) -> None:
    """Say what is wrong with --datadir and --checkpoint before workers start."""
    classes = {}
    for split in ("train", "val"):
        folder = options.datadir / split
        try:
            classes[split] = sorted(path.name for path in folder.iterdir() if path.is_dir())
        except OSError as error:
            raise UsageError(f"--datadir: {folder} cannot be read: {error.strerror}") from error
    if not classes["train"] or classes["train"] != classes["val"]:
        odd = sorted({*classes["train"]} ^ {*classes["val"]})[:3]
        raise UsageError(
            f"--datadir: {options.datadir} has {len(classes['train'])} classes in train and "
            f"{len(classes['val'])} in val; both must have the same, at least one"
            + (f", but only one has {', '.join(odd)}" if odd else "")
        )
    saved = checkpoint.steps(options.checkpoint) if options.checkpoint else []
    if saved and not options.resume:
        raise UsageError(
            f"{options.checkpoint} holds a checkpoint already: add --resume to go on from it, or "
            "name another folder"
        )


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


class Crops(Dataset[tuple[Tensor, int]]):
    """Images of one epoch, each cut out and mirrored as (seed, epoch, image) says.

    Args:
        images: of torchvision, as pictures.
        transform: a picture to fp32 [3, S, S]; it draws from torch's generator.
        seed: of the run.
        epoch: from 0.
    """

    def __init__(
        self,
        images: Dataset[tuple[object, int]],
        transform: Callable[[object], Tensor],
        seed: int,
        epoch: int,
    ) -> None:
        self._images, self._transform = images, transform
        self._seed, self._epoch = seed, epoch

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture, label = self._images[index]
        drawn = random.Random(f"{self._seed} {self._epoch} {index}").getrandbits(63)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(drawn)
            return self._transform(picture), label


@dataclass(frozen=True)
class Images:
    """Training images as pictures, held-out ones as fp32 [3, S, S], and what crops the former."""

    train: Any  # ImageFolder
    held_out: Any
    augment: Callable[[object], Tensor]


def open_images(options: Options) -> Images:
    """The images of this run; nothing is read but the names of files.

    Raises:
        UsageError: there are fewer than a batch.
    """
    import_torchvision()
    transforms = importlib.import_module("torchvision.transforms")
    folder = importlib.import_module("torchvision.datasets").ImageFolder
    last = [transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION)]
    size = options.image_size
    crop = transforms.RandomResizedCrop(size, scale=(options.min_crop, 1.0))
    flips = [transforms.RandomHorizontalFlip()] if options.flip else []
    middle = [transforms.Resize(round(size * RESIZED)), transforms.CenterCrop(size)]
    images = Images(
        folder(options.datadir / "train"),
        folder(options.datadir / "val", transforms.Compose([*middle, *last])),
        transforms.Compose([crop, *flips, *last]),
    )
    if len(images.train) < options.batch_size:
        raise UsageError(
            f"{options.datadir} has {len(images.train)} images to train on, which is no batch of "
            f"--batch_size {options.batch_size}"
        )
    return images


def batches_of(options: Options, images: int, epoch: int, rank: int) -> list[list[int]]:
    """This rank's slices of an epoch's batches; images that fill no batch are left out."""
    order = torch.Generator().manual_seed(options.seed % 2**40 * 1_000_003 + epoch)
    batches = torch.randperm(images, generator=order).split(options.batch_size)
    share = options.batch_size // options.world_size
    return [
        cast("list[int]", batch[rank * share :][:share].tolist())
        for batch in batches
        if len(batch) == options.batch_size
    ]


def _loader(
    images: Dataset[tuple[Tensor, int]], batches: Iterable[list[int]], options: Options
) -> DataLoader[tuple[Tensor, int]]:
    pin = options.device == "cuda"
    return DataLoader(
        images, batch_sampler=batches, num_workers=options.num_workers, pin_memory=pin
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
            _recompute(block)
    dtype = None if options.compute_dtype == torch.float32 else options.compute_dtype
    report = shard_model(
        model.to(device),
        kinds,
        strategy=options.strategy,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    )
    return model, str(report)


def _recompute(block: nn.Module) -> None:
    forward = block.forward

    def again(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return cast(Tensor, forward(x))
        return cast(Tensor, recomputed(forward, x, use_reentrant=False))

    block.forward = again


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


@dataclass(frozen=True)
class Run:
    """The objects that every part of the loop uses."""

    options: Options
    images: Images
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def steps_an_epoch(self) -> int:
        return len(self.images.train) // self.options.batch_size


def _worker(options: Options, ranks: GivenRanks) -> int:
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = backend_for(options.device, options.local_world_size, cpu_offload=False)
    launch.init_process_group(ranks, backend, device)
    try:
        train(options, device)
    except (CheckpointError, UsageError) as error:  # on all ranks alike
        if ranks.rank == 0:
            return _complain(error)
        launch.let_rank_0_speak()
        return 2
    dist.barrier()
    dist.destroy_process_group()
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
    start = resume(run)
    _print_start(run, how, start)
    loss, top1, top5 = 0.0, 0.0, 0.0
    for epoch in range(start, options.num_epochs):
        begin = time.perf_counter()
        loss = train_epoch(run, epoch)
        seconds = time.perf_counter() - begin
        average_statistics(model)
        done, last = epoch + 1, epoch + 1 == options.num_epochs
        line = f"epoch {done}/{options.num_epochs}  loss {loss:.4f}"
        if last or done % options.eval_interval == 0:
            top1, top5 = evaluate(run)
            line += f"  held out {top1:.2%}, in the first five {top5:.2%}"
        if options.checkpoint is not None and (last or done % options.checkpoint_interval == 0):
            step = done * run.steps_an_epoch
            checkpoint.save(
                options.checkpoint, model, optimizer, step=step, extra=_facts(run, done), keep=KEEP
            )
        speed = run.steps_an_epoch * options.batch_size / seconds
        _print(f"{line}  {speed:,.0f} images/s  {seconds:.1f} s")
    if start >= options.num_epochs:
        top1, top5 = evaluate(run)
        _print(f"nothing is left to do: held out {top1:.2%}, in the first five {top5:.2%}")
    return Result(max(start, options.num_epochs), loss, top1, top5)


def train_epoch(run: Run, epoch: int) -> float:
    """Once through the images, each rank with its slice of each batch; the mean loss, in nats."""
    options, rank = run.options, dist.get_rank()
    run.model.train()
    torch.manual_seed(random.Random(f"{options.seed} {epoch} of {rank}").getrandbits(63))
    crops = Crops(run.images.train, run.images.augment, options.seed, epoch)
    batches = batches_of(options, len(run.images.train), epoch, rank)
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    for step, (images, labels) in enumerate(_loader(crops, batches, options)):
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(options, epoch, (step + 1) / len(batches))
        logits = run.model(images.to(run.device, options.compute_dtype, non_blocking=True))
        loss = F.cross_entropy(logits.float(), labels.to(run.device, non_blocking=True))
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        total += loss.detach().double()
    dist.all_reduce(total)
    return total.item() / len(batches) / options.world_size


@torch.no_grad()
def evaluate(run: Run) -> tuple[float, float]:
    """The shares of held-out images whose class is the likeliest, and among the likeliest five."""
    options = run.options
    run.model.eval()
    size = options.test_set_batch_size
    mine = shared_out(len(run.images.held_out), size, dist.get_rank(), options.world_size)
    loader = _loader(run.images.held_out, [chunk.tolist() for chunk, _ in mine], options)
    right = torch.zeros(2, dtype=torch.int64, device=run.device)
    for (images, labels), (_, counts) in zip(loader, mine, strict=True):
        logits = run.model(images.to(run.device, options.compute_dtype)).float()
        likeliest = logits.topk(min(5, logits.shape[1])).indices
        found = likeliest == labels.to(run.device)[:, None]
        right += torch.stack([found[:, :1].sum(), found.sum()]) * counts
    dist.all_reduce(right)
    top1, top5 = (right / len(run.images.held_out)).tolist()
    return top1, top5


# --- checkpoints ---------------------------------------------------------------------------------


def _facts(run: Run, epochs: int) -> dict[str, Any]:
    """The settings that a resumed run must share, and the number of epochs done."""
    given = asdict(run.options)
    names = (
        *("model", "image_size", "min_crop", "flip", "batch_size", "lr", "num_warmup_epochs"),
        *("lr_scheduler_divide_every_n_epochs", "lr_scheduler_divisor", "momentum"),
        *("weight_decay", "use_gradient_checkpointing", "seed"),
    )
    alike = {name: given[name] for name in names} | {
        "compute_dtype": str(run.options.compute_dtype),
        "classes": run.images.train.classes,
        "images": len(run.images.train),
    }
    return {"epochs": epochs, "alike": alike}


def resume(run: Run) -> int:
    """Load the newest checkpoint, if there is one to continue from; the number of epochs done.

    Raises:
        UsageError: it is of a run with other flags or images.
        CheckpointError: it cannot be loaded.
    """
    folder = run.options.checkpoint
    if folder is None or not run.options.resume:
        return 0
    found = torch.tensor(len(checkpoint.steps(folder)), device=run.device)
    dist.broadcast(found, 0)  # a shared folder may show others an older state
    if not found.item():
        return 0
    loaded = checkpoint.load(folder, run.model, run.optimizer)
    was, now = loaded.extra["alike"], _facts(run, 0)["alike"]
    for name in now:
        if was.get(name) != now[name]:
            raise UsageError(
                f"--resume: {folder} is of a run with another {name} ({was.get(name)}, not "
                f"{now[name]}), so it could not be gone on with"
            )
    return cast(int, loaded.extra["epochs"])


# --- what is printed -----------------------------------------------------------------------------


def _print(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def _print_start(run: Run, how: str, start: int) -> None:
    options, images = run.options, run.images
    numel = sum(param.numel() for param in run.model.parameters())
    _print(
        f"{len(images.train):,} images to train on, {len(images.held_out):,} held out, "
        f"{len(images.train.classes):,} classes; {options.model} with {numel:,} parameters, "
        f"{str(options.compute_dtype).removeprefix('torch.')}, {options.world_size} rank(s) on "
        f"{options.device}, threads per rank: {options.threads}\n{how}"
    )
    if start:
        _print(f"resumed from {options.checkpoint} behind epoch {start}")
    held = reporting.format_bytes(reporting.peak_memory(run.device))
    _print(f"{run.steps_an_epoch} steps an epoch; peak memory so far {held}")


if __name__ == "__main__":
    sys.exit(main())
