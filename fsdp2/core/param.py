"""One parameter, in its two forms, and the module slots that they fill.

    sharded     nn.Parameter(DTensor) over this rank's rows, a view of the group's flat shard
    unsharded   nn.Parameter over the gathered rows, a view of the group's gathered buffer

    owner module ── _parameters["weight"] ──> sharded, or unsharded while the group is gathered

Both are made once and stay the same objects: optimizers hold the first, autograd the second
(invariant I3). A parameter registered in several places (tied weights) fills all its slots.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fsdp2.core.buffers import FlatBuffer
from fsdp2.core.config import ShardingStateError
from fsdp2.core.layout import Slot
from fsdp2.core.sharding import ShardAxis, sharded_spec, wrap_local

OWNER = "_fsdp2_owner"
"""Attribute of a parameter object that a unit manages, or replaced: the unit's name."""

REPLACED = "_fsdp2_replaced"
"""Attribute of a parameter object that is not the optimizer's: the `ShardedParam` that is."""

GATHERED = "_fsdp2_gathered"
"""Attribute of a gathered parameter: its full name."""

ModuleSlot = tuple[nn.Module, str]
"""A module and the name under which it holds the parameter."""

Swap = tuple[Any, str, nn.Parameter]
"""A mapping, a key and a parameter: ``mapping[key] = parameter`` registers it."""


class _AttributeStore:
    """For modules that define ``__setattr__`` themselves: a store that calls it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __setitem__(self, name: str, param: nn.Parameter) -> None:
        setattr(self._module, name, param)


def _store_of(module: nn.Module) -> Any:
    # A store into the dictionary costs 0.05 µs; nn.Module.__setattr__ several.
    if type(module).__setattr__ is nn.Module.__setattr__:
        return module._parameters
    return _AttributeStore(module)


def follow_requires_grad(param: Any) -> bool:
    """Give a managed parameter's two forms one ``requires_grad``; whichever was changed counts.

    Returns:
        Whether it changed.
    """
    known = param.requires_grad
    unsharded = param.unsharded
    if param.sharded.requires_grad is known and (
        unsharded is None or unsharded.requires_grad is known
    ):
        return False
    param.requires_grad = param.sharded.requires_grad = not known
    if unsharded is not None:
        unsharded.requires_grad = not known
    return True


class ShardedParam:
    """A parameter that fsdp2 manages.

    Attributes:
        name: full name, from the root module once that is known.
        slots: where it is registered.
        dim: sharded dim.
        shape: global shape.
        requires_grad: as both forms had it when it was last looked at.
        sharded: the DTensor parameter that the optimizer sees.
        unsharded: the gathered parameter, once it exists.
        accumulated: gradients summed over backwards without sync, in the reduce dtype.
    """

    def __init__(
        self, name: str, param: nn.Parameter, slots: list[ModuleSlot], dim: int, axis: ShardAxis
    ) -> None:
        self.name = name
        self.slots = slots
        self.dim = dim
        self.shape = tuple(param.shape)
        self.axis = axis
        self.attributes = dict(param.__dict__)
        self.requires_grad = param.requires_grad
        self._whole: torch.Tensor | None = param.detach()  # until the flat shard has the rows
        self.sharded: nn.Parameter = param
        self.unsharded: nn.Parameter | None = None
        self.accumulated: torch.Tensor | None = None
        self._spec: DTensorSpec | None = None

    # ---- the sharded form

    @property
    def dtype(self) -> torch.dtype:
        """The shard's dtype: the optimizer's."""
        return self.sharded.dtype

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows, without padding."""
        local: torch.Tensor = self.sharded._local_tensor  # type: ignore[attr-defined]  # a DTensor
        return local

    @property
    def is_meta(self) -> bool:
        """Whether it has a shape but no memory yet."""
        return self.local.is_meta if self._whole is None else self._whole.is_meta

    def adopt(self, slot: Slot, target: torch.Tensor) -> None:
        """Move this rank's rows to ``target``, a view of the flat shard, and be backed by it.

        Args:
            slot: the parameter's place in the layout.
            target: ``slot.local_shape(rank)``.
        """
        whole = self._whole
        rank = self.axis.rank
        with torch.no_grad():
            if whole is None:
                target.copy_(self.local)
            else:
                start = min(rank * slot.chunk, self.shape[self.dim])
                target.copy_(whole.narrow(self.dim, start, slot.rows(rank)))
        if whole is None:
            for name, value in self.attributes.items():  # .to() and loading may have dropped them
                self.sharded.__dict__.setdefault(name, value)
            self.sharded._local_tensor = target  # type: ignore[attr-defined]  # a DTensor
            self._spec = self.sharded._spec  # type: ignore[attr-defined]  # a DTensor
            return
        self._whole = None
        self._spec = sharded_spec(self.axis, whole, self.dim)
        self.sharded = nn.Parameter(
            wrap_local(target, self._spec), requires_grad=self.requires_grad
        )
        self.sharded.__dict__.update(self.attributes)
        self.register(self.sharded)

    def is_backed_by(self, shard: FlatBuffer) -> bool:
        """Whether its rows still are in ``shard``."""
        return bool(self.local.untyped_storage()._cdata == shard.storage._cdata)

    def follow_registered(self) -> None:
        """Manage the parameter in the first slot, if somebody put another one there.

        The other slots of a tied parameter follow the first.
        """
        module, name = self.slots[0]
        registered = getattr(module, name)
        if registered is self.sharded:
            self.register(self.sharded)
            return
        if not isinstance(registered, DTensor) or tuple(registered.shape) != self.shape:
            raise ShardingStateError(
                f"parameter '{self.name}' was replaced by a {type(registered).__name__} of shape "
                f"{tuple(registered.shape)}; assign a DTensor of shape {self.shape} sharded like "
                f"the parameter"
            )
        self.sharded.__dict__[REPLACED] = self
        self.sharded = cast(nn.Parameter, registered)
        self.sharded.__dict__.pop(REPLACED, None)
        self.register(self.sharded)

    def check_usable(self, device: torch.device) -> None:
        """Raise, naming the parameter, if it has no memory or lies on another device."""
        if self.is_meta:
            raise ShardingStateError(
                f"parameter '{self.name}' is still on the meta device; call "
                f"model.to_empty(device='{device.type}') and initialise it before the first "
                f"forward"
            )
        if self.local.device.type != device.type:
            raise ShardingStateError(
                f"parameter '{self.name}' is on {self.local.device}, but its mesh computes on "
                f"{device}; move the model back with model.to('{device.type}')"
            )

    def deliver(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Take this rank's rows of the reduced gradient as ``.grad``, and run the users' hooks.

        Returns:
            The rows of the ``.grad`` that is there already, for the caller to add to and to run
            the hooks after; ``None`` where there was none.
        """
        sharded = self.sharded
        grad = sharded.grad
        if grad is not None:
            return grad._local_tensor  # type: ignore[attr-defined]  # a DTensor
        sharded.grad = wrap_local(rows, self._spec)  # type: ignore[arg-type]  # set by adopt
        if sharded._post_accumulate_grad_hooks:
            self.run_hooks()
        return None

    def clear_gradient(self, set_to_none: bool) -> None:
        """Drop the sharded gradient, or fill it with zeros."""
        if set_to_none:
            self.sharded.grad = None
        elif self.sharded.grad is not None:
            self.sharded.grad._local_tensor.zero_()  # type: ignore[attr-defined]  # a DTensor

    def run_hooks(self) -> None:
        """Run the post-accumulate-grad hooks that users registered on the sharded parameter."""
        hooks = self.sharded._post_accumulate_grad_hooks
        if hooks:
            for hook in tuple(hooks.values()):
                hook(self.sharded)

    # ---- the unsharded form

    def take_gradient(self) -> torch.Tensor | None:
        """The full gradient since the last reduction, which the parameter then no longer has."""
        unsharded = self.unsharded
        if unsharded is None:
            return None
        grad = unsharded.grad
        if grad is not None:
            unsharded.grad = None
        if self.accumulated is not None:
            total, self.accumulated = self.accumulated, None
            if grad is not None:
                total += grad
            return total
        return grad

    def accumulate(self, dtype: torch.dtype) -> None:
        """Keep the full gradient for a later reduction, summed in ``dtype``."""
        assert self.unsharded is not None
        grad = self.unsharded.grad
        if grad is None or (self.accumulated is None and grad.dtype == dtype):
            return  # autograd itself adds up gradients that need no cast
        self.unsharded.grad = None
        if self.accumulated is None:
            self.accumulated = grad.to(dtype)
        else:
            self.accumulated += grad

    def materialize(self, gathered: torch.Tensor) -> None:
        """Make the unsharded parameter over ``gathered``: the global shape, own version counter."""
        with torch.inference_mode(False), torch.no_grad():
            unsharded = nn.Parameter(gathered, requires_grad=self.sharded.requires_grad)
        unsharded.__dict__.update(self.attributes)
        unsharded.__dict__[GATHERED] = self.name
        unsharded.__dict__[REPLACED] = self
        old = self.unsharded
        if old is not None and old.grad is not None:  # accumulated without sync
            unsharded.grad = old.grad.to(unsharded.dtype)
        self.unsharded = unsharded

    def register(self, param: nn.Parameter) -> None:
        """Put ``param`` into every slot."""
        for target, name, value in self.swaps(param):
            target[name] = value

    def swaps(self, param: nn.Parameter) -> list[Swap]:
        """The stores that register ``param``, ready to be run in a loop."""
        return [(_store_of(module), name, param) for module, name in self.slots]
