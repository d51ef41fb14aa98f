"""What people call: `fully_shard`.

fully_shard(module) ── class becomes FSDP<Original>(FSDPModule, Original)
                    ── parameters become DTensors: one Unit, one ParamGroup a mesh
                    ── hooks that drive the unit's scheduler

Everything is checked before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2.core.collectives import (
    Collectives,
    GroupCollectives,
    ReplicaCollectives,
    SoloCollectives,
)
from fsdp2.core.config import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    GroupOptions,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from fsdp2.core.extension import check_hooks
from fsdp2.core.group import ParamGroup
from fsdp2.core.hooks import UnitHooks, hooks_of, watch_optimizers
from fsdp2.core.kernels import TorchKernels
from fsdp2.core.param import OWNER, ModuleSlot, ShardedParam, is_extended
from fsdp2.core.post_forward import SmallerGroup
from fsdp2.core.scheduler import Unit
from fsdp2.core.sharding import (
    MeshAxes,
    ShardPlacementResult,
    axes_of_info,
    check_placement,
    check_shardable,
    default_mesh,
    local_of,
    resolve_axes,
    smaller_mesh,
)
from fsdp2.core.streams import DeviceStreams, InlineStreams, Streams
from fsdp2.interop import announce, check_untouched
from fsdp2.module import FSDPModule

M = TypeVar("M", bound=nn.Module)
PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]

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
    dp_mesh_dims: DataParallelMeshDims | None = ...,
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
    dp_mesh_dims: DataParallelMeshDims | None = ...,
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
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard a module's parameters over a mesh, in place, and gather them only around their use.

    Every parameter below ``module`` that no earlier call took becomes a DTensor of which each
    rank holds its rows; together they are one group that is gathered before the module's forward
    and backward, freed after, and whose gradients are reduce-scattered. Call it bottom-up: on
    each block, then on the model.

    Args:
        module: a module, or a list of modules that share one group: gathered before the first of
            them runs, freed after the last.
        mesh: device mesh to shard over. 1-D: (shard,). 2-D: (replicate, shard), which is HSDP:
            parameters are sharded over the second dim and copied along the first. ``None``
            (default): all ranks of the default process group, which is started from torchrun's
            environment if there is none.
        reshard_after_forward: ``True`` frees the gathered parameters after forward and gathers
            them again in backward; ``False`` keeps them until backward is over. ``None``
            (default): ``False`` for the root, ``True`` for every other unit. An int keeps this
            many ranks' shards after forward, so that backward gathers from that few neighbours:
            a divisor of the shard axis's size, of which the size itself means ``True`` and ``1``
            means ``False``.
        shard_placement_fn: called with each parameter; returns the ``Shard`` to use, ``None`` for
            ``Shard(0)``, or a `ShardPlacementResult` with a mesh of the parameter's own. Any dim
            may be uneven.
        mp_policy: dtypes of compute, reduction and outputs.
        offload_policy: `CPUOffloadPolicy` keeps shards, gradients and optimizer states in CPU
            memory. The default keeps them on the device.
        ignored_params: parameters to leave alone: not sharded, not moved, not reduced.
        dp_mesh_dims: names of the data-parallel dims of ``mesh``, which then is the full SPMD mesh
            that every parameter must be a DTensor on, replicated on those dims.

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
    policy = _checked_policy(mp_policy)
    offload = _checked_offload(offload_policy)
    ignored = ignored_params or set()
    axes = resolve_axes(default_mesh() if mesh is None else mesh, dp_mesh_dims)
    found = _managed_parameters(modules, ignored)
    plans = _plan(found, axes, shard_placement_fn, policy)
    _check_one_device(found)
    reshard, smaller = _checked_reshard(reshard_after_forward, axes, plans)

    name = ", ".join(type(m).__name__ for m in modules)
    streams = _streams_for(axes.device)
    options = GroupOptions(policy)
    unit = Unit(name, _make_groups(name, plans, streams, options, offload))
    unit.reshard_after_forward = reshard
    if smaller is not None:
        for group, own in zip(unit.groups, _axes_in(plans), strict=True):
            if own.size != smaller:
                group.set_smaller_group(_smaller_group(own, smaller, streams))
    _move_buffers(modules, ignored, axes.device)
    announce(modules, UnitHooks(unit, modules, policy, axes.device, streams))
    watch_optimizers()
    for member in modules:
        member.__class__ = _sharded_class(type(member))
    _watch_state_dicts(unit)
    return module


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
        check_untouched(member)
        containers = (nn.ModuleList, nn.ModuleDict)
        if isinstance(member, containers) and type(member).forward is nn.Module.forward:
            raise ValueError(
                f"{type(member).__name__} has no forward, so nothing would gather its "
                f"parameters; call fully_shard on its modules, or on a list of them"
            )
    inner = {below for member in modules for below in list(member.modules())[1:]}
    return tuple(member for member in modules if member not in inner)


def _checked_policy(policy: Any) -> MixedPrecisionPolicy:
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if type(policy).__name__ != "MixedPrecisionPolicy" or not hasattr(policy, names[-1]):
        raise TypeError(
            f"fully_shard(mp_policy=…) takes a fsdp2.MixedPrecisionPolicy, not "
            f"{type(policy).__name__}"
        )
    override = getattr(policy, "param_dtype_override_fn", None)  # torch's own, of any version
    return MixedPrecisionPolicy(
        *(getattr(policy, name) for name in names), param_dtype_override_fn=override
    )


def _checked_offload(policy: Any) -> CPUOffloadPolicy | None:
    if isinstance(policy, CPUOffloadPolicy):
        return policy
    kind = type(policy).__name__
    if kind == "CPUOffloadPolicy":  # torch's own
        return CPUOffloadPolicy(policy.pin_memory)
    if kind == "OffloadPolicy":
        return None
    raise TypeError(
        f"fully_shard(offload_policy=…) takes a fsdp2.CPUOffloadPolicy or nothing, not {kind}"
    )


def _checked_reshard(
    value: bool | int | None, axes: MeshAxes, plans: list[_Plan]
) -> tuple[bool | None, int | None]:
    """Whether forward frees, and to how many ranks' shards if not to all."""
    if value is None or isinstance(value, bool):
        return value, None
    if not isinstance(value, int):
        raise ValueError(
            f"reshard_after_forward={value!r} is neither a bool nor an int; pass True or False"
        )
    if value == axes.size:
        return True, None
    if value == 1:
        return False, None
    for size in {axes.size, *(plan.axes.size for plan in plans)}:
        if value < 1 or size % value != 0:
            raise ValueError(
                f"reshard_after_forward={value} does not divide the {size} ranks that parameters "
                f"are sharded over; pass True, False, or a divisor such as the GPUs of a node"
            )
    for plan in plans:
        if isinstance(plan.param, DTensor) or is_extended(plan.param):
            what = (
                "is a DTensor already"
                if isinstance(plan.param, DTensor)
                else "has all-gather hooks"
            )
            raise ValueError(
                f"reshard_after_forward={value} cannot be used with parameter '{plan.name}', which "
                f"{what}; pass True or False"
            )
    return True, value


@dataclass(frozen=True)
class _Plan:
    """What is to become of a parameter."""

    name: str
    param: nn.Parameter
    slots: list[ModuleSlot]
    axes: MeshAxes
    dim: int
    compute_dtype: torch.dtype | None


def _plan(
    found: dict[nn.Parameter, list[_NamedSlot]],
    axes: MeshAxes,
    choose: PlacementFn | None,
    policy: MixedPrecisionPolicy,
) -> list[_Plan]:
    plans = []
    meshes: dict[Any, MeshAxes] = {}
    for param, slots in found.items():
        name = slots[0].name
        _check_unowned(name, param)
        placement: Any = choose(param) if choose is not None else None
        own = axes
        if hasattr(placement, "mesh_info"):  # ours, or torch's
            found_axes = axes_of_info(name, placement.mesh_info)
            key = (found_axes.group, found_axes.replicas)
            own = meshes.setdefault(key, found_axes)
            if key == (axes.group, axes.replicas):
                own = axes
            placement = placement.placement
        check_shardable(name, param, own)
        dim = check_placement(name, param, placement)
        _check_extension(name, param, own, dim)
        where: list[ModuleSlot] = [(slot[0], slot[1]) for slot in slots]
        plans.append(_Plan(name, param, where, own, dim, policy.compute_dtype(name, param)))
    return plans


def _check_extension(name: str, param: nn.Parameter, axes: MeshAxes, dim: int) -> None:
    local = local_of(param)
    check_hooks(name, local, dim, local.shape[dim] % axes.size == 0)
    if is_extended(local):
        _ = axes.shard_mesh  # its hooks get this mesh, which must have a name


def _axes_in(plans: list[_Plan]) -> list[MeshAxes]:
    return list({id(plan.axes): plan.axes for plan in plans}.values())


class _NamedSlot(tuple[nn.Module, str, str]):
    """A module, the parameter's name in it, and its full name below the sharded module."""

    @property
    def name(self) -> str:
        return self[2]


def _managed_parameters(
    modules: tuple[nn.Module, ...], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, list[_NamedSlot]]:
    found: dict[nn.Parameter, list[_NamedSlot]] = {}
    for owner, prefix in _managed_modules(modules):
        for key, param in owner._parameters.items():
            if param is not None and param not in ignored:
                found.setdefault(param, []).append(_NamedSlot((owner, key, prefix + key)))
    return found


def _managed_modules(modules: tuple[nn.Module, ...]) -> Iterator[tuple[nn.Module, str]]:
    """Modules below ``modules`` that no other unit has, parents first, with name prefixes."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str]]:
        if module in seen:
            return
        seen.add(module)
        yield module, prefix
        for name, child in module.named_children():
            if hooks_of(child) is None:
                yield from walk(child, f"{prefix}{name}.")

    for module in modules:
        yield from walk(module, "")


def _check_unowned(name: str, param: nn.Parameter) -> None:
    owner = param.__dict__.get(OWNER)
    if owner is not None and isinstance(param, DTensor):
        raise ValueError(
            f"parameter '{name}' already belongs to the unit of {owner}; call fully_shard on "
            f"children before their parents"
        )
    if owner is not None:
        raise ValueError(
            f"parameter '{name}' is tied to a parameter of the unit of {owner}; put both modules "
            f"into one unit with fully_shard([module_a, module_b])"
        )


def _check_one_device(found: dict[nn.Parameter, list[_NamedSlot]]) -> None:
    meta = [slots[0].name for param, slots in found.items() if param.is_meta]
    real = [slots[0].name for param, slots in found.items() if not param.is_meta]
    if meta and real:
        raise ValueError(
            f"parameter '{meta[0]}' is on the meta device and '{real[0]}' is not; materialise "
            f"all parameters of a unit, or none"
        )


# ---- assembly


def _make_groups(
    name: str,
    plans: list[_Plan],
    streams: Streams,
    options: GroupOptions,
    offload: CPUOffloadPolicy | None,
) -> list[ParamGroup]:
    """A group for each mesh, in the order in which parameters name them."""
    groups = []
    for axes in _axes_in(plans):
        members = [plan for plan in plans if plan.axes is axes]
        params = [
            ShardedParam(plan.name, plan.param, plan.slots, plan.dim, axes, plan.compute_dtype)
            for plan in members
        ]
        group = ParamGroup(
            name,
            params,
            _collectives(axes, streams),
            streams,
            TorchKernels(axes.device),
            options,
            axes.device,
            None if axes.replicas is None else _replicas(axes, streams),
            _effective_offload(offload, axes.device),
        )
        group.adopt()
        for plan, managed in zip(members, params, strict=True):
            plan.param.__dict__[OWNER] = name
            managed.sharded.__dict__[OWNER] = name
        groups.append(group)
    return groups


def _collectives(axes: MeshAxes, streams: Streams) -> Collectives:
    if axes.group is None:
        return SoloCollectives()
    return GroupCollectives(axes.group, axes.device, streams.asynchronous)


def _replicas(axes: MeshAxes, streams: Streams) -> ReplicaCollectives:
    assert axes.replicas is not None
    return ReplicaCollectives(axes.replicas, streams.asynchronous)


def _effective_offload(
    offload: CPUOffloadPolicy | None, device: torch.device
) -> CPUOffloadPolicy | None:
    """``None`` where shards are in CPU memory anyway."""
    return None if device.type == "cpu" else offload


def _smaller_group(axes: MeshAxes, size: int, streams: Streams) -> SmallerGroup:
    mesh = smaller_mesh(axes.mesh, size)
    group = mesh.get_group("shard")
    return SmallerGroup(GroupCollectives(group, axes.device, streams.asynchronous), mesh)


def _move_buffers(
    modules: tuple[nn.Module, ...], ignored: set[nn.Parameter], device: torch.device
) -> None:
    for owner, _ in _managed_modules(modules):
        for buffer in owner._buffers.values():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                buffer.data = buffer.to(device)


def _streams_for(device: torch.device) -> Streams:
    if device not in _streams:
        _streams[device] = InlineStreams() if device.type == "cpu" else DeviceStreams(device)
    return _streams[device]


def _sharded_class(original: type) -> type:
    if original not in _sharded_classes:
        attributes = {"_fsdp2_original": original}
        _sharded_classes[original] = type(
            f"FSDP{original.__name__}", (FSDPModule, original), attributes
        )
    return _sharded_classes[original]


def _watch_state_dicts(unit: Unit) -> None:
    """State dicts hold the sharded parameters: register those first, without communication."""
    for group in unit.groups:

        def before(*_: Any, group: ParamGroup = group) -> None:
            group.reshard()
            group.settle()

        def after(*_: Any, group: ParamGroup = group) -> None:
            group.reregister()

        for owner in {module for param in group.params for module, _ in param.slots}:
            owner.register_state_dict_pre_hook(before)
            owner.register_load_state_dict_pre_hook(before)
            owner.register_load_state_dict_post_hook(after)
