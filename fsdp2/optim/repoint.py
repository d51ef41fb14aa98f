"""Optimizers that were created before `fully_shard`.

optimizer ──holds──> parameter ──fully_shard──> sharded parameter
          ──repoint_optimizer───────────────────────^
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2.core.errors import coded
from fsdp2.core.facts import (
    Counts,
    ShardedParam,
    form_of,
    local_of,
    own_slot,
    with_dtype,
    wrap_local,
)


def repoint_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that was created before `fully_shard` train the sharded parameters.

    `fully_shard` creates new parameter objects; an optimizer of the old ones raises at its next
    step. This function puts the new ones into ``optimizer.param_groups``, in place, so that
    learning-rate schedules still apply, and moves the state: a tensor of the parameter's shape (a
    momentum) becomes a DTensor of which each rank keeps a shard; other state (a step count) does
    not change. It also works after ``load_state_dict(assign=True)``, and for unsharded parameters.

    Call it on every rank, after the last call of `fully_shard`. State must be the same on all ranks
    (for tensor-parallel parameters, on all ranks that hold the same part), as `fully_shard` also
    requires for parameters. Nothing is communicated, except sums of partial tensor-parallel state.

    Args:
        optimizer: any optimizer; parameters that no unit manages do not change.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.

    Example::

        optimizer = torch.optim.AdamW(model.parameters())
        fully_shard(model)
        repoint_optimizer(optimizer)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise coded(
            TypeError,
            "repoint-type",
            f"repoint_optimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}",
        )
    states = optimizer.state
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for group in optimizer.param_groups:
        params: dict[nn.Parameter, None] = {}
        for old in group["params"]:
            form = form_of(old)
            managed = None if form is None else form.param()
            new = old if managed is None else managed.sharded
            if new is not old and id(new) in held:  # since tied to one that it trains in any case
                states.pop(old, None)
                continue
            held.add(id(new))
            params[new] = None
            if managed is not None and new is not old and old in states:
                state = states.pop(old)
                states[new] = {key: _moved(value, old, managed) for key, value in state.items()}
        group["params"][:] = params
    optimizer.state = states  # for `FlatOptimizer`, it was a copy
    Counts.registrations += 1  # its next step checks it again


def _moved(value: object, old: nn.Parameter, managed: ShardedParam) -> object:
    """Optimizer state of a parameter, sharded like the parameter if it has its shape."""
    param = managed.sharded
    assert isinstance(param, DTensor)
    if not isinstance(value, torch.Tensor) or value.shape != param.shape:
        return value
    if not isinstance(value, DTensor):
        if managed.axes.levels:
            slot = own_slot(managed.axes, managed.shape, managed.cut)
            rows = slot.part(managed.laid_out(value), managed.axes.piece_rank)
            return wrap_local(managed.as_seen(rows).clone(), with_dtype(param._spec, value.dtype))
        moved = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
        moved._local_tensor = moved._local_tensor.clone()  # frees the full tensor
        return moved
    if not isinstance(old, DTensor) or value.device_mesh != old.device_mesh:
        return value
    if local_of(old).shape != managed.shape:
        return value
    # State may be a partial sum, if it is a copy of a gradient: those of norms are.
    whole = local_of(value.redistribute(placements=old.placements))
    slot = own_slot(managed.axes, managed.shape, managed.cut)
    rows = slot.part(whole, managed.axes.piece_rank).clone()
    return wrap_local(rows, with_dtype(param._spec, value.dtype))
