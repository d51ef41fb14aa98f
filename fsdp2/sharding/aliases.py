"""References to a parameter from before it was sharded, besides the entries of modules.

self.__dict__["alias"] = w     followed: it holds what the module registers, at any moment
self.weights = [w, b]          so do lists and dicts that are attributes of modules
a closure, a view, a loss      refused: a gradient that comes to what the parameter was raises
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.params.aliases import REPLACED, Alias

_TORCHS = frozenset(nn.Module().__dict__)
"""Attributes of every module, such as its parameters and submodules, which are not aliases."""


def aliases_in(module: nn.Module) -> Iterator[tuple[Alias, nn.Parameter]]:
    """The aliases that attributes of ``module`` are or hold, and the parameters they refer to.

    None of a module that defines ``__setattr__``: that keeps its own in step, as `nn.LSTM` does.
    """
    if type(module).__setattr__ is not nn.Module.__setattr__:
        return
    own = module.__dict__.keys() - _TORCHS
    for attribute in [name for name in module.__dict__ if name in own]:
        value = module.__dict__[attribute]
        found: list[tuple[object, object]] = []
        if isinstance(value, nn.Parameter):
            found = [(None, value)]
        elif type(value) is list:
            found = list(enumerate(value))
        elif type(value) is dict:
            found = list(value.items())
        for key, param in found:
            if isinstance(param, nn.Parameter):
                yield Alias(module, attribute, key, param), param


def refuse_gradients(param: nn.Parameter, unit: str) -> None:
    """Make a backward raise if its gradient reaches a parameter from before it was sharded.

    Args:
        param: the object from before; its own hooks are elsewhere by now.
        unit: name of the unit that manages it, for a message after that was deleted.
    """
    reference = weakref.ref(param)

    def refuse(_: torch.Tensor) -> NoReturn:
        former: object = reference()
        managed = former.__dict__[REPLACED]()
        name = f"'{managed.name}'" if managed is not None else f"of the unit of {unit}"
        raise coded(
            ShardingStateError,
            "gradient-of-former",
            f"autograd computed a gradient for the parameter {name} that fully_shard replaced; a "
            f"list, a closure, a view or a loss still refers to it, so it would train nothing: "
            f"read the parameter from its module, in the forward of its unit",
        )

    hooks: Any = OrderedDict({0: refuse})
    param._backward_hooks = hooks
