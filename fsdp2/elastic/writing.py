"""Which group writes a checkpoint: all have the same weights after a commit, so one is enough.

The ranks of that group write, as `fsdp2.checkpoint.save` does; a step's folder is that of any run,
and any number of groups of any size loads it. If the group dies in the middle, the steps that were
complete stay, and the next save has another writer.
"""

from __future__ import annotations

from torch import nn

from fsdp2.checkpoint.saving import forget_load
from fsdp2.elastic.managers import Manager


def is_writer(manager: Manager, model: nn.Module) -> bool:
    """Whether this group writes the checkpoint of the step that was just committed.

    One group does: the first of those that took part in the step. The others train on. Call it on
    all ranks of all groups, after the commit of a step that is to be saved; without communication.

    Args:
        manager: whose step was committed.
        model: the saved model. If another group writes, this group's next save continues from
            there, and replaces no steps (`fsdp2.checkpoint.replaced`).

    Example::

        if committed and manager.current_step() % 100 == 0 and elastic.is_writer(manager, model):
            extra = {"manager": manager.state_dict()}
            fsdp2.checkpoint.save("run", model, optimizer, step=manager.current_step(), extra=extra)

        loaded = fsdp2.checkpoint.load("run", model, optimizer)  # in all groups, at the start
        manager.load_state_dict(loaded.extra["manager"])
    """
    if manager.participating_rank() == 0:
        return True
    forget_load(model)
    return False
