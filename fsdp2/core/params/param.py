"""One parameter, in its two forms, and the module entries that hold them.

    sharded     nn.Parameter(DTensor) over this rank's rows, a view of the group's flat shard
    unsharded   nn.Parameter over the gathered rows, a view of the group's gathered buffer

    owner module ── _parameters["weight"] ──> sharded, or unsharded while the group is gathered

Both are created once and stay the same objects: optimizers hold the first, autograd the second
(invariant I3). A parameter registered by several modules (tied weights) fills all its entries. One
that was a DTensor before (tensor or expert parallel) stays one when it is unsharded, only on the
model-parallel mesh: its local tensor is laid out, gathered and reduced.

References from before sharding, besides the entries of modules:

    self.__dict__["alias"] = w     followed: it holds what the module registers, at any moment
    self.weights = [w, b]          followed: lists and dicts that are attributes of modules
    a closure, a view, a loss      refused: a gradient that comes to what the parameter was raises

An *extended* parameter's local tensor is of a subclass with all-gather hooks. So is its shard, in
separate memory outside the flat shard; the gather room's `extension` gathers it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions
from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.layout.layout import Cut, ParamShape, Slot
from fsdp2.core.layout.mesh import (
    MeshAxes,
    gradient_placements,
    local_of,
    memory_order,
    sharded_spec,
    with_dtype,
    wrap_local,
    wrap_parameter,
)
from fsdp2.core.progress import Counts

OWNER = "_fsdp2_owner"
"""Attribute of a parameter object that a unit manages, or replaced: the unit's name."""

FORM = "_fsdp2_form"
"""Attribute of a parameter object that is not the optimizer's: its `Form`."""

NAMES = "_fsdp2_names"
"""Attribute of a module: notes of its parameters' names, by `fsdp2.core.modules.registrations`."""

PRE_HOOK, POST_HOOK = "fsdp_pre_all_gather", "fsdp_post_all_gather"
"""Methods of tensor subclasses that define the sent tensors and build the result."""

# Inside `DisableTorchFunctionSubclass` a look at a DTensor (`.grad`, `.requires_grad`) takes half
# the time: otherwise torch first asks whether its class wants to answer instead, which it does not.

ModuleEntry = tuple[nn.Module, str]
"""A module and the name under which it holds the parameter."""


class ModuleEntries:
    """Entries of modules, which they do not keep alive, and with which they end: were there a way
    back from a parameter, only the collector could free a model.
    """

    def __init__(self, entries: Iterable[ModuleEntry]) -> None:
        self._entries = [(weakref.ref(module), name) for module, name in entries]

    def __iter__(self) -> Iterator[ModuleEntry]:
        # No generator, which would be entered once for each entry and once more.
        found: list[ModuleEntry] = []
        for reference, name in self._entries:
            module = reference()
            if module is not None:
                found.append((module, name))
        return iter(found)


class AttributeStore:
    """For modules that define ``__setattr__`` themselves: a store that calls it."""

    storing: nn.Parameter | None = None
    """The parameter being stored by any: its registration is fsdp2's, not the user's."""

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


@dataclass(eq=False)
class Form:
    """Another object than the optimizer's for a parameter, which is left from before, or gathered.

    Attributes:
        gathered: full name of a gathered parameter.
        is_whole: whether `fsdp2.gathered` has registered it.
        tied: name of a sharded parameter in whose place another was registered.
        watched: whether it has a hook for backwards which reach no unit's output.
    """

    param: Callable[[], ShardedParam | None]
    gathered: str | None = None
    is_whole: bool = False
    tied: str | None = None
    watched: bool = False


def form_of(tensor: object) -> Form | None:
    """The form that a tensor is; ``None`` for the optimizer's parameter, and any other object."""
    form: Form | None = getattr(tensor, "__dict__", {}).get(FORM)
    return form


def gathered_name(tensor: object) -> str | None:
    """The full name of a gathered parameter; ``None`` for any other object."""
    form = form_of(tensor)
    return None if form is None else form.gathered


class Alias:
    """A place in an attribute of a module that refers to a parameter: a store of one entry.

    ``key`` is the place in a list or a dict; ``None``: the attribute itself. It does not keep the
    module alive. If the user assigns another object than ``value``, that stays.
    """

    def __init__(
        self, module: nn.Module, attribute: str, key: object, value: torch.Tensor | None
    ) -> None:
        self._module = weakref.ref(module)
        self._attribute = attribute
        self._key = key
        self._value = None if value is None else weakref.ref(value)

    def __setitem__(self, _: str, param: nn.Parameter) -> None:
        module = self._module()
        if module is None:
            return
        place: Any = module.__dict__
        key: object = self._attribute
        if self._key is not None:
            place, key = place.get(key), self._key
        try:
            present = place[key]
        except (IndexError, KeyError, TypeError):
            return  # the user's by now
        if self._value is not None and present is self._value():
            place[key] = param
            self._value = weakref.ref(param)


ParamStore = dict[str, nn.Parameter] | AttributeStore | Alias
"""Registers a form of a parameter: ``store[name] = parameter``."""

Swap = tuple[ParamStore, str, nn.Parameter]
"""A store, a key and a parameter: ``store[key] = parameter`` registers it."""


def store_of(module: nn.Module) -> ParamStore:
    """The store of ``module``'s parameters, which does not count as a registration by the user."""
    # A store into the dictionary costs 0.05 µs; nn.Module.__setattr__ several.
    if type(module).__setattr__ is nn.Module.__setattr__:
        return cast(dict[str, nn.Parameter], module._parameters)
    return AttributeStore(module)


def follow_requires_grad(params: Iterable[Any]) -> bool:
    """Give each parameter's forms one ``requires_grad``, the changed one; returns if any did."""
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
    if changed:
        Counts.flag_changes += 1
    return changed


@dataclass(frozen=True)
class PlannedParam:
    """The plan of a parameter; ``axes`` are the data-parallel ones that it is sharded over."""

    name: str
    param: nn.Parameter
    entries: list[ModuleEntry]
    axes: MeshAxes
    cut: Cut
    dtype_override: torch.dtype | None


def axes_in(plans: list[PlannedParam]) -> list[MeshAxes]:
    """The different axes, in the order in which parameters name them; those of whole ones last."""
    sharded: dict[int, MeshAxes] = {}
    whole: dict[int, MeshAxes] = {}
    for plan in plans:
        (whole if plan.axes.whole else sharded)[id(plan.axes)] = plan.axes
    return [*sharded.values(), *whole.values()]


def refuse_written(name: str) -> NoReturn:
    """Raise that an unsharded parameter was written."""
    raise coded(
        ShardingStateError,
        "written-unsharded",
        f"parameter '{name}' was written in place while it was unsharded, and resharding loses "
        f"the write; write inside fsdp2.gathered(), or write the sharded parameter after "
        f"reshard(), or call reshard() once more to drop the write",
    )


class ShardedParam:
    """A parameter that fsdp2 manages.

    Attributes:
        name: full name, from the root module once that is known.
        shape: shape of the tensor that is laid out: the parameter, or its local tensor if it was a
            DTensor before; with dims in the order of memory.
        order: that order, if it differs from the dims' order (``channels_last``): fsdp2 lays out,
            gathers and reduces the parameter permuted in this way.
        dtype_override: the dtype that it is gathered in, if the user made an exception for it.
        exact: whether it is sent unencoded, in a group that sends fewer bytes (`Wire`).
        requires_grad: the value of both forms at the last comparison.
        sharded: the DTensor parameter that the optimizer sees.
        smaller: the one over a smaller group's rows, if units are resharded to that.
        accumulated: gradients summed over backwards without sync, in the reduce dtype.
        parallel: its spec before sharding, if it was a DTensor (tensor or expert parallel).
        aliases: other references to it, in attributes of modules.
        absorbed: parameters that it replaced where it was registered; optimizers may hold them.
    """

    # A model has thousands, and a step looks at each several times: slots are the least memory.
    __slots__ = (
        "__weakref__",
        "_grad_dtype",
        "_hooks",
        "_smaller_version",
        "_spec",
        "_target",
        "_whole",
        "absorbed",
        "accumulated",
        "aliases",
        "attributes",
        "axes",
        "cut",
        "dtype_override",
        "entries",
        "exact",
        "grad_spec",
        "name",
        "order",
        "parallel",
        "requires_grad",
        "shape",
        "sharded",
        "smaller",
        "unsharded",
    )

    def __init__(self, plan: PlannedParam) -> None:
        param, axes, cut = plan.param, plan.axes, plan.cut
        self.name = plan.name
        self.entries = ModuleEntries(plan.entries)
        self.cut = cut
        self.axes = axes
        self.dtype_override = plan.dtype_override
        self.attributes: dict[str, object] = dict(param.__dict__)  # the user's, not its subclass's
        if self.attributes and not isinstance(param, DTensor) and is_extended(param):
            for name in param.detach().__dict__:
                self.attributes.pop(name, None)
        self.requires_grad = param.requires_grad
        whole = param.detach()
        self.parallel: DTensorSpec | None = None
        self.order: tuple[int, ...] | None = None
        if isinstance(param, DTensor):
            self.parallel = param._spec
            whole = local_of(whole)
            self._spec = sharded_spec(axes, param, cut)
        else:
            self._spec = axes.spec_of(cut, param.size(), param.stride(), param.dtype)
            if not param.is_contiguous():
                self.order = memory_order(param)
                whole = self.laid_out(whole)
        self._whole: torch.Tensor | None = whole  # until the shard has its rows
        self.shape = tuple(whole.shape)
        self._target: torch.Tensor | None = None
        self.sharded: nn.Parameter = param
        self.unsharded: nn.Parameter | None = None
        self.accumulated: torch.Tensor | None = None
        self.smaller: nn.Parameter | None = None
        self._smaller_version = 0
        self.exact = False
        self.absorbed: list[ShardedParam] = []
        self.aliases: list[Alias] = []
        # Of `register_hook` and `register_post_accumulate_grad_hook`. The dicts themselves go on,
        # so that handles which users have still remove what they stand for.
        self._hooks = param._backward_hooks, param._post_accumulate_grad_hooks
        chosen: torch.dtype | None = getattr(param, "grad_dtype", None)
        self._grad_dtype = None if chosen == param.dtype else chosen  # the user's
        self.grad_spec = self._spec
        if self._grad_dtype is not None:
            self.grad_spec = with_dtype(self._spec, self._grad_dtype)

    @property
    def differs_over(self) -> tuple[tuple[DeviceMesh, int], ...]:
        """Dims of model-parallel meshes over which ranks have other rows of it, before sharding."""
        if self.parallel is None:
            return ()
        mesh, placements = self.parallel.mesh, self.parallel.placements
        return tuple((mesh, dim) for dim, each in enumerate(placements) if not each.is_replicate())

    # ---- the order of memory

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, shaped as the parameter or its rows, with dims in the order of memory."""
        return tensor if self.order is None else tensor.permute(self.order)

    def as_seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """The way back: ``tensor``, which is laid out, with dims as users see them."""
        if self.order is None:
            return tensor
        return tensor.permute(sorted(range(len(self.order)), key=self.order.__getitem__))

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
        """Whether its present local tensor has all-gather hooks."""
        present = self.local if self._whole is None else self._whole
        is_plain = type(present) is torch.Tensor and not present.__dict__  # as most: no call
        return not is_plain and is_extended(present)

    def adopt(self, slot: Slot, target: torch.Tensor) -> None:
        """Move this rank's rows to ``target``, a view of the flat shard, and be backed by it."""
        if not target.is_meta:
            if self._whole is None:
                rows = self.laid_out(self.local)
            else:
                rows = slot.part(self._whole, self.axes.piece_rank)
            target.copy_(rows)
        self._wrap(target if self.order is None else self.as_seen(target))

    def adopt_extended(self, slot: Slot, offload: CPUOffloadPolicy | None) -> None:
        """Be backed by this rank's rows as a tensor of the subclass, made by its own operators."""
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
            self.grad_spec = with_dtype(self._spec, self.grad_dtype)
        else:
            self._whole = None
            self.sharded = wrap_parameter(rows, self._spec, self.requires_grad)
            self.sharded.__dict__.update(self.attributes)
            if self._hooks[1] is not None:
                self.sharded._post_accumulate_grad_hooks = self._hooks[1]
            count_hooks(self.sharded)
            self.register(self.sharded)
        if self._grad_dtype is not None:
            self.sharded.grad_dtype = self._grad_dtype

    @property
    def is_in_place(self) -> bool:
        """Whether its rows still are where `adopt` put them."""
        target, local = self._target, self.local
        if target is None or local is target:
            return target is not None
        if is_extended(local) or is_extended(target):  # memory of its own
            return False
        return bool(local.untyped_storage()._cdata == target.untyped_storage()._cdata)

    def follow_registered(self) -> None:
        """Manage the parameter that the user has put into an entry, and register it in all of them:
        the last, if there are several; one that does not fit is removed again.
        """
        before = self.sharded
        chosen = before
        for module, name in self.entries:
            registered = module._parameters.get(name)
            form = form_of(registered)
            if form is not None and form.is_whole:
                return  # `fsdp2.gathered` writes its values back, and registers this one
            if registered is not None and registered is not before:
                chosen = registered
        if chosen is not before and not self._fits(chosen):
            self.register(before)
            raise coded(
                ShardingStateError,
                "assigned-does-not-fit",
                f"parameter '{self.name}' was replaced by a {type(chosen).__name__} of shape "
                f"{tuple(chosen.shape)}; assign a DTensor of shape {tuple(before.shape)} sharded "
                f"like the parameter",
            )
        if chosen is not before:
            before.__dict__[FORM] = Form(weakref.ref(self))
            chosen.__dict__.pop(FORM, None)
            count_hooks(chosen)
        self.sharded = chosen
        for param in self.absorbed:
            param.sharded = chosen
        self.register(chosen)

    def absorb(self, other: ShardedParam) -> None:
        """Represent a parameter that is no longer registered, because it was tied to this one."""
        if other.sharded is not self.sharded:  # a state dict may have assigned one to both
            other.sharded.__dict__[FORM] = Form(weakref.ref(self), tied=other.name)
        self.absorbed += [other, *other.absorbed]
        for param in (other, *other.absorbed):
            param.sharded = self.sharded
        other.unsharded = other.smaller = other.accumulated = None
        other.absorbed = []

    def was_replaced(self, known: Set[int] = frozenset()) -> bool:
        """Whether, while sharded, an entry was given a DTensor of no ``known`` parameter."""
        found = [module._parameters.get(name) for module, name in self.entries]
        others = [param for param in found if param is not self.sharded and self._fits(param)]
        return any(OWNER not in p.__dict__ and id(p) not in known for p in others)

    def _fits(self, param: nn.Parameter | None) -> bool:
        return (
            isinstance(param, DTensor)
            and isinstance(param, nn.Parameter)  # others are put there by functional_call
            and param.shape == self.sharded.shape
            and param.placements == self._spec.placements
            and param._local_tensor.shape == self.local.shape
        )

    def check_usable(self, device: torch.device, offloaded: bool = False) -> None:
        """Raise, naming the parameter, if it has no memory or is not on ``device``."""
        if self._whole is None and self.local.device == device:
            return
        if self.is_meta and device.type != "meta":
            raise coded(
                ShardingStateError,
                "still-on-meta",
                f"parameter '{self.name}' is still on the meta device; call "
                f"model.to_empty(device='{device.type}') and initialise it before the first "
                f"forward",
            )
        if offloaded and self.local.device.type != device.type:
            raise coded(
                ShardingStateError,
                "moved-though-offloaded",
                f"parameter '{self.name}' is on {self.local.device}, but its unit was sharded with "
                f"CPUOffloadPolicy, which keeps parameters in CPU memory and copies them to the "
                f"device around their use; move the model back with model.to('cpu') and move only "
                f"its buffers to the device, or call fully_shard without offload_policy",
            )
        if self.local.device.type != device.type:
            raise coded(
                ShardingStateError,
                "moved-away",
                f"parameter '{self.name}' is on {self.local.device}, but its mesh computes on "
                f"{device}; move the model back with model.to('{device.type}')",
            )

    def gradient_over(self, rows: torch.Tensor) -> DTensor:
        """An object that can become ``.grad``, over ``rows``, which are in the users' form."""
        return wrap_local(rows, self.grad_spec)

    @property
    def has_grad_hooks(self) -> bool:
        """Whether a user registered a hook on the gradient or a post-accumulate-grad hook."""
        sharded = self.sharded
        return bool(sharded._post_accumulate_grad_hooks or sharded._backward_hooks)

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

    def drop_gradient(self) -> None:
        """Forget the full gradient; no rank waits for another, whatever they have."""
        self.accumulated = None
        if self.unsharded is not None:
            self.unsharded.grad = None

    def accumulate(self, dtype: torch.dtype) -> None:
        """Keep the full gradient for a later reduction, summed in ``dtype``; for a model-parallel
        one, a sum that is still to be made is made once, at the end.
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

    def localize(self, grad: torch.Tensor) -> torch.Tensor:
        """The local tensor of a model-parallel gradient, placed as the parameter is."""
        assert self.parallel is not None
        if not isinstance(grad, DTensor):
            raise coded(
                ShardingStateError,
                "plain-gradient",
                f"the gradient of parameter '{self.name}' is a plain {type(grad).__name__}, but "
                f"the parameter is a DTensor; assign DTensors to .grad",
            )
        wanted = gradient_placements(self.axes, self.parallel, grad.placements)
        if wanted != grad.placements:
            grad = grad.redistribute(placements=wanted)
        return grad.to_local()

    def materialize(self, gathered: torch.Tensor) -> None:
        """Make the unsharded parameter over ``gathered``, which has its own version counter.

        Called where nothing is recorded, outside of inference mode. ``gathered`` has ``shape``: it
        is the parameter, or its local tensor if it was a DTensor before.
        """
        if self.order is not None:
            gathered = self.as_seen(gathered)
        if self.parallel is not None:
            gathered = wrap_local(gathered, with_dtype(self.parallel, gathered.dtype))
        unsharded = nn.Parameter(gathered, requires_grad=self.sharded.requires_grad)
        unsharded.__dict__.update(self.attributes)
        unsharded.__dict__[FORM] = Form(weakref.ref(self), gathered=self.name)
        if self._hooks[0] is not None:
            unsharded._backward_hooks = self._hooks[0]
        old = self.unsharded
        if old is not None and old.grad is not None:  # accumulated without sync
            unsharded.grad = old.grad.to(unsharded.dtype)
        self.unsharded = unsharded

    def forbid_reading(self) -> None:
        """Let a backward raise that reads the unsharded parameter: autograd compares versions."""
        if self.unsharded is not None:
            torch.autograd.graph.increment_version(self.unsharded)

    @property
    def is_its_shard(self) -> bool:
        """Whether the unsharded parameter may be over the sharded one's memory: on one rank."""
        alike = self.unsharded is None or self.unsharded.dtype == self.sharded.dtype
        return self.axes.size == 1 and alike

    def make_smaller(self, rows: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
        """The parameter, between forward and backward, over a smaller group's ``rows`` in the
        compute dtype; ``mesh`` is (replicate, shard), of smaller groups.
        """
        rows = self.as_seen(rows)
        meta = with_dtype(self._spec, rows.dtype).tensor_meta
        spec = DTensorSpec(mesh, (Replicate(), Shard(self.cut.dim)), tensor_meta=meta)
        with torch.inference_mode(False):  # which training registers, too
            param = nn.Parameter(wrap_local(rows, spec), requires_grad=self.sharded.requires_grad)
        param.__dict__.update(self.attributes)
        param.__dict__[FORM] = Form(weakref.ref(self), gathered=self.name)
        param._backward_hooks = self.sharded._backward_hooks
        param._post_accumulate_grad_hooks = self.sharded._post_accumulate_grad_hooks
        self.smaller, self._smaller_version = param, param._version
        return param

    def follow_smaller(self) -> None:
        """Take over ``requires_grad`` from the form between the passes; raise if it was written."""
        smaller = self.smaller
        if smaller is None:
            return
        if smaller.requires_grad is not self.requires_grad:
            self.sharded.requires_grad = smaller.requires_grad
        if smaller._version != self._smaller_version:
            self._smaller_version = smaller._version
            refuse_written(self.name)

    def forms(self) -> list[nn.Parameter]:
        """The objects that may be registered for it: sharded, gathered, in between."""
        forms = (self.sharded, self.unsharded, self.smaller)
        return [form for form in forms if form is not None]

    def register(self, param: nn.Parameter) -> None:
        for module, name in self.entries:
            store_of(module)[name] = param
        for alias in self.aliases:
            alias[self.name] = param

    def swaps(self, param: nn.Parameter) -> list[Swap]:
        """The stores that register ``param``, ready to be run in a loop."""
        return [(store, name, param) for store, name in self.stores()]

    def stores(self) -> list[tuple[ParamStore, str]]:
        """The stores in which a form of it is registered, and the names."""
        stores = [(store_of(module), name) for module, name in self.entries]
        if self.aliases:
            stores += [(alias, self.name) for alias in self.aliases]
        return stores


def compute_dtype(options: GroupOptions, param: ShardedParam) -> torch.dtype:
    """The dtype in which a parameter is gathered; integers are gathered without a cast."""
    dtype = param.dtype
    chosen = param.dtype_override or options.precision.param_dtype
    return chosen if chosen is not None and dtype.is_floating_point else dtype


def shapes_of(params: Sequence[ShardedParam], options: GroupOptions) -> list[ParamShape]:
    """The input of the layout for the parameters, from their present dtypes.

    A codec rounds neighbors together. Model-parallel ranks round equal rows alike only where these
    have no neighbor in a message that differs between the ranks.
    """
    shapes = []
    kin: dict[object, int] = {}
    wanted, wire = options.precision.param_dtype, options.wire.gather
    for param in params:
        shard, extended = param.dtype, param.is_extended
        full = param.dtype_override or wanted  # as in `compute_dtype`
        if full is None or not shard.is_floating_point:
            full = shard
        coded = wire is not None and not (param.exact or extended)
        if coded:
            from fsdp2.core.codecs.codec import check_coded  # who needs none loads none

            check_coded(param.name, (shard, full), f"{wire}")
        shape = ParamShape(
            param.name,
            param.shape,
            param.cut,
            shard,
            full,
            extended,
            coded,
            kin.setdefault(param.differs_over, len(kin)) if coded else 0,
        )
        shapes.append(shape)
    return shapes


def is_extended(local: torch.Tensor) -> bool:
    """Whether a local tensor has all-gather hooks, or needs them as it wraps other tensors."""
    hooked = hasattr(local, PRE_HOOK) or hasattr(local, POST_HOOK)
    return hooked or is_traceable_wrapper_subclass(local)


def _shard_of(whole: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """This rank's rows of a tensor subclass, in separate memory, by the operators that torch's
    FSDP2 uses, so that a subclass made for it has them: split, new_zeros, slice and copy_.
    """
    dim = slot.dim
    padded = whole.new_zeros(slot.piece)
    length = slot.rows(rank)
    rows = padded.narrow(dim, 0, length)
    if length:
        rows.copy_(torch.chunk(whole, slot.world_size, dim)[rank])
    return rows


# ---- references from before sharding

_KNOWN = frozenset(nn.Module().__dict__) | {NAMES}
"""Attributes such as a module's parameters and submodules, which are not aliases."""


def aliases_in(modules: Iterable[nn.Module]) -> Iterator[tuple[Alias, nn.Parameter]]:
    """The aliases that attributes of modules are or hold, and the parameters they refer to; none of
    a module that defines ``__setattr__``: that keeps its own in step, as `nn.LSTM` does.
    """
    attributes = (
        (module, name, value)
        for module in modules
        if type(module).__setattr__ is nn.Module.__setattr__
        for name, value in list(module.__dict__.items())
        if name not in _KNOWN and isinstance(value, nn.Parameter | list | dict)
    )
    for module, attribute, value in attributes:
        found: list[tuple[object, object]] = []
        if isinstance(value, nn.Parameter):
            found = [(None, value)]
        elif type(value) is list:
            found = list(enumerate(value))
        elif type(value) is dict:
            found = list(value.items())
        for key, param in found:
            if isinstance(param, nn.Parameter):
                yield Alias(module, attribute, key, param), param


def refuse_gradients(param: nn.Parameter, unit: str) -> None:
    """Make a backward raise if its gradient reaches a parameter from before it was sharded;
    ``unit`` names its unit, for a message after that was deleted.
    """
    reference = weakref.ref(param)

    def refuse(_: torch.Tensor) -> NoReturn:
        form = form_of(reference())
        managed = None if form is None else form.param()
        name = f"'{managed.name}'" if managed is not None else f"of the unit of {unit}"
        raise coded(
            ShardingStateError,
            "gradient-of-former",
            f"autograd computed a gradient for the parameter {name} that fully_shard replaced; a "
            f"list, a closure, a view or a loss still refers to it, so it would train nothing: "
            f"read the parameter from its module, in the forward of its unit",
        )

    hooks: Any = OrderedDict({0: refuse})
    param._backward_hooks = hooks


# ---- hooks that users register on sharded parameters

# Autograd never comes to a sharded parameter: the reduction that delivers its gradient runs the
# hooks, on the reduced gradient of this rank's rows. It would have to look at two attributes of
# each parameter in each step. So the dicts that torch keeps the hooks in count what is put there.

Hook = Callable[[Any], Any]


class CountedHooks(OrderedDict[int, Hook]):
    """The hooks of one kind on one sharded parameter, counted in `Counts.hooks`."""

    __slots__ = ()

    def __setitem__(self, key: int, hook: Hook) -> None:
        Counts.hooks += 1
        super().__setitem__(key, hook)


def count_hooks(param: torch.Tensor) -> None:
    """From now on, hooks that are registered on ``param`` are counted; dicts that are there stay
    the objects that they are: handles of users refer to them.
    """
    if param._backward_hooks is None:
        param._backward_hooks = CountedHooks()
    if param._post_accumulate_grad_hooks is None:
        param._post_accumulate_grad_hooks = CountedHooks()
    Counts.hooks += 1  # whoever has looked at another parameter in its place looks again


def may_have_hooks(param: torch.Tensor) -> tuple[bool, bool]:
    """Whether hooks on its gradient, and after its accumulation, may exist: yes if uncounted."""
    edits, watches = param._backward_hooks, param._post_accumulate_grad_hooks
    return (
        bool(edits) or type(edits) is not CountedHooks,
        bool(watches) or type(watches) is not CountedHooks,
    )


def run_tensor_hooks(param: torch.Tensor, gradient: DTensor, name: str) -> DTensor:
    """Run the hooks of ``register_hook`` on a reduced gradient; returns the last hook's result, if
    any, and raises if that is not a gradient of the parameter.
    """
    hooks: Any = param._backward_hooks
    for hook in tuple(hooks.values()) if hooks else ():
        result = hook(gradient)
        if result is None:
            continue
        fits = isinstance(result, DTensor) and result.shape == gradient.shape
        if not fits or result.dtype != gradient.dtype:
            raise coded(
                TypeError,
                "gradient-hook-result",
                f"a hook on the gradient of parameter '{name}' must return None or a DTensor of "
                f"shape {tuple(gradient.shape)} and {gradient.dtype}, not {_described(result)}",
            )
        if result.placements != gradient.placements:
            result = result.redistribute(placements=gradient.placements)
        gradient = result.detach()
    return gradient


def _described(result: object) -> str:
    if isinstance(result, torch.Tensor):
        return f"a {type(result).__name__} of shape {tuple(result.shape)} and {result.dtype}"
    return f"a {type(result).__name__}"
