"""Code that the examples of image classification share: batch norm, evaluation, torchvision.

running statistics   each rank's own in training; `average_statistics` gives all the mean
an evaluation        `shared_out` gives each rank the same number of forwards
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .flags import UsageError

Strategy = Literal["zero3", "zero2", "zero1", "replicated", "hybrid", "hybrid-zero2"]
STRATEGIES = ("zero3", "zero2", "zero1", "replicated", "hybrid", "hybrid-zero2")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
