"""Walks through the containers that modules take and return.

Known containers: tuple, named tuple, list, dict (and ordered or default dict), set, dataclass
instance, `torch.nn.utils.rnn.PackedSequence`. Anything else is left as it is. The common case,
a tuple of tensors, costs one `type` test an element.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

TensorMap = Callable[[torch.Tensor], torch.Tensor]


def grad_tensors(
    value: Any, found: list[torch.Tensor], others: list[torch.Tensor] | None = None
) -> None:
    """Append every tensor inside ``value`` that requires grad to ``found``, in walk order.

    Args:
        value: nested tuples, lists, sets, dicts and dataclasses of anything.
        found: a list to append to.
        others: one for tensors that require none, if they are wanted.
    """
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            found.append(value)
        elif others is not None:
            others.append(value)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            if type(item) is not torch.Tensor:
                grad_tensors(item, found, others)
            elif item.requires_grad:  # most are tensors: a call each costs more than the look
                found.append(item)
            elif others is not None:
                others.append(item)
    elif isinstance(value, dict):
        for item in value.values():
            grad_tensors(item, found, others)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            grad_tensors(getattr(value, field.name, None), found, others)


def map_tensors(function: TensorMap, value: Any) -> Any:
    """A copy of ``value`` with ``function`` applied to every tensor.

    Containers in which no tensor changed are returned as they are, the same objects.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        return _map_fields(function, value, value._fields, type(value))
    if isinstance(value, tuple):
        return _map_tuple(function, value)
    if isinstance(value, list):
        mapped = [map_tensors(function, item) for item in value]
        return mapped if _changed(mapped, value) else value
    if isinstance(value, dict):
        return _map_dict(function, value)
    if isinstance(value, (set, frozenset)):
        items = list(value)
        mapped = [map_tensors(function, item) for item in items]
        return type(value)(mapped) if _changed(mapped, items) else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(function, value)
    return value


def cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors in ``dtype``."""

    def to_dtype(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.dtype != dtype:
            return tensor.to(dtype)
        return tensor

    return map_tensors(to_dtype, value)


def replace_marked(value: Any, marked: Iterator[torch.Tensor]) -> Any:
    """``value`` with its tensors that require grad replaced, in the order of `grad_tensors`."""
    return map_tensors(lambda tensor: next(marked) if tensor.requires_grad else tensor, value)


def unbatched(tensor: torch.Tensor) -> torch.Tensor:
    """What is inside ``vmap``'s batches: outside of it, gradients come to that."""
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _changed(new: Any, old: Any) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))


def _map_tuple(function: TensorMap, value: tuple[Any, ...]) -> Any:
    mapped = [map_tensors(function, item) for item in value]
    if not _changed(mapped, value):
        return value
    if hasattr(value, "_fields"):  # a named tuple takes its items one by one
        return type(value)(*mapped)
    return type(value)(mapped)


def _map_dict(function: TensorMap, value: dict[Any, Any]) -> Any:
    mapped = {key: map_tensors(function, item) for key, item in value.items()}
    if not _changed(mapped.values(), value.values()):
        return value
    clone = copy.copy(value)  # keeps the class, the order, a default factory and attributes
    for key, item in mapped.items():
        if item is not value[key]:
            clone[key] = item
    return clone


def _map_fields(function: TensorMap, value: Any, names: tuple[str, ...], rebuild: Any) -> Any:
    old = [getattr(value, name) for name in names]
    new = [map_tensors(function, item) for item in old]
    return rebuild(*new) if _changed(new, old) else value


def _map_dataclass(function: TensorMap, value: Any) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        if not hasattr(value, field.name):
            continue
        old = getattr(value, field.name)
        new = map_tensors(function, old)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return value
    clone = copy.copy(value)  # no __init__: it may compute or check
    for name, item in changed.items():
        object.__setattr__(clone, name, item)
    return clone
