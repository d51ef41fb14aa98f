"""Optimizers that were made before `fully_shard`.

optimizer ──holds──> parameter ──fully_shard──> sharded parameter
          ──repoint_optimizer───────────────────────^
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2.core.param import REPLACED, ShardedParam
from fsdp2.core.registrations import Registrations


def repoint_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that was made before `fully_shard` train the sharded parameters.

    `fully_shard` makes new parameter objects; an optimizer of the old ones raises at its next step.
    This puts the new ones into ``optimizer.param_groups``, in place, so that learning-rate
    schedules still apply, and moves the state over: a tensor of the parameter's shape (a momentum)
    becomes a DTensor of which each rank keeps its rows, anything else (a step count) stays as it
    is. It works after ``load_state_dict(assign=True)`` too, and for gathered parameters.

    Call it on every rank, after the last call of `fully_shard`. There is no communication: state
    must be the same on all ranks, as parameters must be for `fully_shard`.

    Args:
        optimizer: any optimizer; parameters that no unit manages are left alone.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.

    Example::

        optimizer = torch.optim.AdamW(model.parameters())
        fully_shard(model)
        repoint_optimizer(optimizer)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"repoint_optimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    states = optimizer.state
    for group in optimizer.param_groups:
        params: dict[nn.Parameter, None] = {}
        for old in group["params"]:
            replaced = old.__dict__.get(REPLACED)
            managed: ShardedParam | None = None if replaced is None else replaced()
            new = old if managed is None else managed.sharded
            params[new] = None
            if new is not old and old in states:
                state = states.pop(old)
                states[new] = {key: _moved(value, new) for key, value in state.items()}
        group["params"][:] = params
    optimizer.state = states  # of `FlatOptimizer`, it was a picture
    Registrations.count += 1  # its next step looks at it anew


def _moved(value: Any, param: Any) -> Any:
    """Optimizer state of a parameter, sharded like it where it has its shape."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != param.shape:
        return value
    moved = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
    moved._local_tensor = moved._local_tensor.clone()  # not a view that keeps the whole alive
    return moved
