"""Saved tensors of unsharded parameters, on devices whose storages cannot be resized.

    weight, weight.t()   ── pack ──>    a position in the gathered buffer   the memory can be freed
                         <── unpack ──  that position in the current gathered buffer

On other devices, a saved tensor keeps an emptied storage, and units have no such hooks. On these, a
saved view would keep the whole parameter from forward to backward: a parameter's ``.data`` can be
swapped, but a view of it (a linear layer saves ``weight.t()``) is another tensor. Saved-tensor
hooks therefore surround each forward of a unit. They pass all other tensors to enclosing hooks,
such as a checkpoint's, or keep them unchanged; and they check whether a saved tensor was modified
since, as torch (2.11 to 2.15) does not with hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fsdp2.core.device.buffers import SavedPlace, absent, saved_in
from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.layout.mesh import wrap_local
from fsdp2.core.modules.dynamo import uncompiled, uncompiled_methods
from fsdp2.core.modules.hooks import UnitHooks, _transformed
from fsdp2.core.modules.registry import Args, Kwargs

_Saved = Callable[[], torch.Tensor]
"""A tensor as it is saved: a call returns it."""

_Pack = Callable[[torch.Tensor], object]
_Unpack = Callable[[object], torch.Tensor]


def _version_of(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@uncompiled
def _unpack(saved: _Saved) -> torch.Tensor:
    return saved()


def _place_of(tensor: torch.Tensor) -> SavedPlace | None:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return None
    try:
        return saved_in(tensor)
    except NotImplementedError:  # sparse ones, and those of torch.func, have no storage
        return None


def _kept(tensor: torch.Tensor) -> _Saved:
    """A tensor that no other hooks want."""
    # Without its node: a node that saves its output would keep itself alive. The version counter is
    # shared, and torch puts the node back.
    saved, version = tensor.detach(), _version_of(tensor)

    def unpack() -> torch.Tensor:
        if _version_of(saved) != version:
            raise coded(
                RuntimeError,
                "saved-and-modified",
                f"a {tuple(saved.shape)} tensor that backward reads was modified in place since "
                f"forward; modify a clone of it, or run forward under "
                f"torch.autograd.set_detect_anomaly(True) to see where it was saved",
            )
        return saved

    return unpack


def _gathered(tensor: torch.Tensor, place: SavedPlace, spec: DTensorSpec | None) -> _Saved:
    counter = tensor.detach()  # it shares the version counter, and is to have no memory
    counter.data = absent(tensor.dtype, tensor.device)
    version = _version_of(counter)

    def unpack() -> torch.Tensor:
        found = place.tensor()
        if found is None or _version_of(counter) != version:
            raise coded(
                ShardingStateError,
                "saved-and-freed",
                f"backward reads a {place.place.shape} tensor of '{place.buffer.name}', which was "
                f"freed or modified since forward; call set_unshard_in_backward(True) on its unit, "
                f"and step the optimizer after backward",
            )
        return found if spec is None else wrap_local(found, spec)

    return unpack


def _packing(around: tuple[_Pack, _Unpack] | None) -> _Pack:
    """The packing function, inside other hooks."""

    @uncompiled
    def pack(tensor: torch.Tensor) -> _Saved:
        local, spec = tensor, None
        if isinstance(tensor, DTensor):
            local, spec = tensor._local_tensor, tensor._spec
        place = _place_of(local)
        if place is not None:
            return _gathered(local, place, spec)
        if around is not None:
            return functools.partial(around[1], around[0](tensor))
        return _kept(tensor)

    return pack


@uncompiled_methods
class SavingUnitHooks(UnitHooks):
    """The hooks of a unit, and around its forward those on saved tensors."""

    _around: tuple[saved_tensors_hooks, ...] = ()
    """Those that were entered, of calls that are under way."""

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        args, kwargs = super().pre_forward(module, args, kwargs)
        graph: Any = torch._C._autograd
        hooked = graph._saved_tensors_hooks_is_enabled() and not _transformed()
        if hooked and torch.is_grad_enabled():
            outer = graph._top_saved_tensors_default_hooks(False)
            hooks = saved_tensors_hooks(_packing(outer), _unpack)
            hooks.__enter__()
            self._around = (*self._around, hooks)
        return args, kwargs

    def post_forward(self, module: nn.Module, args: Args, output: object) -> object:
        """As everywhere, and leave, unless the forward raised and has been left."""
        entered = len(self._around)
        try:
            return super().post_forward(module, args, output)
        finally:
            if len(self._around) == entered:
                self._leave()

    def forward_raised(self, failure: BaseException) -> None:
        self._leave()
        super().forward_raised(failure)

    def _leave(self) -> None:
        if self._around:
            *around, last = self._around
            self._around = tuple(around)
            last.__exit__()
