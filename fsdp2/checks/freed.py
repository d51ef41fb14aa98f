"""Unsharded parameters whose memory is freed, kept by a hook or a list: a read raises by name.

    reshard          class of the parameter = a subclass that refuses all operators
    finish_unshard   its own class again

C++ reads such memory without a check, and the process would end by a signal. torch asks a subclass
in Python before each function; of these, attributes and sizes read no memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.params.param import ShardedParam, gathered_name


class _Freed(torch.Tensor):
    """The common part of the classes of freed parameters."""

    of: ClassVar[type[torch.Tensor]]

    # torch's asks nobody, and has an argument that it alone passes.
    def __repr__(self) -> str:  # type: ignore[override]  # which this one gets from no caller
        return f"{type(self).__name__} '{gathered_name(self)}', freed"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run what launches no operator."""
        found = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, _Freed))
        with torch._C.DisableTorchFunctionSubclass(), _Refusing(str(gathered_name(found))):
            return func(*args, **(kwargs or {}))


class _Refusing(TorchDispatchMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_dispatch__(self, *_: object) -> NoReturn:
        raise coded(
            ShardingStateError,
            "read-freed",
            f"parameter '{self._name}' was read after its unit has freed it, through the unsharded "
            f"parameter that code such as a forward hook or a list has kept; keep a copy "
            f"(.clone()) or what was computed from it, or read it inside fsdp2.gathered()",
        )


@functools.cache
def _freed_form(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    return type(kind.__name__, (_Freed, kind), {"of": kind})


def mark_freed(params: Iterable[ShardedParam]) -> None:
    """Refuse reads of those unsharded parameters that have no memory."""
    for param in params:
        full = param.unsharded
        if full is None or param.is_meta or param.is_extended or isinstance(full, _Freed):
            continue
        if full.numel() and not local_of(full).untyped_storage().nbytes():
            _give_class(full, _freed_form(type(full)))


def unmark(params: Iterable[ShardedParam]) -> None:
    """Refuse them no longer."""
    for param in params:
        full = param.unsharded
        if isinstance(full, _Freed):
            _give_class(full, full.of)


def _give_class(param: torch.Tensor, kind: type[torch.Tensor]) -> None:
    param.__class__ = kind
