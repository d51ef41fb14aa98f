"""What optimizers of this process hold when they step.

torch.optim hooks, before and after every step
    holds a managed parameter            ──> OptimizerSteps: what is gathered is out of date
                                             the host waits for copies of offloaded shards
    holds one that is not trained by it  ──> an error: it was replaced, or is a gathered form
"""

from __future__ import annotations

import functools
import weakref

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp2.core.config import ShardingStateError
from fsdp2.core.modules.dynamo import uncompiled
from fsdp2.core.modules.registrations import Registrations
from fsdp2.core.params.aliases import REPLACED
from fsdp2.core.params.param import GATHERED, OWNER, TIED
from fsdp2.core.progress import OptimizerSteps
from fsdp2.core.schedule.scheduler import offloading, settle_all


def watch_optimizers() -> None:
    """From the first call on, look at the parameters of every optimizer that steps.

    Steps of optimizers that hold a managed parameter are counted (`OptimizerSteps`), and wait until
    no copy reads offloaded shards (invariant I8). One that holds
    a parameter that a unit has replaced, or a gathered one, would train nothing, so its step
    raises. Each optimizer is looked at again when it has another number of parameter groups, and
    when anything was registered or sharded since.
    """
    Registrations.count += 1
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int, bool]]
    seen = weakref.WeakKeyDictionary()

    @uncompiled
    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        number, count = len(optimizer.param_groups), Registrations.count
        known = seen.get(optimizer)
        if known is None or known[0] != number or known[1] != count:
            seen[optimizer] = known = number, count, _holds_managed(optimizer)
        if known[2]:
            OptimizerSteps.count += 1  # a step that raises may have changed parameters
            if offloading:
                settle_all()

    @uncompiled
    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer in seen and seen[optimizer][2]:
            OptimizerSteps.count += 1
            OptimizerSteps.ended += 1

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _holds_managed(optimizer: torch.optim.Optimizer) -> bool:
    managed = False
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            attributes = param.__dict__
            if GATHERED in attributes:
                raise ShardingStateError(
                    f"this {type(optimizer).__name__} holds the gathered parameter "
                    f"'{attributes[GATHERED]}', not the sharded one: it was made while its unit "
                    f"was gathered; call reshard() on the module, then make the optimizer, or "
                    f"call fsdp2.repoint_optimizer(optimizer)"
                )
            replaced = attributes[REPLACED]() if REPLACED in attributes else None
            if replaced is not None and TIED in attributes:
                raise ShardingStateError(
                    f"this {type(optimizer).__name__} holds parameter '{attributes[TIED]}', which "
                    f"was tied to '{replaced.name}' since, so that it trains nothing; call "
                    f"fsdp2.repoint_optimizer(optimizer), or make the optimizer afterwards"
                )
            if replaced is not None:
                raise ShardingStateError(
                    f"this {type(optimizer).__name__} holds parameter '{replaced.name}'"
                    f" as it was before fully_shard or load_state_dict(assign=True) replaced it; "
                    f"call fsdp2.repoint_optimizer(optimizer), or make the optimizer afterwards"
                )
            managed = managed or OWNER in attributes
    return managed
