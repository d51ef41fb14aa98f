"""Walks through the containers that modules take and return.

Known containers: tuple, named tuple, list, dict (and ordered or default dict), set, dataclass
instance, `torch.nn.utils.rnn.PackedSequence`, `types.SimpleNamespace`, `collections.UserDict`, and
what is registered with `torch.utils._pytree`. Other objects are left unchanged. The common case, a
tuple of tensors, costs one `type` test an element.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES

if TYPE_CHECKING:  # a stub of the type checker
    from _typeshed import DataclassInstance

T = TypeVar("T")
TensorMap = Callable[[torch.Tensor], torch.Tensor]


def grad_tensors(
    value: object, found: list[torch.Tensor], others: list[torch.Tensor] | None = None
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
    elif isinstance(value, (UserDict, SimpleNamespace)):
        grad_tensors(_items_of(value), found, others)
    elif type(value) in SUPPORTED_NODES:
        grad_tensors(SUPPORTED_NODES[type(value)].flatten_fn(value)[0], found, others)


def map_tensors(function: TensorMap, value: object) -> Any:
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
    if isinstance(value, (UserDict, SimpleNamespace)):
        return _map_items(function, value)
    if type(value) in SUPPORTED_NODES:
        return _map_registered(function, value)
    return value


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
    """Whether the result of a derivative of ``torch.func`` for a tensor has a graph afterwards.

    A transform records its own graph, which ends with it. Only one around it, or none, may
    record another, if the tensor requires grad there, too.
    """
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


def _map_tuple(function: TensorMap, value: tuple[object, ...]) -> tuple[object, ...]:
    mapped = [map_tensors(function, item) for item in value]
    if not _changed(mapped, value):
        return value
    if hasattr(value, "_fields"):  # a named tuple takes its items one by one
        return type(value)(*mapped)
    return type(value)(mapped)


def _map_dict(function: TensorMap, value: dict[object, object]) -> dict[object, object]:
    mapped = {key: map_tensors(function, item) for key, item in value.items()}
    if not _changed(mapped.values(), value.values()):
        return value
    clone = copy.copy(value)  # keeps the class, the order, a default factory and attributes
    for key, item in mapped.items():
        if item is not value[key]:
            clone[key] = item
    return clone


def _items_of(value: UserDict[object, object] | SimpleNamespace) -> dict[Any, object]:
    return value.data if isinstance(value, UserDict) else vars(value)


def _map_items(
    function: TensorMap, value: UserDict[object, object] | SimpleNamespace
) -> UserDict[object, object] | SimpleNamespace:
    items = _items_of(value)
    mapped = {key: map_tensors(function, item) for key, item in items.items()}
    if not _changed(mapped.values(), items.values()):
        return value
    clone = copy.copy(value)  # with a dict of its own
    _items_of(clone).update(mapped)
    return clone


def _map_registered(function: TensorMap, value: object) -> object:
    node = SUPPORTED_NODES[type(value)]
    items, context = node.flatten_fn(value)
    mapped = [map_tensors(function, item) for item in items]
    return node.unflatten_fn(mapped, context) if _changed(mapped, items) else value


def _map_fields(
    function: TensorMap, value: T, names: tuple[str, ...], rebuild: Callable[..., T]
) -> T:
    old = [getattr(value, name) for name in names]
    new = [map_tensors(function, item) for item in old]
    return rebuild(*new) if _changed(new, old) else value


def _map_dataclass(function: TensorMap, value: DataclassInstance) -> DataclassInstance:
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
