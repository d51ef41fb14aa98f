"""What people call: `fully_shard`, and the methods of the modules that it returns.

fully_shard(module) ── class becomes FSDP<Original>(FSDPModule, Original)
                    ── parameters become DTensors, one ParamGroup, one Unit
                    ── hooks that drive the unit's scheduler
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core.collectives import GroupCollectives
from fsdp2.core.config import MixedPrecisionPolicy, OffloadPolicy, ShardingStateError
from fsdp2.core.group import GroupOptions, ParamGroup
from fsdp2.core.hooks import UnitHooks, forward_method, hooks_of, start, watch_optimizers
from fsdp2.core.kernels import TorchKernels
from fsdp2.core.param import OWNER, REPLACED, ModuleSlot, ShardedParam
from fsdp2.core.registrations import mark_managed, watch_registrations
from fsdp2.core.scheduler import Scheduler, Unit
from fsdp2.core.selection import (
    NamedSlot,
    PlacementFn,
    checked_parameters,
    managed_modules,
    managed_parameters,
    slots_of,
)
from fsdp2.core.sharding import (
    ShardAxis,
    default_mesh,
    resolve_axis,
)
from fsdp2.core.streams import DeviceStreams, InlineStreams, Streams

M = TypeVar("M", bound=nn.Module)

_streams: dict[torch.device, Streams] = {}
_sharded_classes: dict[type, type] = {}


@overload
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> M: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
) -> list[nn.Module]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # frozen
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shard a module's parameters over a mesh, in place, and gather them only around their use.

    Every parameter below ``module`` that no earlier call took becomes a DTensor of which each
    rank holds its rows; together they are one group that is gathered before the module's forward
    and backward, freed after, and whose gradients are reduce-scattered. Call it bottom-up: on
    each block, then on the model.

    Args:
        module: a module, or a list of modules that share one group: gathered before the first of
            them runs, freed after the last.
        mesh: 1-D device mesh to shard over. ``None`` (default): all ranks of the default process
            group, which is started from torchrun's environment if there is none.
        reshard_after_forward: ``True`` frees the gathered parameters after forward and gathers
            them again in backward; ``False`` keeps them until backward is over. ``None``
            (default): ``False`` for the root, ``True`` for every other unit. An int equal to the
            mesh's size means ``True``, ``1`` means ``False``.
        shard_placement_fn: called with each parameter; returns the ``Shard`` to use, or ``None``
            for ``Shard(0)``. Any dim may be uneven.
        mp_policy: dtypes of compute, reduction and outputs.
        offload_policy: only the default, no offloading.
        ignored_params: parameters to leave alone: not sharded, not moved, not reduced.

    Returns:
        ``module`` itself (or the list), its class now ``FSDP<Original>``, a subclass of
        `FSDPModule` and of the original.

    Raises:
        ValueError: something about the arguments or a parameter does not fit; the message names
            it. Nothing has been changed then.
        TypeError: an argument is of the wrong type.

    Example::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    modules = _checked_modules(module)
    if type(offload_policy) is not OffloadPolicy:
        raise ValueError(
            f"fully_shard(offload_policy={offload_policy!r}) is not supported; leave it out"
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"fully_shard(mp_policy=…) takes a fsdp2.MixedPrecisionPolicy, not "
            f"{type(mp_policy).__name__}"
        )
    axis = resolve_axis(default_mesh() if mesh is None else mesh)
    reshard = _checked_reshard(reshard_after_forward, axis.size)
    found = managed_parameters(modules, ignored_params or set())
    dims = checked_parameters(found, shard_placement_fn)

    name = ", ".join(type(m).__name__ for m in modules)
    streams = _streams_for(axis.device)
    unit = Unit(name, _make_groups(name, found, dims, axis, streams, GroupOptions(mp_policy)))
    unit.reshard_after_forward = reshard
    _move_buffers(modules, ignored_params or set(), axis.device)
    hooks = UnitHooks(unit, modules, mp_policy, axis.device, streams)
    hooks.arguments = _Arguments(axis, shard_placement_fn)
    hooks.ignored = slots_of(modules, ignored_params or set())
    watch_optimizers()
    watch_registrations()
    for member in modules:
        member.__class__ = _sharded_class(type(member))
    _watch_state_dicts(unit.groups)
    return module


class FSDPModule:
    """What `fully_shard` makes of a module: the methods that control its unit.

    The class comes first in the method resolution order: ``[FSDP<Original>, FSDPModule,
    Original]``. Methods with ``recurse`` also apply to the units below.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original class: a sliced ``nn.Sequential`` is a plain one."""
        original: Any = cls.__mro__[2]
        instance = original.__new__(original)
        instance.__init__(*args, **kwargs)
        return instance

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters; not recursive.

        Args:
            async_op: ``True`` returns a handle while the all-gather may still run; the module's
                forward waits for it if nobody else does. ``False`` (default) waits and returns
                ``None``.
        """
        hooks = _hooks(self)
        scheduler = hooks.scheduler or _own_scheduler(hooks)
        scheduler.unshard(hooks.unit)
        handle = UnshardHandle(scheduler, hooks.unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's gathered parameters and register the sharded ones; not recursive."""
        _hooks(self).unit.reshard()

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that an exception ended half way.

        Call it on the root after catching the exception; the next iteration then starts clean.
        Everything is freed; gradients that were not reduced are dropped, those already on the
        sharded parameters stay until ``zero_grad()``.
        """
        hooks = _hooks(self)
        if hooks.scheduler is not None:
            if not hooks.unit.is_root:
                raise ShardingStateError(
                    f"reset_iter_state() was called on '{hooks.unit.name}', which is not the "
                    f"root; call it on the module whose forward you call"
                )
            hooks.scheduler.reset()

    def shard_new_parameters(self) -> None:
        """Take over parameters and modules that were added below after `fully_shard`.

        They become one more group of this unit, with the mesh and policies of its call of
        `fully_shard`: an adapter in every block is gathered and reduced with its block. Parameters
        of units below and ``ignored_params`` are left alone. Call it on every rank, between
        iterations, then give the parameters to the optimizer. For a unit of their own, call
        `fully_shard` on the new module instead.

        Raises:
            ValueError: a new parameter cannot be sharded, or is tied to a managed one; the message
                names it.

        Example::

            block.adapter = Adapter(dim)
            block.shard_new_parameters()
            optimizer.add_param_group({"params": block.adapter.parameters()})
        """
        hooks = _hooks(self)
        unit, arguments = hooks.unit, hooks.arguments
        found = managed_parameters(hooks.modules, set(), new_to=hooks)
        dims = checked_parameters(found, arguments.shard_placement_fn)
        options = unit.groups[0].options if unit.groups else GroupOptions(hooks.precision)
        groups = _make_groups(
            f"{unit.name} (new)", found, dims, arguments.axis, hooks.streams, options
        )
        _move_buffers(hooks.modules, set(), arguments.axis.device)
        unit.groups += groups
        _watch_state_dicts(groups)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward reduces gradients.

        Args:
            requires_gradient_sync: ``False`` accumulates full gradients, without communication,
                until a backward with ``True`` reduces the sum.
            recurse: whether units below follow. Default ``True``.
        """
        for hooks in _units(self, recurse):
            hooks.unit.sync = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the next backward is the iteration's last.

        Args:
            is_last_backward: ``False`` leaves reductions in flight and a prefetched unit gathered
                for the backward to come. Default behaviour is ``True``.
        """
        _scheduler(self).is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether forward frees the gathered parameters at its end.

        Args:
            reshard_after_forward: as the argument of `fully_shard`, but only a bool.
            recurse: whether units below follow. Default ``True``.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward takes a bool, not {reshard_after_forward!r}"
            )
        for hooks in _units(self, recurse):
            hooks.unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward frees the gathered parameters at its end.

        Args:
            reshard_after_backward: ``False`` saves the next micro-batch's all-gathers for the
                memory of the gathered parameters. An optimizer step makes kept parameters out of
                date: the next forward then gathers them again.
            recurse: whether units below follow. Default ``True``.
        """
        for hooks in _units(self, recurse):
            hooks.unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Choose the units to gather when this unit's forward starts.

        Args:
            modules: sharded modules, in the order of their all-gathers; empty returns to the
                order of the last forward. Two or more overlap more and hold more memory.
        """
        _hooks(self).unit.forward_prefetch = [h.unit for h in _checked_targets(modules)]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Choose the units to gather when this unit's backward starts.

        Args:
            modules: as for `set_modules_to_forward_prefetch`; empty returns to this iteration's
                forward in reverse.
        """
        _hooks(self).unit.backward_prefetch = [h.unit for h in _checked_targets(modules)]

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward also reduces parameters that got no gradient on this rank.

        Needed where ranks use different parameters (experts, modalities). By default a parameter
        without a gradient on a rank gets none for that rank's rows, and a unit without any
        gradient is not reduced, so that ranks which differ would wait for each other.

        Args:
            reduce_scatter_unused_params: ``True`` counts a missing gradient as zeros. Every
                trainable parameter then gets a ``.grad``, zeros if no rank used it. All ranks
                must call the same units in forward, in the same order.
            recurse: whether units below follow. Default ``True``.
        """
        for hooks in _units(self, recurse):
            hooks.unit.reduce_unused = reduce_scatter_unused_params

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradients by ``factor`` instead of averaging over the ranks; not recursive.

        Args:
            factor: a positive number; ``1.0`` sums.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor takes a positive number, not {factor!r}")
        for group in _hooks(self).unit.groups:
            group.set_options(GroupOptions(group.options.precision, float(factor)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``; gradients that were accumulated without sync go too."""
        super().zero_grad(set_to_none)  # type: ignore[misc]  # nn.Module's
        hooks = _hooks(self)
        root = hooks.scheduler if hooks.unit.is_root else None
        units = root.units if root is not None else [h.unit for h in _units(self, recurse=True)]
        for unit in units:
            for group in unit.groups:
                if group.accumulates:
                    group.discard_gradients()
                if group.is_unsharded:  # the shards, whose gradients count, are not registered
                    for param in group.params:
                        param.clear_gradient(set_to_none)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`.to()`, `.cuda()`, `.to_empty()` …: on the sharded parameters."""
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]  # nn.Module's
        for group in _hooks(self).unit.groups:
            group.rebind()
        return result

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be deep-copied: its parameters belong to a process "
            f"group; copy the model before fully_shard, or copy its state_dict()"
        )


class UnshardHandle:
    """Returned by ``unshard(async_op=True)``."""

    def __init__(self, scheduler: Scheduler, unit: Unit) -> None:
        self._scheduler = scheduler
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Let the current stream wait for the all-gather and register the parameters."""
        if self._unit is not None:
            self._scheduler.wait(self._unit)
            self._unit = None


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method gather and free parameters as ``forward`` does.

    Args:
        module: the module; nothing happens if it is not sharded.
        method_name: for example ``"generate"``.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method '{method_name}'")
    wrapped = forward_method(_hooks(module), method)
    setattr(module, method_name, wrapped.__get__(module, type(module)))


# ---- checks of arguments


def _checked_modules(module: Any) -> tuple[nn.Module, ...]:
    modules = (module,) if isinstance(module, nn.Module) else tuple(module)
    if not modules:
        raise ValueError("fully_shard got an empty list; pass at least one module")
    for member in modules:
        if not isinstance(member, nn.Module):
            raise TypeError(
                f"fully_shard takes a module or a list of modules, not {type(member).__name__}"
            )
        if hooks_of(member) is not None:
            raise ValueError(
                f"fully_shard was already called on this {type(member).__name__}; call it once"
            )
        containers = (nn.ModuleList, nn.ModuleDict)
        if isinstance(member, containers) and type(member).forward is nn.Module.forward:
            raise ValueError(
                f"{type(member).__name__} has no forward, so nothing would gather its "
                f"parameters; call fully_shard on its modules, or on a list of them"
            )
    inner = {below for member in modules for below in list(member.modules())[1:]}
    return tuple(member for member in modules if member not in inner)


def _checked_reshard(value: bool | int | None, size: int) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(
            f"reshard_after_forward={value!r} is neither a bool nor an int; pass True or False"
        )
    if value == size:
        return True
    if value == 1:
        return False
    raise ValueError(
        f"reshard_after_forward={value} is not supported on a mesh of {size} ranks; pass True, "
        f"False, or {size} (the same as True)"
    )


@dataclass(frozen=True)
class _Arguments:
    """Of `fully_shard`, for parameters that are added later."""

    axis: ShardAxis
    shard_placement_fn: PlacementFn | None


# ---- assembly


def _make_groups(
    name: str,
    found: dict[nn.Parameter, list[NamedSlot]],
    dims: dict[nn.Parameter, int],
    axis: ShardAxis,
    streams: Streams,
    options: GroupOptions,
) -> list[ParamGroup]:
    if not found:
        return []
    params = []
    for param, slots in found.items():
        targets: list[ModuleSlot] = [(slot[0], slot[1]) for slot in slots]
        params.append(ShardedParam(slots[0].name, param, targets, dims[param], axis))
    collectives = GroupCollectives(axis.group, axis.device, streams.asynchronous)
    group = ParamGroup(
        name, params, collectives, streams, TorchKernels(axis.device), options, axis.device
    )
    group.adopt()
    mark_managed(params)
    for param, managed in zip(found, params, strict=True):
        param.__dict__[OWNER] = managed.attributes[OWNER] = name
        param.__dict__[REPLACED] = managed
        managed.sharded.__dict__[OWNER] = name
    return [group]


def _move_buffers(
    modules: tuple[nn.Module, ...], ignored: set[nn.Parameter], device: torch.device
) -> None:
    for owner, _ in managed_modules(modules):
        for buffer in owner._buffers.values():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                buffer.data = buffer.to(device)


def _streams_for(device: torch.device) -> Streams:
    if device not in _streams:
        _streams[device] = InlineStreams() if device.type == "cpu" else DeviceStreams(device)
    return _streams[device]


def _sharded_class(original: type) -> type:
    if original not in _sharded_classes:
        _sharded_classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
    return _sharded_classes[original]


def _watch_state_dicts(groups: list[ParamGroup]) -> None:
    """State dicts hold the sharded parameters: register those first, without communication."""
    for group in groups:

        def before(*_: Any, group: ParamGroup = group) -> None:
            group.reshard()

        def after(*_: Any, group: ParamGroup = group) -> None:
            group.reregister()

        for owner in {module for param in group.params for module, _ in param.slots}:
            owner.register_state_dict_pre_hook(before)
            owner.register_load_state_dict_pre_hook(before)
            owner.register_load_state_dict_post_hook(after)


# ---- look-ups


def _hooks(module: Any) -> UnitHooks:
    hooks = hooks_of(module)
    if hooks is None:
        raise ValueError(
            f"{type(module).__name__} is not sharded; call fully_shard on it before its methods"
        )
    return hooks


def _units(module: Any, recurse: bool) -> list[UnitHooks]:
    members = cast(nn.Module, module).modules() if recurse else [module]
    found = {hooks: None for member in members if (hooks := hooks_of(member)) is not None}
    return list(found)


def _scheduler(module: Any) -> Scheduler:
    hooks = _hooks(module)
    return hooks.scheduler or start(hooks)


def _own_scheduler(hooks: UnitHooks) -> Scheduler:
    """A scheduler for a call that comes before the first forward, without choosing a root."""
    return Scheduler([hooks.unit], hooks.streams)


def _checked_targets(modules: list[FSDPModule]) -> list[UnitHooks]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"prefetch lists hold sharded modules, but got a {type(module).__name__}; call "
                f"fully_shard on it"
            )
    return [_hooks(module) for module in modules]
