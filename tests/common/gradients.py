"""Gradients of one model from all ranks, and from one process that stands for all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tests.common import models, parity

mlp = partial(models.seeded, models.MLP)
mlp_batches = partial(parity.regression_batches, models.DIM, 4, steps=3)

Compute = Callable[[nn.Module, int], None]
Grads = dict[str, "Tensor | None"]


def part(step: int, rank: int | None = None) -> Any:
    """A rank's part of the batch of a step; this rank's by default."""
    return parity.my_part(mlp_batches()[step], rank)


def unsharded_grads(model: nn.Module, compute: Compute) -> Grads:
    """The ranks' average gradients from one process: `compute(model, rank)` for each rank.

    Each rank's gradients are computed on their own and summed in rank order, as the ranks do.
    """
    total: dict[str, Tensor] = {}
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        compute(model, rank)
        for name, param in model.named_parameters():
            if param.grad is not None:
                total[name] = total[name] + param.grad if name in total else param.grad.clone()
    names = [name for name, _ in model.named_parameters()]
    return {n: total[n] / dist.get_world_size() if n in total else None for n in names}


def assert_like_unsharded(ours: Grads, model: nn.Module, compute: Compute, where: str = "") -> None:
    """The same bits on two ranks; on four, sums in another order."""
    expected = unsharded_grads(model, compute)
    if dist.get_world_size() == 2:
        parity.assert_equal(ours, expected, where or "unsharded")
    else:
        parity.assert_close(ours, expected, parity.REORDERED_FP32, where or "unsharded")
