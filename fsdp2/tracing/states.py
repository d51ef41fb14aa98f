"""The optimizer states on the device: of optimizers that step during a trace, and of earlier ones.

A step reports its optimizer. An optimizer that stepped, or loaded its states, before the trace
began is found among the objects of this process, because torch has no list of optimizers.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import cast

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fsdp2.core.facts import ParamGroup, local_of


class OptimizerStates:
    """The optimizers that are known, and their bytes."""

    def __init__(self, groups: Iterable[ParamGroup], device_type: str) -> None:
        self._device = device_type
        managed = {id(param.sharded) for group in groups for param in group.params}
        self._known = {id(each): each for each in _optimizers() if _steps(each, managed)}

    def add(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        self._known[id(optimizer)] = optimizer

    @property
    def nbytes(self) -> int:
        """Bytes of all states; memory that several refer to is there once."""
        # A copy of states that an optimizer makes lives as long as this refers to it.
        found = tree_leaves([list(each.state.values()) for each in self._known.values()])
        tensors = [local_of(each) for each in found if isinstance(each, torch.Tensor)]
        storages = [t.untyped_storage() for t in tensors if t.device.type == self._device]
        return sum({storage._cdata: int(storage.nbytes()) for storage in storages}.values())


def _optimizers() -> list[Optimizer]:
    # The class is asked, as a proxy's own `__class__` may load what it stands for.
    return [cast(Optimizer, each) for each in gc.get_objects() if issubclass(type(each), Optimizer)]


def _steps(optimizer: Optimizer, managed: set[int]) -> bool:
    """Whether it holds a parameter of these; one that is half made holds none."""
    groups = vars(optimizer).get("param_groups", ())
    return any(id(param) in managed for group in groups for param in group["params"])
