"""Plain tensors combined with DTensors: a wrapper's accept them as replicated, others raise.

DTensor has one switch for that, in C++, for all meshes of a thread:

    off  ──>  C++ raises without calling Python
    on   ──>  its dispatcher asks Python for the plain tensor's spec, unless it knows the call

While there are wrappers it is on, and Python decides by the mesh. DTensor identifies a call only by
its specs: a call with a replicated DTensor equals one with a plain tensor. Rules of such calls on
other meshes therefore say that arguments must be redistributed, to their current placements: this
calls Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

_SWITCH = "_allow_implicit_replication"
"""Property of the dispatcher: torch's switch, which `implicit_replication` turns on and off."""

_SPEC_OF = "_try_replicate_spec_for_scalar_tensor"
"""Method of the dispatcher: the spec of a plain tensor, or DTensor's error."""


class PlainTensors:
    """Decides about plain tensors while there are wrappers.

    Args:
        belongs: whether a mesh is a wrapper's.
    """

    def __init__(self, belongs: Callable[[DeviceMesh], bool]) -> None:
        self._belongs = belongs
        self._on: set[int] = set()  # threads
        self._dispatcher: Any = DTensor._op_dispatcher
        self._kind: Any = type(self._dispatcher)
        self._torchs = self._kind.__dict__[_SWITCH]
        self._find = getattr(self._dispatcher, _SPEC_OF)
        self._allowed = bool(getattr(self._dispatcher, _SWITCH))  # by the user, for all meshes
        setattr(self._dispatcher, _SPEC_OF, self._spec_of)
        setattr(self._kind, _SWITCH, property(lambda _: self._allowed, self._allow))

    def switch_on(self) -> None:
        """Let this thread's operators ask."""
        self._on.add(threading.get_ident())
        torch._C._set_dtensor_allow_implicit_replication(True)

    def switch_off(self) -> bool:
        """Give this thread its own switch back.

        Returns:
            Whether that was the last thread: all is as before. Until then other meshes still
            refuse, because one thread cannot reach another's switch.
        """
        if threading.get_ident() in self._on:
            self._on.remove(threading.get_ident())
            torch._C._set_dtensor_allow_implicit_replication(self._allowed)
        if self._on:
            return False
        delattr(self._dispatcher, _SPEC_OF)
        setattr(self._kind, _SWITCH, self._torchs)
        torch._C._clear_DTensor_sharding_propagator_cache()
        return True

    def _allow(self, _: object, value: bool) -> None:
        self._allowed = value

    def _spec_of(self, op: object, tensor: torch.Tensor, mesh: DeviceMesh) -> DTensorSpec:
        if tensor.numel() == 1 or not self._belongs(mesh):
            spec: DTensorSpec = self._find(op, tensor, mesh)
            return spec
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)


def asked_each_time(
    rule: OutputSharding, schema: OpSchema, arguments: Sequence[object]
) -> OutputSharding:
    """A rule of other meshes, such that a plain tensor is noticed in place of a DTensor."""
    could_be_plain = any(
        isinstance(each, DTensor)
        and each.numel() != 1
        and all(placement.is_replicate() for placement in each.placements)
        for each in arguments
    )
    if rule.needs_redistribute or not could_be_plain:
        return rule
    return replace(rule, needs_redistribute=True, redistribute_schema=schema)
