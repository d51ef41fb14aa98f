"""How clients of torch's FSDP1 recognize a wrapper of fsdp2; the FSDP2 counterpart is `identity`.

    clients ask for                                    and find
    isinstance(m, FullyShardedDataParallel) of torch   TorchWrapperIdentity, a base of our wrapper
    isinstance(m, our wrapper)                         torch's own wrappers, too

A program that uses neither `fsdp2.fsdp1` nor `fsdp2.install` does not load this module.
"""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import torch.distributed.fsdp as fsdp
from torch import nn

from fsdp2.core.errors import coded
from fsdp2.interop.identity import TORCHS_NAMES

_WRAPPER: Any = getattr(fsdp, "FullyShardedDataParallel", nn.Module)

WRAPPER_NAMES: dict[str, object] = {
    name: getattr(fsdp, name) for name in fsdp.__all__ if name not in TORCHS_NAMES
}
"""The names that torch exports for its FSDP1, from before `fsdp2.install`."""

with contextlib.suppress(ImportError):  # in the torch to come
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    WRAPPER_NAMES["ShardedGradScaler"] = ShardedGradScaler


class _TorchsWrapperToo(type):
    """Makes ``isinstance(module, cls)`` hold for modules that torch's FSDP1 has wrapped."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or is_torchs_wrapper(instance)


class TorchWrapperIdentity(_WRAPPER, metaclass=_TorchsWrapperToo):
    """Makes ``isinstance(module, torch.distributed.fsdp.FullyShardedDataParallel)`` true, no more.

    No method of torch's class is left for a module of ours to run. torch's own traversals pass by:
    the module inside says that it is replicated (`register_with_torch`).
    """


def is_torchs_wrapper(module: object) -> bool:
    """Whether torch's own FSDP1 has wrapped ``module``."""
    kinds = type(module).__mro__
    return _WRAPPER in kinds and TorchWrapperIdentity not in kinds


class _NotOurs:
    """Replaces a method of torch's wrapper that fsdp2's wrapper does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise coded(
            AttributeError,
            "fsdp1-torchs-method",
            f"'{owner.__name__}' is fsdp2's, which has no '{self._name}' of torch's; use its "
            f"public methods",
        )


for _name in vars(_WRAPPER):
    if not _name.startswith("__"):
        setattr(TorchWrapperIdentity, _name, vars(nn.Module).get(_name, _NotOurs(_name)))
