"""Walks through the containers that modules take and return.

Known containers: tuple, named tuple, list, dict (and ordered or default dict), set, dataclass
instance, `torch.nn.utils.rnn.PackedSequence`, `types.SimpleNamespace`, `collections.UserDict`, and
what is registered with `torch.utils._pytree`. Other objects are left unchanged. The common case, a
tuple of tensors, costs one `type` test an element.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES

T = TypeVar("T")
TensorMap = Callable[[torch.Tensor], torch.Tensor]


def grad_tensors(
    value: object, found: list[torch.Tensor], others: list[torch.Tensor] | None = None
) -> None:
    """Append tensors in ``value``, in order, to ``found`` or, without grad, to ``others``."""
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
    elif (parts := _parts(value)) is not None:
        for item in parts[0]:
            grad_tensors(item, found, others)


def map_tensors(function: TensorMap, value: object) -> Any:
    """``value`` with ``function`` applied to every tensor: a copy, unless all stay the same."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is tuple:  # as in most calls
        mapped = [map_tensors(function, item) for item in value]
        return tuple(mapped) if _changed(mapped, value) else value
    parts = _parts(value)
    if parts is None:
        return value
    items, rebuild = parts
    mapped = [map_tensors(function, item) for item in items]
    return rebuild(mapped) if _changed(mapped, items) else value


def cast(value: T, dtype: torch.dtype) -> T:
    """``value`` with its floating-point tensors in ``dtype``."""

    def to_dtype(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.dtype != dtype:
            return tensor.to(dtype)
        return tensor

    changed: T = map_tensors(to_dtype, value)
    return changed


def unbatched(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside ``vmap``'s batches: outside of it, gradients arrive at that."""
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def outlives_transform(tensor: torch.Tensor) -> bool:
    """Whether a derivative of ``torch.func`` for ``tensor`` has a graph after the transform."""
    functorch = torch._C._functorch
    if functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    while not tensor.requires_grad:
        if not functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = functorch.get_unwrapped(tensor)
    return True


def _changed(new: Iterable[object], old: Iterable[object]) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))


def _parts(value: object) -> tuple[Collection[object], Callable[[list[object]], object]] | None:
    """The items of a container, and a function that makes one like it of others; else ``None``."""
    kind: Any = type(value)
    if isinstance(value, PackedSequence):
        return list(value), lambda items: kind(*items)
    if isinstance(value, tuple):  # a named tuple takes its items one by one
        return value, lambda items: kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, list):
        return value, list
    if isinstance(value, (set, frozenset)):
        return list(value), kind
    if isinstance(value, dict):
        return value.values(), functools.partial(_with_items, value, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        fields = {name: getattr(value, name) for name in names}
        return fields.values(), functools.partial(_with_items, value, fields)
    if isinstance(value, (UserDict, SimpleNamespace)):
        held = _items_of(value)
        return held.values(), functools.partial(_with_items, value, held)
    if kind in SUPPORTED_NODES:
        node = SUPPORTED_NODES[kind]
        flat, context = node.flatten_fn(value)
        return flat, lambda items: node.unflatten_fn(items, context)
    return None


def _items_of(value: UserDict[str, object] | SimpleNamespace) -> dict[str, object]:
    return value.data if isinstance(value, UserDict) else vars(value)


def _with_items(value: T, old: Mapping[str, object], items: Sequence[object]) -> T:
    """A copy of a container with other items, the same order and attributes; no `__init__`."""
    clone = copy.copy(value)
    for (key, before), item in zip(old.items(), items, strict=True):
        if item is before:
            continue
        if isinstance(clone, dict):
            clone[key] = item
        elif isinstance(clone, (UserDict, SimpleNamespace)):
            _items_of(clone)[key] = item
        else:
            object.__setattr__(clone, key, item)
    return clone
