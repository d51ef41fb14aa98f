"""Which batch a group trains on in a step, and which group writes a checkpoint.

    committed 7 batches, groups A B C take part     A: 7   B: 8   C: 9       the step is dropped
                         A and C are left           A: 7   C: 8              it is committed
    committed 9 batches, B is back                  A: 9   B: 10  C: 11

No batch is in two steps that were committed, and none is left out: what a dropped step was to train
on is trained on next. Nothing is kept besides the number of committed batches, which the manager's
``state_dict()`` has: it heals, and is saved, with that. All groups have the same weights after a
commit, so one writes; any number of groups of any size loads its checkpoint.
"""

from __future__ import annotations

import torch
from torch import nn

from fsdp2.checkpoint.retention import forget_load
from fsdp2.core.errors import coded
from fsdp2.elastic.managers import Manager


def batch_number(manager: Manager) -> int:
    """The number of the batch that this group trains on in this step; all its ranks get the same.

    Waits for the quorum of the step: call it after ``start_quorum()``. A group that heals in this
    step, or is a spare, does not count, and may train on anything.

    Args:
        manager: that has begun a step.

    Example::

        batch = batches[elastic.batch_number(manager)]
    """
    place = manager.participating_rank()
    return manager.batches_committed() + (place or 0)


class Batches:
    """Batches of a shuffled data set by number, without end. Each epoch has a different order.

    The order is a function of only ``seed`` and the epoch, so that any number of groups agrees
    on it. Examples that do not fill a batch are left out of an epoch.

    Args:
        length: examples of the data set.
        size: examples of a batch: of all ranks of a group together.
        seed: of the orders. Default 0.

    Raises:
        ValueError: the data set has not as many examples as a batch.

    Example::

        batches = elastic.Batches(len(dataset), size=64)
        for at in batches[elastic.batch_number(manager)][rank::ranks]:
            dataset[at]
    """

    def __init__(self, length: int, size: int, seed: int = 0) -> None:
        if not 0 < size <= length:
            raise coded(
                ValueError,
                "elastic-no-batch",
                f"Batches(length={length}, size={size}) has no batch; pass a size from 1 to the "
                f"number of examples",
            )
        self._length, self._size, self._seed = length, size, seed
        self._epoch, self._order = -1, torch.empty(0)

    def __getitem__(self, number: int) -> list[int]:
        """Places in the data set of one batch's examples."""
        epoch, at = divmod(number, self._length // self._size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(1_000_003 * self._seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(self._length, generator=generator)
        return self._order[at * self._size : (at + 1) * self._size].tolist()


def is_writer(manager: Manager, model: nn.Module) -> bool:
    """Whether this group writes the checkpoint of the step that was just committed.

    One group does: the first of those that took part in the step. Call it on all ranks of all
    groups, after the commit of a step that you save. It does not communicate.

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
