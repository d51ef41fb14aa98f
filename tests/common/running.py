"""A small model to run, and what to ask of it while it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.common import models, parity
from tests.common.meshes import TORCH_VERSION

TORCHS_TAKES_DATACLASSES = TORCH_VERSION >= (2, 13)
"""Before, its hooks do not look into them: it fails, or trains something else."""

STEPS = 4

mlp = partial(models.seeded, models.MLP)
mlp_batches = partial(parity.regression_batches, models.DIM, 4, steps=STEPS)


def one_batch(outputs: int = 4) -> Any:
    return parity.regression_batches(models.DIM, outputs, steps=1)[0]


def fsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


def own_params(unit: nn.Module) -> list[nn.Parameter]:
    """The parameters now registered to a unit, without those of the units inside it."""
    params = list(unit.parameters(recurse=False))
    for child in unit.children():
        if not hasattr(child, "set_requires_gradient_sync"):
            params += own_params(child)
    return params


def is_sharded(unit: nn.Module) -> bool:
    """Whether the parameters registered to a unit are its shards; they never are in part."""
    kinds = {isinstance(param, DTensor) for param in own_params(unit)}
    assert len(kinds) == 1, f"{unit} registers shards and whole parameters at once"
    return kinds.pop()


def unsharded_grads(
    model: nn.Module, compute: Callable[[nn.Module, int], None]
) -> dict[str, Tensor | None]:
    """The ranks' average gradients from one process: runs `compute(model, rank)` for each rank."""
    for rank in range(dist.get_world_size()):
        compute(model, rank)
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= dist.get_world_size()
    return parity.full_grads(model)
