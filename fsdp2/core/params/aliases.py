"""References to a parameter from before it was sharded, besides the entries of modules.

self.__dict__["alias"] = w     followed: it holds what the module registers, at any moment
self.weights = [w, b]          followed: lists and dicts that are attributes of modules
a closure, a view, a loss      refused: a gradient that comes to what the parameter was raises
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp2.core.errors import ShardingStateError, coded

REPLACED = "_fsdp2_replaced"
"""Attribute of a parameter object that is not the optimizer's: a weak reference to the
`ShardedParam` of the one that is."""


class Alias:
    """A place in an attribute of a module that refers to a parameter: a store of one entry.

    Args:
        module: the module, which it does not keep alive.
        attribute: the attribute's name.
        key: where in the attribute, if that is a list or a dict; ``None``: the attribute itself.
        value: the referenced object. If the user assigns another one, that stays.
    """

    __slots__ = ("_attribute", "_key", "_module", "_value")

    def __init__(
        self, module: nn.Module, attribute: str, key: object, value: torch.Tensor | None
    ) -> None:
        self._module = weakref.ref(module)
        self._attribute = attribute
        self._key = key
        self._value = None if value is None else weakref.ref(value)

    def __setitem__(self, _: str, param: nn.Parameter) -> None:
        module = self._module()
        if module is None:
            return
        place: Any = module.__dict__
        key: object = self._attribute
        if self._key is not None:
            place, key = place.get(key), self._key
        try:
            present = place[key]
        except (IndexError, KeyError, TypeError):
            return  # the user's by now
        if self._value is not None and present is self._value():
            place[key] = param
            self._value = weakref.ref(param)


_TORCHS = frozenset(nn.Module().__dict__)
"""Attributes of every module, such as its parameters and submodules, which are not aliases."""


def aliases_in(modules: Iterable[nn.Module]) -> Iterator[tuple[Alias, nn.Parameter]]:
    """The aliases that attributes of modules are or hold, and the parameters they refer to.

    None of a module that defines ``__setattr__``: that keeps its own in step, as `nn.LSTM` does.
    """
    attributes = (
        (module, name, value)
        for module in modules
        if type(module).__setattr__ is nn.Module.__setattr__
        for name, value in list(module.__dict__.items())
        if name not in _TORCHS and isinstance(value, nn.Parameter | list | dict)
    )
    for module, attribute, value in attributes:
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
