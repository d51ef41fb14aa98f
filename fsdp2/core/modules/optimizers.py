"""The one watcher of this process's optimizers, before and after every step.

torch.optim hooks
    each step                                ──> steps
    the first, or something was registered   ──> changed: what the optimizer holds is looked at
    it holds a managed parameter             ──> Counts.steps: what is gathered is out of date
                                                 the host waits for copies of offloaded shards
"""

from __future__ import annotations

import functools
import weakref

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp2.core.modules.dynamo import uncompiled
from fsdp2.core.notices import Notice
from fsdp2.core.params.param import OWNER
from fsdp2.core.progress import Counts
from fsdp2.core.schedule.scheduler import offloading, settle_all

changed: Notice[[torch.optim.Optimizer]] = Notice()
"""Called before a step of an optimizer that is its first, or the first since anything was
registered or sharded, or the optimizer has another number of parameter groups."""

steps: Notice[[torch.optim.Optimizer]] = Notice()
"""Called before each step of an optimizer, whatever it holds."""


def watch_optimizers() -> None:
    """From the first call on, look at every optimizer that steps; now look at each again.

    Steps of optimizers that hold a managed parameter are counted (`Counts.steps`), and wait until
    no copy reads offloaded shards (invariant I8).
    """
    Counts.registrations += 1
    watch_steps()


@functools.cache
def watch_steps() -> None:
    """Count the steps of all optimizers, from the first call on."""
    seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int, bool]]
    seen = weakref.WeakKeyDictionary()

    @uncompiled
    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        number, count = len(optimizer.param_groups), Counts.registrations
        known = seen.get(optimizer)
        if known is None or known[0] != number or known[1] != count:
            changed(optimizer)
            seen[optimizer] = known = number, count, _holds_managed(optimizer)
        if steps.functions:
            steps(optimizer)
        if known[2]:
            Counts.steps += 1  # a step that raises may have changed parameters
            if offloading:
                settle_all()

    @uncompiled
    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer in seen and seen[optimizer][2]:
            Counts.steps += 1
            Counts.ended_steps += 1

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _holds_managed(optimizer: torch.optim.Optimizer) -> bool:
    return any(OWNER in param.__dict__ for g in optimizer.param_groups for param in g["params"])
