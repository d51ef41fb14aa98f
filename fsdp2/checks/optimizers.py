"""The parameters that optimizers hold when they step: one that would train nothing raises.

A parameter that a unit has replaced, and an unsharded form of one, are not trained. Kernels that
read a tensor's own memory find none in a DTensor. Each optimizer is checked again when it, or the
set of sharded parameters, has changed.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.modules import optimizers
from fsdp2.core.params.param import OWNER, form_of

_KERNELS = ("bitsandbytes.", "deepspeed.ops.")
"""Packages whose optimizers pass parameters to kernels that read a tensor's own memory."""


def _refuse_untrained(optimizer: torch.optim.Optimizer) -> None:
    homes = (kind.__module__ for kind in type(optimizer).__mro__)
    by_kernels = next((home for home in homes if home.startswith(_KERNELS)), "").split(".")[0]
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            attributes = param.__dict__
            if by_kernels and OWNER in attributes and isinstance(param, DTensor):
                raise coded(
                    ShardingStateError,
                    "optimizer-kernels",
                    f"this {type(optimizer).__name__} of {by_kernels} passes parameters of unit "
                    f"'{attributes[OWNER]}' to kernels that cannot read a DTensor; use "
                    f"fsdp2.optim.FlatOptimizer with its 32-bit classes, or torchao's 8-bit "
                    f"classes over the parameters",
                )
            form = form_of(param)
            if form is not None and form.gathered is not None:
                raise coded(
                    ShardingStateError,
                    "optimizer-of-gathered",
                    f"this {type(optimizer).__name__} holds the gathered parameter "
                    f"'{form.gathered}', not the sharded one: it was created while its "
                    f"unit was unsharded; call reshard() on the module, then create the "
                    f"optimizer, or call fsdp2.optim.repoint_optimizer(optimizer)",
                )
            replaced = None if form is None else form.param()
            if replaced is not None and form is not None and form.tied is not None:
                raise coded(
                    ShardingStateError,
                    "optimizer-holds-tied",
                    f"this {type(optimizer).__name__} holds parameter '{form.tied}', which "
                    f"has since been tied to '{replaced.name}', so it trains nothing; call "
                    f"fsdp2.optim.repoint_optimizer(optimizer), or create the optimizer afterwards",
                )
            if replaced is not None:
                raise coded(
                    ShardingStateError,
                    "stale-optimizer",
                    f"this {type(optimizer).__name__} holds parameter '{replaced.name}' as it was "
                    f"before fully_shard or load_state_dict(assign=True) replaced it; call "
                    f"fsdp2.optim.repoint_optimizer(optimizer), or create the optimizer afterwards",
                )


optimizers.changed.add(_refuse_untrained)
