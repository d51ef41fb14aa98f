"""One parameter, in its two forms, and the module slots that they fill.

    sharded     nn.Parameter(DTensor) over this rank's rows, a view of the group's flat shard
    unsharded   nn.Parameter over the gathered rows, a view of the group's gathered buffer

    owner module ── _parameters["weight"] ──> sharded, or unsharded while the group is gathered

Both are made once and stay the same objects: optimizers hold the first, autograd the second
(invariant I3). A parameter registered in several places (tied weights) fills all its slots.

A parameter that was a DTensor before (tensor or expert parallel) stays one when it is gathered: on
the model-parallel mesh alone. What is laid out, gathered and reduced is its local tensor.

An *extended* parameter's local tensor is of a subclass with all-gather hooks. Its shard is of that
subclass too and has memory of its own, outside the flat shard; `fsdp2.core.extension` gathers it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions, ShardingStateError
from fsdp2.core.layout import Cut, Slot
from fsdp2.core.sharding import (
    MeshAxes,
    gradient_placements,
    local_of,
    sharded_spec,
    with_dtype,
    wrap_local,
)
from fsdp2.core.spares import Spares

OWNER = "_fsdp2_owner"
"""Attribute of a parameter object that a unit manages, or replaced: the unit's name."""

REPLACED = "_fsdp2_replaced"
"""Attribute of a parameter object that is not the optimizer's: a weak reference to the
`ShardedParam` of the one that is."""

GATHERED = "_fsdp2_gathered"
"""Attribute of a gathered parameter: its full name."""

PRE_HOOK, POST_HOOK = "fsdp_pre_all_gather", "fsdp_post_all_gather"
"""Methods of tensor subclasses that say what travels, and what becomes of it."""

# Inside `DisableTorchFunctionSubclass` a look at a DTensor (`.grad`, `.requires_grad`) takes half
# the time: otherwise torch first asks whether its class wants to answer instead, which it does not.

ModuleSlot = tuple[nn.Module, str]
"""A module and the name under which it holds the parameter."""

Swap = tuple[Any, str, nn.Parameter]
"""A mapping, a key and a parameter: ``mapping[key] = parameter`` registers it."""


class ModuleSlots:
    """Places that modules own: they are not kept alive, and those of deleted modules are gone.

    A model refers to its parameters; were there a way back, only the collector could free it.
    """

    def __init__(self, slots: Iterable[ModuleSlot]) -> None:
        self._slots = [(weakref.ref(module), name) for module, name in slots]

    def __iter__(self) -> Iterator[ModuleSlot]:
        for reference, name in self._slots:
            module = reference()
            if module is not None:
                yield module, name


class AttributeStore:
    """For modules that define ``__setattr__`` themselves: a store that calls it."""

    storing: nn.Parameter | None = None
    """What is being stored, by any: its registration is ours, not the user's."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __setitem__(self, name: str, param: nn.Parameter) -> None:
        module = self._module()
        if module is not None:
            AttributeStore.storing = param
            try:
                setattr(module, name, param)
            finally:
                AttributeStore.storing = None


def _store_of(module: nn.Module) -> Any:
    # A store into the dictionary costs 0.05 µs; nn.Module.__setattr__ several.
    if type(module).__setattr__ is nn.Module.__setattr__:
        return module._parameters
    return AttributeStore(module)


def follow_requires_grad(params: Iterable[Any]) -> bool:
    """Give each parameter's forms one ``requires_grad``; whichever was changed counts.

    Returns:
        Whether any changed.
    """
    changed = False
    with DisableTorchFunctionSubclass():
        for param in params:
            known, unsharded = param.requires_grad, param.unsharded
            if param.sharded.requires_grad is not known or (
                unsharded is not None and unsharded.requires_grad is not known
            ):
                changed = True
                param.requires_grad = not known
                for form in param.forms():
                    form.requires_grad = not known
    return changed


class ShardedParam:
    """A parameter that fsdp2 manages.

    Attributes:
        name: full name, from the root module once that is known.
        slots: where it is registered.
        cut: how it is sharded.
        shape: shape of what is laid out: of the parameter, or of its local tensor if it was a
            DTensor before.
        compute_dtype: the dtype that it is gathered in, if the user made an exception for it.
        requires_grad: as both forms had it when it was last looked at.
        sharded: the DTensor parameter that the optimizer sees.
        unsharded: the gathered parameter, once it exists.
        accumulated: gradients summed over backwards without sync, in the reduce dtype.
    """

    # A model has thousands, and a step looks at each several times: slots are the least memory.
    __slots__ = (
        "__weakref__",
        "_between",
        "_grad_dtype",
        "_grad_spec",
        "_parallel",
        "_spec",
        "_target",
        "_whole",
        "accumulated",
        "attributes",
        "axes",
        "compute_dtype",
        "cut",
        "name",
        "requires_grad",
        "shape",
        "sharded",
        "slots",
        "unsharded",
    )

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        slots: list[ModuleSlot],
        cut: Cut,
        axes: MeshAxes,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.name = name
        self.slots = ModuleSlots(slots)
        self.cut = cut
        self.axes = axes
        self.compute_dtype = compute_dtype
        self.attributes = _users_attributes(param)
        self.requires_grad = param.requires_grad
        self._spec: DTensorSpec = sharded_spec(axes, param, cut)
        self._parallel = param._spec if isinstance(param, DTensor) else None
        self._whole: torch.Tensor | None = local_of(param.detach())  # until the shard has its rows
        self.shape = tuple(self._whole.shape)
        self._target: torch.Tensor | None = None
        self.sharded: nn.Parameter = param
        self.unsharded: nn.Parameter | None = None
        self.accumulated: torch.Tensor | None = None
        self._between: nn.Parameter | None = None
        self._grad_dtype = _chosen_grad_dtype(param)
        self._grad_spec: DTensorSpec = with_dtype(self._spec, self.grad_dtype)

    # ---- the sharded form

    @property
    def dtype(self) -> torch.dtype:
        """The shard's dtype: the optimizer's."""
        return self.sharded.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of the reduced gradient: ``param.grad_dtype`` where the user set it, else dtype."""
        return self._grad_dtype or self.sharded.dtype

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows, without padding."""
        local: torch.Tensor = self.sharded._local_tensor  # type: ignore[attr-defined]  # a DTensor
        return local

    @property
    def is_meta(self) -> bool:
        """Whether it has a shape but no memory yet."""
        return self.local.is_meta if self._whole is None else self._whole.is_meta

    @property
    def is_extended(self) -> bool:
        """Whether its local tensor has all-gather hooks, as it is now."""
        return is_extended(self.local if self._whole is None else self._whole)

    def adopt(self, slot: Slot, target: torch.Tensor) -> None:
        """Move this rank's rows to ``target``, a view of the flat shard, and be backed by it.

        Args:
            slot: the parameter's place in the layout.
            target: ``slot.local_shape(rank)``.
        """
        with torch.no_grad():
            rows = self.local if self._whole is None else slot.part(self._whole, self.axes.rank)
            target.copy_(rows)
        self._wrap(target)

    def adopt_extended(self, slot: Slot, offload: CPUOffloadPolicy | None) -> None:
        """Be backed by this rank's rows as a tensor of the subclass, which its own operators make.

        Args:
            slot: the parameter's place in the layout.
            offload: where the rows belong into CPU memory apart from the device.
        """
        whole = self._whole
        with torch.no_grad():
            rows = self.local if whole is None else _shard_of(whole, slot, self.axes.rank)
            if offload is not None and not rows.is_meta:
                rows = rows.cpu() if rows.device.type != "cpu" else rows
                rows = rows.pin_memory() if offload.pin_memory and not rows.is_pinned() else rows
        self._wrap(rows)

    def _wrap(self, rows: torch.Tensor) -> None:
        """Make ``rows`` the local tensor of the sharded parameter."""
        self._target = rows
        if self._whole is None:
            for name, value in self.attributes.items():  # .to() and loading may have dropped them
                self.sharded.__dict__.setdefault(name, value)
            self.sharded._local_tensor = rows  # type: ignore[attr-defined]  # a DTensor
            self._spec = self.sharded._spec  # type: ignore[attr-defined]  # a DTensor
        else:
            self._whole = None
            sharded = wrap_local(rows, self._spec)
            self.sharded = nn.Parameter(sharded, requires_grad=self.requires_grad)
            self.sharded.__dict__.update(self.attributes)
            self.register(self.sharded)
        self._grad_spec = with_dtype(self._spec, self.grad_dtype)
        if self._grad_dtype is not None:
            self.sharded.grad_dtype = self._grad_dtype

    @property
    def is_in_place(self) -> bool:
        """Whether its rows still are where `adopt` put them."""
        target = self._target
        if target is None or self.is_extended or is_extended(target):  # memory of its own
            return target is not None and self.local is target
        return bool(self.local.untyped_storage()._cdata == target.untyped_storage()._cdata)

    def follow_registered(self) -> None:
        """Manage the parameter that somebody put into a slot, and register it in all of them.

        Of several, the last; one that does not fit is taken out again.
        """
        before = self.sharded
        chosen = before
        for module, name in self.slots:
            registered = getattr(module, name)
            if registered is not before:
                chosen = registered
        if chosen is not before and not self._fits(chosen):
            self.register(before)
            raise ShardingStateError(
                f"parameter '{self.name}' was replaced by a {type(chosen).__name__} of shape "
                f"{tuple(chosen.shape)}; assign a DTensor of shape {tuple(before.shape)} sharded "
                f"like the parameter"
            )
        if chosen is not before:
            before.__dict__[REPLACED] = weakref.ref(self)
            chosen.__dict__.pop(REPLACED, None)
        self.sharded = chosen
        self.register(chosen)

    def was_replaced(self) -> bool:
        """Whether, while sharded, a slot was given a DTensor that can take this one's place."""
        found = [module._parameters.get(name) for module, name in self.slots]
        others = [param for param in found if param is not self.sharded and self._fits(param)]
        return any(OWNER not in param.__dict__ for param in others)

    def _fits(self, param: nn.Parameter | None) -> bool:
        return (
            isinstance(param, DTensor)
            and isinstance(param, nn.Parameter)  # others are put there by functional_call
            and param.shape == self.sharded.shape
            and param.placements == self._spec.placements
            and param._local_tensor.shape == self.local.shape
        )

    def check_usable(self, device: torch.device, offloaded: bool = False) -> None:
        """Raise, naming the parameter, if it has no memory or lies on another device.

        Args:
            device: where it must be.
            offloaded: whether that is CPU memory because it is offloaded.
        """
        if self.is_meta:
            raise ShardingStateError(
                f"parameter '{self.name}' is still on the meta device; call "
                f"model.to_empty(device='{device.type}') and initialise it before the first "
                f"forward"
            )
        if offloaded and self.local.device.type != device.type:
            raise ShardingStateError(
                f"parameter '{self.name}' is on {self.local.device}, but its unit was sharded with "
                f"CPUOffloadPolicy, which keeps parameters in CPU memory and copies them to the "
                f"device around their use; move the model back with model.to('cpu') and move only "
                f"its buffers to the device, or call fully_shard without offload_policy"
            )
        if self.local.device.type != device.type:
            raise ShardingStateError(
                f"parameter '{self.name}' is on {self.local.device}, but its mesh computes on "
                f"{device}; move the model back with model.to('{device.type}')"
            )

    @staticmethod
    def deliver(
        params: Sequence[ShardedParam], rows: Sequence[torch.Tensor], spares: Spares | None
    ) -> list[tuple[ShardedParam, torch.Tensor, torch.Tensor]]:
        """Give each parameter its rows of the reduced gradient as ``.grad``; run users' hooks.

        Args:
            params: the parameters: in one call, as a call each costs as much as its work.
            rows: of each.
            spares: DTensors to use again, if these are all parameters that share them.

        Returns:
            For each that has a ``.grad`` already: itself, the rows of that, and those to add to
            them, which is the caller's, as is running the hooks after it.
        """
        objects = [None] * len(params) if spares is None else spares.take(len(params))
        make = DTensor.__new__  # `wrap_local`, without its call for each
        waiting, given, hooked = [], [], []
        with DisableTorchFunctionSubclass():  # which every look at a DTensor would ask for
            for param, new, gradient in zip(params, rows, objects, strict=True):
                sharded = param.sharded
                before = sharded.grad
                if before is not None:
                    waiting.append((param, before._local_tensor, new))  # type: ignore[attr-defined]  # a DTensor
                    continue
                if gradient is None:
                    gradient = make(DTensor, new, param._grad_spec, requires_grad=False)
                else:
                    gradient._local_tensor = new
                sharded.grad = gradient
                given.append(gradient)
                if sharded._post_accumulate_grad_hooks:
                    hooked.append(param)
        if spares is not None and not waiting:
            spares.lend(given)
        if hooked:
            del objects, gradient  # a hook may drop gradients
            for param in hooked:
                param.run_hooks()
        return waiting

    def gradient_over(self, rows: torch.Tensor) -> DTensor:
        """What can become ``.grad``, over ``rows``."""
        return wrap_local(rows, self._grad_spec)

    @staticmethod
    def without_gradient(params: Iterable[ShardedParam]) -> bool:
        """Whether none has a ``.grad``."""
        with DisableTorchFunctionSubclass():
            for param in params:
                if param.sharded.grad is not None:
                    return False
        return True

    @staticmethod
    def place(params: Iterable[ShardedParam], gradients: Iterable[DTensor]) -> None:
        """Give each its ``.grad``, where there is none; run users' hooks."""
        hooked = []
        with DisableTorchFunctionSubclass():
            for param, gradient in zip(params, gradients, strict=True):
                sharded = param.sharded
                sharded.grad = gradient
                if sharded._post_accumulate_grad_hooks:
                    hooked.append(param)
        for param in hooked:
            param.run_hooks()

    @property
    def has_grad_hooks(self) -> bool:
        """Whether a user registered a post-accumulate-grad hook."""
        return bool(self.sharded._post_accumulate_grad_hooks)

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

    @staticmethod
    def take_gradients(params: Iterable[ShardedParam], summed: bool) -> list[torch.Tensor | None]:
        """Take the full gradients since the last reduction away; ``summed``: of several backwards.

        One that was frozen since its forward has none, but where earlier ones would be lost.
        """
        grads: list[torch.Tensor | None] = []
        with DisableTorchFunctionSubclass():
            for param in params:
                unsharded = param.unsharded
                grad = None
                if unsharded is not None:
                    grad = unsharded.grad
                    if grad is not None:
                        unsharded.grad = None
                        if not (param.sharded.requires_grad or summed) and param.requires_grad:
                            grad = None
                if param.accumulated is not None:
                    total, param.accumulated = param.accumulated, None
                    if grad is not None:
                        total += grad
                    grad = total
                if param._parallel is not None and grad is not None:
                    grad = param._localize(grad)
                grads.append(grad)
        return grads

    @staticmethod
    def have_gradients(params: Iterable[ShardedParam]) -> bool:
        """Whether any has a full gradient."""
        for param in params:
            full = param.unsharded
            if param.accumulated is not None or (full is not None and full.grad is not None):
                return True
        return False

    def drop_gradient(self) -> None:
        """Forget the full gradient; no rank waits for another, whatever they have."""
        self.accumulated = None
        if self.unsharded is not None:
            self.unsharded.grad = None

    def accumulate(self, dtype: torch.dtype) -> None:
        """Keep the full gradient for a later reduction, summed in ``dtype``.

        A model-parallel one may be a sum that is still to be made: that is done once, at the end.
        """
        if self.unsharded is None:
            return  # an extended one, of which no gather has succeeded yet
        grad = self.unsharded.grad
        if grad is None or (self.accumulated is None and grad.dtype == dtype):
            return  # autograd itself adds up gradients that need no cast
        self.unsharded.grad = None
        if grad.requires_grad:  # with create_graph=True, of a graph that nobody can reach any more
            grad = grad.detach()
        if self.accumulated is None:
            self.accumulated = grad.to(dtype)
        else:
            self.accumulated += grad

    def _localize(self, grad: torch.Tensor) -> torch.Tensor:
        """The local tensor of a model-parallel gradient, placed as the parameter is."""
        assert self._parallel is not None
        if not isinstance(grad, DTensor):
            raise ShardingStateError(
                f"the gradient of parameter '{self.name}' is a plain {type(grad).__name__}, but "
                f"the parameter is a DTensor; assign DTensors to .grad"
            )
        wanted = gradient_placements(self.axes, self._parallel, grad.placements)
        if wanted != grad.placements:
            grad = grad.redistribute(placements=wanted)
        return grad.to_local()

    def materialize(self, gathered: torch.Tensor) -> None:
        """Make the unsharded parameter over ``gathered``, which has its own version counter.

        Args:
            gathered: ``shape``; the parameter, or its local tensor if it was a DTensor before.
        """
        with torch.inference_mode(False), torch.no_grad():
            if self._parallel is not None:
                gathered = wrap_local(gathered, with_dtype(self._parallel, gathered.dtype))
            unsharded = nn.Parameter(gathered, requires_grad=self.sharded.requires_grad)
        unsharded.__dict__.update({**self.attributes, **self._marks()})
        old = self.unsharded
        if old is not None and old.grad is not None:  # accumulated without sync
            unsharded.grad = old.grad.to(unsharded.dtype)
        self.unsharded = unsharded

    def _marks(self) -> dict[str, Any]:
        return {GATHERED: self.name, REPLACED: weakref.ref(self)}

    def forbid_reading(self) -> None:
        """Let a backward raise that reads the unsharded parameter: autograd compares versions."""
        if self.unsharded is not None:
            torch.autograd.graph.increment_version(self.unsharded)

    def between(self, rows: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
        """The parameter over a smaller group's rows, registered between forward and backward.

        Args:
            rows: this rank's, of the compute dtype.
            mesh: (replicate, shard), of the smaller groups.
        """
        meta = with_dtype(self._spec, rows.dtype).tensor_meta
        spec = DTensorSpec(mesh, (Replicate(), Shard(self.cut.dim)), tensor_meta=meta)
        param = nn.Parameter(wrap_local(rows, spec), requires_grad=self.sharded.requires_grad)
        param.__dict__.update({**self.attributes, **self._marks()})
        self._between = param
        return param

    def follow_between(self) -> None:
        """Take over ``requires_grad`` from the form that is registered between the passes."""
        between = self._between
        if between is not None and between.requires_grad is not self.requires_grad:
            self.sharded.requires_grad = between.requires_grad

    def forms(self) -> list[nn.Parameter]:
        """The objects that may be registered for it: sharded, gathered, in between."""
        forms = (self.sharded, self.unsharded, self._between)
        return [form for form in forms if form is not None]

    def register(self, param: nn.Parameter) -> None:
        """Put ``param`` into every slot."""
        for target, name, value in self.swaps(param):
            target[name] = value

    def swaps(self, param: nn.Parameter) -> list[Swap]:
        """The stores that register ``param``, ready to be run in a loop."""
        return [(_store_of(module), name, param) for module, name in self.slots]


def compute_dtype(options: GroupOptions, param: Any) -> torch.dtype:
    """The dtype that a parameter is gathered in; integers are gathered as they are."""
    dtype: torch.dtype = param.dtype
    chosen = param.compute_dtype or options.precision.param_dtype
    return chosen if chosen is not None and dtype.is_floating_point else dtype


def is_extended(local: torch.Tensor) -> bool:
    """Whether a local tensor has all-gather hooks, or cannot do without: it wraps others."""
    hooked = hasattr(local, PRE_HOOK) or hasattr(local, POST_HOOK)
    return hooked or is_traceable_wrapper_subclass(local)


def _users_attributes(param: nn.Parameter) -> dict[str, Any]:
    """What users set on a parameter; not what its tensor subclass itself keeps there."""
    own = () if isinstance(param, DTensor) or not is_extended(param) else param.detach().__dict__
    return {name: value for name, value in param.__dict__.items() if name not in own}


def _shard_of(whole: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """This rank's rows of a tensor subclass, in memory of their own.

    With the operators that torch's FSDP2 uses, so that a subclass made for it has them: split,
    new_zeros, slice and copy_.
    """
    dim = slot.dim
    padded = whole.new_zeros(slot.piece)
    length = slot.rows(rank)
    rows = padded.narrow(dim, 0, length)
    if length:
        rows.copy_(torch.chunk(whole, slot.world_size, dim)[rank])
    return rows


def _chosen_grad_dtype(param: nn.Parameter) -> torch.dtype | None:
    """The ``grad_dtype`` that the user gave the parameter, if it is another than its dtype."""
    chosen: torch.dtype | None = getattr(param, "grad_dtype", None)
    return None if chosen == param.dtype else chosen
