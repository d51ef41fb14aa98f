"""A reference to a parameter from before it was sharded, which follows what the module registers.

`fsdp2.sharding.aliases` finds them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

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
