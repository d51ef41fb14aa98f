"""Code that the examples of image classification share: options, batches, an epoch, an evaluation.

A run is a function of its flags: the order of images depends on (seed, epoch), and each rank takes
its slice of each global batch. Running statistics are each rank's own during an epoch; at its end
all ranks get the mean.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy

from .flags import Common, UsageError, check, count, flag, not_negative, rate

Strategy = Literal["zero3", "zero2", "zero1", "replicated", "hybrid", "hybrid-zero2"]
STRATEGIES = ("zero3", "zero2", "zero1", "replicated", "hybrid", "hybrid-zero2")


@dataclass(frozen=True)
class ImageOptions(Common):
    """The flags of both examples; names are those of PyTorch/XLA's scripts."""

    strategy: Strategy | None = flag("of shard_model (zero3)", choices=STRATEGIES)
    use_gradient_checkpointing: bool = flag("recompute blocks in backward")
    compute_dtype: str = flag(
        "dtype of compute (float32)", choices=["float32", "bfloat16"], default="float32"
    )
    batch_size: int = flag("images per step, over all ranks", count, 64)
    drop_last: bool = flag("leave out what fills no batch: done always")
    num_epochs: int = flag("times through the images", count, 10)
    lr: float = flag("learning rate of the first step", rate, 0.05)
    seed: int = flag("fixes weights and the order of images", not_negative, 1)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.compute_dtype == "bfloat16" else torch.float32

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """Parameters in the dtype of compute, sums of gradients in float32."""
        param_dtype = None if self.dtype == torch.float32 else self.dtype
        return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)


class BatchNorm(nn.BatchNorm2d):
    """Batch norm in float32 for any compute dtype.

    In bfloat16, running statistics stop changing once a change is less than 1/256 of it.
    """

    def forward(self, x: Tensor) -> Tensor:
        normed = F.batch_norm(
            x.float(),
            self.running_mean,
            self.running_var,
            self.weight.float(),
            self.bias.float(),
            self.training,
            self.momentum or 0.0,
            self.eps,
        )
        return normed.to(x.dtype)


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Give all ranks the mean of their batch norms' running statistics.

    Each rank has those of its own images. One rank's are saved, and ranks share an evaluation: both
    are of one model only if all ranks have the same.
    """
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


def shared_out(images: int, at_once: int, rank: int, num_ranks: int) -> list[tuple[Tensor, bool]]:
    """The forwards of one rank: numbers of images, int64 [n], n <= `at_once`; whether they count.

    Every rank runs as many forwards, as each gathers parameters from all: ranks that are left over
    at the end run the first images once more, and drop the answers.
    """
    chunks = torch.arange(images).split(at_once)
    mine = range(rank, -(-len(chunks) // num_ranks) * num_ranks, num_ranks)
    return [(chunks[i], True) if i < len(chunks) else (chunks[0], False) for i in mine]


def batches_of(options: ImageOptions, images: int, epoch: int, rank: int) -> list[list[int]]:
    """This rank's slices of an epoch's batches; images that fill no batch are left out."""
    sentence = f"{images} images are no batch of --batch_size {options.batch_size}"
    check((images < options.batch_size, sentence))
    order = torch.Generator().manual_seed(options.seed % 2**40 * 1_000_003 + epoch)
    batches = torch.randperm(images, generator=order).split(options.batch_size)
    share = options.batch_size // options.world_size
    whole = [batch for batch in batches if len(batch) == options.batch_size]
    return [[int(i) for i in batch[rank * share :][:share]] for batch in whole]


def train_epoch(
    options: ImageOptions,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    rates: Sequence[float],
    device: torch.device,
) -> float:
    """Train on this rank's images and labels, a step per rate; all ranks' mean loss, in nats."""
    model.train()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (images, labels), lr in zip(batches, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        logits = model(images.to(device, options.dtype, non_blocking=True))
        loss = F.cross_entropy(logits.float(), labels.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach().double()
    dist.all_reduce(total)
    average_statistics(model)
    return total.item() / len(rates) / options.world_size


@torch.no_grad()
def answers_of(
    model: nn.Module,
    read: Callable[[list[list[int]]], Iterable[Tensor]],
    images: int,
    at_once: int,
    num_ranks: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """The likeliest classes of each image, int64 [images, 5 or fewer], the same on every rank.

    Args:
        model: on `num_ranks` ranks; with 1, only this rank has it.
        read: yields a batch of images for each list of their numbers.
        images: how many.
        at_once: images in one forward.
        num_ranks: which share the forwards out.
        device: of the model.
        dtype: of compute.
    """
    model.eval()
    mine = shared_out(images, at_once, dist.get_rank() if num_ranks > 1 else 0, num_ranks)
    answers = torch.zeros(0, dtype=torch.int64, device=device)
    batches = read([[int(i) for i in chunk] for chunk, _ in mine])
    for batch, (chunk, counts) in zip(batches, mine, strict=True):
        logits = model(batch.to(device, dtype)).float()
        likeliest = logits.topk(min(5, logits.shape[1])).indices
        if not len(answers):
            answers = likeliest.new_zeros(images, likeliest.shape[1])
        if counts:
            answers[chunk] = likeliest
    if num_ranks > 1:
        dist.all_reduce(answers)
    return answers


_operators: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """torchvision, also where its kernels do not load: nothing here calls them.

    The wheels on PyPI are linked with CUDA. Beside a CPU build of torch their operators are
    missing, and the import asks for two of them by name.

    Raises:
        ModuleNotFoundError: it is not installed.
        UsageError: it is not for this torch.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _operators:
            raise UsageError(f"torchvision does not fit this torch: {error}") from error
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _operators.append(library)  # its definitions live as long as it does
    return importlib.import_module("torchvision")
