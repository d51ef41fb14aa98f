"""Functions that ``torch.compile`` skips: hooks run in Python, whatever is compiled around them.

    @uncompiled          marks the function's code object, once, where it is defined
        │
        ├─ dynamo meets its frame      C reads the mark and runs it, and all that it calls, as is
        └─ dynamo traces a call of it  finds the attributes and breaks the graph at the call

``torch.compiler.disable`` wraps the function instead, which imports all of dynamo and adds a cost
to every call, compiled or not (figures in docs/decisions/0010).

`separate_in_graphs` is for what is compiled: in a graph, each gathered parameter has a storage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._subclasses import meta_utils
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2.core.params.param import gathered_name

F = TypeVar("F", bound=Callable[..., object])
C = TypeVar("C", bound=type)

_REASON = "fsdp2 gathers, frees and reduces outside of compiled graphs"


def uncompiled(function: F) -> F:
    """Keep ``torch.compile`` out of ``function`` and of everything that it calls.

    Returns ``function`` itself, marked, or a wrapper of ``torch.compiler.disable`` if torch has no
    such mark. It is used at the definition: a bound method cannot be marked.
    """
    if not _skip(function, recursive=True):
        return torch.compiler.disable(function, reason=_REASON)
    attributes: Any = function
    attributes._torchdynamo_disable = True
    attributes._torchdynamo_disable_msg = _REASON
    attributes._torchdynamo_disable_recursive = True
    return function


def uncompiled_methods(cls: C) -> C:
    """`uncompiled` for every method that a class body defines, but not its special methods."""
    for name, value in list(vars(cls).items()):
        if isinstance(value, FunctionType) and not name.startswith("__"):
            setattr(cls, name, uncompiled(value))
    return cls


def see_through(function: F) -> F:
    """Run ``function``, around a user's method, in Python; the functions it calls are compiled."""
    _skip(function, recursive=False)
    return function


def _skip(function: Any, recursive: bool) -> bool:
    """Mark a function's code for dynamo's frame evaluation; whether torch knows such a mark."""
    try:
        frames: Any = torch._C._dynamo.eval_frame
        skip, rest = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, skip if recursive else rest)
        frames.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:  # none of it is public
        return False
    return True


class _Describer(meta_utils.MetaTensorDescriber):
    """Describes tensors to fake modes: a gathered parameter as if it had a storage of its own.

    Control-flow operators (``torch.cond``, ``scan``) refuse inputs that share a storage, as one of
    them might be written. Gathered parameters share one, but overlap nowhere.
    """

    def describe_tensor(
        self, t: torch.Tensor, *, recurse: bool = True, trace: bool = False
    ) -> meta_utils.MetaTensorDesc[torch.Tensor]:
        described = super().describe_tensor(t, recurse=recurse, trace=trace)
        base = t._base if t._is_view() else t
        if gathered_name(base) is None or is_traceable_wrapper_subclass(base):
            return described
        if described.storage is None or described.storage.data is not None:
            return described
        assert base is not None
        start = base.storage_offset() * base.itemsize
        start -= start % _ALIGNMENT
        ends = zip(base.shape, base.stride(), strict=True)
        last = sum((length - 1) * stride for length, stride in ends)
        size = (base.storage_offset() + last + 1) * base.itemsize - start if base.numel() else 0
        key = self.get_storage_id(base)  # type: ignore[arg-type]  # any object: it is one's name
        storage = dataclasses.replace(described.storage, id=key, size=int(size))
        offset = described.storage_offset - start // t.itemsize
        return dataclasses.replace(described, storage=storage, storage_offset=offset)


_ALIGNMENT = 64
"""Bytes; Inductor reads from an offset whether a kernel may load several elements at once."""


@functools.cache
def separate_in_graphs() -> None:
    """From the first call on, gathered parameters have separate storages in compiled graphs."""
    meta_utils.MetaTensorDescriber = _Describer  # type: ignore[misc]  # there is no other way in
