"""Code that the examples of image classification share: options, batches, an epoch, an evaluation.

A run is a function of its flags: the order of images depends on (seed, epoch), and each rank takes
its slice of each global batch. Running statistics are each rank's own during an epoch; at its end
all ranks get the mean.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

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
    num_workers: int | None = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.compute_dtype == "bfloat16" else torch.float32

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """Parameters in the dtype of compute, sums of gradients in float32."""
        param_dtype = None if self.dtype == torch.float32 else self.dtype
        return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)


class Images(NamedTuple):
    """Data sets of images fp32 [channels, height, width] and their labels, from 0."""

    train: Any
    held_out: Any


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


def batches_of(options: ImageOptions, images: int, epoch: int, rank: int) -> list[list[int]]:
    """This rank's slices of an epoch's batches; images that fill no batch are left out."""
    sentence = f"{images} images are no batch of --batch_size {options.batch_size}"
    check((images < options.batch_size, sentence))
    order = torch.Generator().manual_seed(options.seed % 2**40 * 1_000_003 + epoch)
    batches = torch.randperm(images, generator=order).split(options.batch_size)
    share = options.batch_size // options.world_size
    whole = [batch for batch in batches if len(batch) == options.batch_size]
    return [batch[rank * share :][:share].tolist() for batch in whole]


def shared_out(images: int, at_once: int, rank: int, num_ranks: int) -> list[list[int]]:
    """The forwards of one rank: numbers of images, `at_once` or, of the last ones, fewer.

    Every rank runs as many forwards, as each gathers parameters from all: ranks that are left over
    at the end run the first images once more.
    """
    chunks = torch.arange(images).split(at_once)
    mine = range(rank, -(-len(chunks) // num_ranks) * num_ranks, num_ranks)
    return [chunks[i % len(chunks)].tolist() for i in mine]


@dataclass(frozen=True)
class Run:
    """A model in training, and its images."""

    options: ImageOptions
    images: Images
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def _batches(
        self, images: Dataset[tuple[Tensor, int]], numbers: list[list[int]]
    ) -> DataLoader[tuple[Tensor, int]]:
        pin, workers = self.options.device == "cuda", self.options.num_workers or 0
        return DataLoader(images, batch_sampler=numbers, num_workers=workers, pin_memory=pin)

    def train(self, epoch: int, rate_of: Callable[[float], float]) -> float:
        """Once through the images, each rank with its slice of each batch.

        Args:
            epoch: which, from 0.
            rate_of: the learning rate of a step, by the share of the epoch that it completes.

        Returns:
            All ranks' mean loss, in nats.
        """
        options, device = self.options, self.device
        numbers = batches_of(options, len(self.images.train), epoch, dist.get_rank())
        self.model.train()
        total = torch.zeros((), dtype=torch.float64, device=device)
        for step, (pixels, labels) in enumerate(self._batches(self.images.train, numbers), 1):
            for group in self.optimizer.param_groups:
                group["lr"] = rate_of(step / len(numbers))
            logits = self.model(pixels.to(device, options.dtype, non_blocking=True))
            loss = F.cross_entropy(logits.float(), labels.to(device, non_blocking=True))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total += loss.detach().double()
        dist.all_reduce(total)
        average_statistics(self.model)
        return total.item() / len(numbers) / options.world_size

    @torch.no_grad()
    def answers(self, at_once: int, unsharded: nn.Module | None = None) -> Tensor:
        """The likeliest classes of each held-out image, int64 [images, 5 or fewer], on every rank.

        Args:
            at_once: images in one forward.
            unsharded: a model that is asked instead; only this rank has it, and the answers.
        """
        model = unsharded or self.model
        rank, ranks = (0, 1) if unsharded else (dist.get_rank(), dist.get_world_size())
        model.eval()
        images = self.images.held_out
        numbers = shared_out(len(images), at_once, rank, ranks)
        answers = torch.zeros(0, dtype=torch.int64, device=self.device)
        for (pixels, _), chunk in zip(self._batches(images, numbers), numbers, strict=True):
            logits = model(pixels.to(self.device, self.options.dtype)).float()
            likeliest = logits.topk(min(5, logits.shape[1])).indices
            if not len(answers):
                answers = likeliest.new_zeros(len(images), likeliest.shape[1])
            answers[chunk] = likeliest
        if ranks > 1:
            # Images that two ranks have run are the same forward on both, with the same answers.
            dist.all_reduce(answers, dist.ReduceOp.MAX)
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
