"""The main entry point: `fully_shard`.

A call is first planned (`plan_call`), which raises all possible errors and changes nothing, and
then applied (`apply_calls`). Code that makes several units of a model plans all of them first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2.core import config
from fsdp2.core.config import GroupOptions
from fsdp2.core.device.buffers import empties_storages
from fsdp2.core.device.kernels import stage_of
from fsdp2.core.errors import coded
from fsdp2.core.layout.mesh import MeshAxes, default_mesh
from fsdp2.core.modules.dynamo import separate_in_graphs
from fsdp2.core.modules.engine import watch_backwards
from fsdp2.core.modules.hooks import UnitHooks
from fsdp2.core.modules.registrations import watch_registrations
from fsdp2.core.modules.registry import Arguments, modules_below, record_of
from fsdp2.core.modules.saved import SavingUnitHooks
from fsdp2.core.params.param import PlannedParam, is_extended
from fsdp2.core.schedule.observers import newly_observed
from fsdp2.core.schedule.unit import Unit
from fsdp2.interop import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    check_untouched,
    register_with_torch,
    replicated_parameters,
    state_of,
)
from fsdp2.sharding.assembly import connect_meshes, finish, make_groups
from fsdp2.sharding.meshes import Levels, resolve_axes
from fsdp2.sharding.module import set_sharded_class, sharded_class
from fsdp2.sharding.plan import Pending, PlacementFn, PlannedCall, plan_unit
from fsdp2.sharding.random_values import draw_as_unsharded

M = TypeVar("M", bound=nn.Module | list[nn.Module])


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | Levels | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008  # frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """Shard a module's parameters over a mesh, in place, and unshard them only around their use.

    Every parameter below ``module`` that no earlier call took becomes a DTensor, of which each rank
    holds a shard. Together these parameters form one group, which is unsharded before the module's
    forward and backward and resharded after each; its gradients are reduce-scattered. Call it
    bottom-up: on each block, then on the model.

    Args:
        module: a module, or a list of modules that share one group, which is unsharded before the
            first of them runs and resharded after the last.
        mesh: the device mesh to shard over. 1-D: (shard,). 2-D: (replicate, shard), which is HSDP:
            parameters are sharded over the second dim and replicated over the first. `Levels` of a
            2-D mesh (between, inside): master parameters are sharded over both dims. ``None``
            (default): all ranks of the default process group, which fsdp2 starts from torchrun's
            environment if it does not exist.
        reshard_after_forward: ``True`` reshards the parameters after forward and gathers them again
            in backward; ``False`` keeps them unsharded until backward has ended. ``None``
            (default): ``False`` for the root, ``True`` for every other unit. An int reshards to
            groups of that many adjacent ranks after forward, so that backward gathers within the
            group. It must divide the size of the shard axis; the full size means ``True``, and
            ``1`` means ``False``.
        shard_placement_fn: called with each parameter. It returns the ``Shard`` to use, ``None``
            for the default, or a `ShardPlacementResult` with a separate mesh for the parameter.
            Each dim may be uneven. The default is ``Shard(0)``, unless equal pieces of dim 0 pad
            more than 3 % of the parameter and more than 1 MiB over all ranks; then it is the dim
            that pads least. A tuple of ``Shard`` lists the allowed dims: fsdp2 uses the first,
            unless it pads too much by the same rule. It then uses another one, or ``(Shard(0),
            Shard(d))`` on a mesh of two shard dims if that pads less or needs no copies. A
            parameter sharded on two dims is on a different mesh from the rest: torch's clipping
            raises for this, `fsdp2.clip_grad_norm_` supports it. ``Replicate()`` keeps a parameter
            full on every rank of the mesh: it is never gathered, and its gradients are all-reduced
            at the end of backward, together with those of all such parameters below the root
            (`fsdp2.whole_below`). Its optimizer state is also replicated. Ranks must initialize it
            with the same values.
        mp_policy: dtypes of compute, reduction and outputs. ``None`` means the default, which casts
            nothing.
        offload_policy: `CPUOffloadPolicy` keeps shards, gradients and optimizer states in CPU
            memory. The default, also ``None``, keeps them on the device.
        ignored_params: parameters that are neither sharded nor moved nor reduced.
        dp_mesh_dims: names of the data-parallel dims of ``mesh``. ``mesh`` is then the full SPMD
            mesh: every parameter must be a DTensor on it, replicated on those dims.

    Returns:
        ``module`` itself (or the list). Its class is now ``FSDP<Original>``, a subclass of
        `FSDPModule` and of the original.

    Raises:
        ValueError: an argument or a parameter is invalid; the message names it. Nothing has changed
            in this case.
        TypeError: an argument has the wrong type.

    Example::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    call = plan_call(
        module,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
    )
    apply_calls([call])
    return module


setattr(fully_shard, "state", state_of)  # noqa: B010  # where torch's clients look for a state


# ---- planned, then applied


def plan_call(
    module: object,
    *,
    mesh: DeviceMesh | Levels | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    pending: Pending | None = None,
) -> PlannedCall:
    """Determine everything that a call of `fully_shard` with these arguments will do after
    ``pending`` ones, or raise; changes nothing, but ``mesh=None`` may start the process group.
    """
    modules = _checked_modules(module, pending)
    policy = _checked_policy(mp_policy)
    offload = _checked_offload(offload_policy)
    ignored = _checked_ignored(ignored_params) | replicated_parameters(modules)
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise coded(
            TypeError,
            "placement-function",
            f"fully_shard(shard_placement_fn=…) takes a function of a parameter, not "
            f"{shard_placement_fn!r}; pass for example lambda param: Shard(1)",
        )
    axes = resolve_axes(default_mesh() if mesh is None else mesh, dp_mesh_dims)
    name = ", ".join([type(m).__name__ for m in modules])
    arguments, options = Arguments(axes, offload, None), GroupOptions(policy)
    call = plan_unit(
        name, modules, ignored, arguments, options, shard_placement_fn, pending=pending
    )
    call.reshard_after_forward, smaller = _checked_reshard(reshard_after_forward, axes, call.plans)
    call.arguments = Arguments(axes, offload, smaller)
    call.check(compare=pending is None or not pending.ahead)
    if pending is not None:
        pending.add(call)
    return call


def plan_calls(
    calls: Iterable[tuple[object, Mapping[str, Any]]], *, ahead: bool = False
) -> list[PlannedCall]:
    """Plan calls that are applied one after the other, given as modules and arguments; if
    ``ahead`` of memory and values that parameters get in between, only to raise what is known now.
    """
    pending = Pending(ahead=ahead)
    return [plan_call(module, **arguments, pending=pending) for module, arguments in calls]


def apply_calls(calls: Sequence[PlannedCall]) -> None:
    """Apply planned calls in this order.

    Process groups are created first. Only this step may still fail, if a peer is missing.
    """
    for call in calls:
        connect_meshes(call)
    for call in calls:
        groups, device = make_groups(call), call.arguments.axes.device
        unit = Unit(call.name, newly_observed(groups), call.options)
        unit.reshard_after_forward = call.reshard_after_forward
        hooks = UnitHooks if empties_storages(device) else SavingUnitHooks
        streams = groups[0].streams if groups else stage_of(device).streams
        record = hooks(unit, call.modules, call.arguments, call.left_alone, streams)
        register_with_torch(call.modules, record)
        watch_registrations()
        watch_backwards()
        separate_in_graphs()
        for member in call.modules:
            set_sharded_class(member)
        if device.type == "cpu" or call.arguments.offload is not None:
            draw_as_unsharded()
        finish(call, record, groups)


# ---- checks of arguments


def _checked_modules(module: object, pending: Pending | None) -> tuple[nn.Module, ...]:
    if not isinstance(module, nn.Module | Iterable):
        raise coded(
            TypeError,
            "not-a-module-or-list",
            f"fully_shard takes a module or a list of modules, not {type(module).__name__}",
        )
    modules = (module,) if isinstance(module, nn.Module) else tuple(module)
    if not modules:
        raise coded(
            ValueError, "empty-list", "fully_shard got an empty list; pass at least one module"
        )
    inner: set[nn.Module] = set()
    for position, member in enumerate(modules):
        if not isinstance(member, nn.Module):
            raise coded(
                TypeError,
                "not-a-module",
                f"fully_shard takes a list of modules, but one in it is a {type(member).__name__}; "
                f"leave it out",
            )
        if id(member) in map(id, modules[:position]):
            raise coded(
                ValueError,
                "listed-twice",
                f"fully_shard got the same {type(member).__name__} twice in one list; list it once",
            )
        if record_of(member) is not None or (pending is not None and member in pending.modules):
            raise coded(
                ValueError,
                "applied-twice",
                f"fully_shard was already called on this {type(member).__name__}; call it once",
            )
        below = modules_below(member)
        inner.update(below[1:])
        check_untouched(member, below)
        _check_wrappers(member, below)
        containers = (nn.ModuleList, nn.ModuleDict)
        if isinstance(member, containers) and type(member).forward is nn.Module.forward:
            raise coded(
                ValueError,
                "container",
                f"{type(member).__name__} has no forward, so nothing would gather its "
                f"parameters; call fully_shard on its modules, or on a list of them",
            )
    outer = tuple([member for member in modules if member not in inner])
    for member in outer:
        sharded_class(member)  # raises if there can be none
    return outer


def _check_wrappers(module: nn.Module, inside: Sequence[nn.Module]) -> None:
    """Refuse modules that manage their parameters themselves, in ways that sharding would break."""
    kinds = (nn.parallel.DistributedDataParallel, nn.DataParallel, torch.jit.ScriptModule)
    if not [below for below in inside if isinstance(below, kinds)]:
        return
    for name, below in module.named_modules():
        if isinstance(below, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise coded(
                ValueError,
                "wrapped",
                f"'{name or '(root)'}' is a {type(below).__name__}, which replicates parameters "
                f"and reduces gradients itself; call fully_shard on its .module instead, with a "
                f"2-D mesh (replicate, shard) if you need replicas",
            )
        if isinstance(below, torch.jit.ScriptModule):
            raise coded(
                ValueError,
                "scripted",
                f"'{name or '(root)'}' is a {type(below).__name__}, whose code cannot use sharded "
                f"parameters; call fully_shard on the module that torch.jit compiled, or use "
                f"torch.compile",
            )


def _checked_ignored(ignored: object) -> set[nn.Parameter]:
    params = set(ignored) if isinstance(ignored, Iterable) else {ignored}
    for param in params - {None}:
        if not isinstance(param, nn.Parameter):
            raise coded(
                TypeError,
                "ignored-type",
                f"fully_shard(ignored_params=…) takes a set of parameters, but got a "
                f"{type(param).__name__}; pass for example set(module.parameters())",
            )
    return {param for param in params if isinstance(param, nn.Parameter)}


def _checked_policy(policy: object) -> config.MixedPrecisionPolicy:
    if policy is None:  # frameworks pass on what their users left out
        return MixedPrecisionPolicy()
    if isinstance(policy, config.MixedPrecisionPolicy):
        return policy
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if type(policy).__name__ != "MixedPrecisionPolicy" or not hasattr(policy, names[-1]):
        raise coded(
            TypeError,
            "policy-type",
            f"fully_shard(mp_policy=…) takes a fsdp2.MixedPrecisionPolicy, not "
            f"{type(policy).__name__}",
        )
    override = getattr(policy, "param_dtype_override_fn", None)  # torch's own, of any version
    return MixedPrecisionPolicy(
        *(getattr(policy, name) for name in names), param_dtype_override_fn=override
    )


def _checked_offload(policy: Any) -> config.CPUOffloadPolicy | None:
    if isinstance(policy, config.CPUOffloadPolicy):
        return policy
    if policy is None:
        return None
    kind = type(policy).__name__
    if kind == "CPUOffloadPolicy":  # torch's own
        return CPUOffloadPolicy(policy.pin_memory)
    if kind == "OffloadPolicy":
        return None
    raise coded(
        TypeError,
        "offload-type",
        f"fully_shard(offload_policy=…) takes a fsdp2.CPUOffloadPolicy or None, not {kind}",
    )


def _checked_reshard(
    value: bool | int | None, axes: MeshAxes, plans: list[PlannedParam]
) -> tuple[bool | None, int | None]:
    """Whether forward reshards, and over how many ranks if not over all."""
    if value is None or isinstance(value, bool):
        return value, None
    if not isinstance(value, int):
        raise coded(
            ValueError,
            "reshard-type",
            f"reshard_after_forward={value!r} is neither a bool nor an int; pass True or False",
        )
    if value == axes.size:
        return True, None
    if value == 1:
        return False, None
    plans = [plan for plan in plans if not plan.axes.whole]
    for size in {axes.size, *(plan.axes.size for plan in plans)}:
        if value < 1 or size % value != 0:
            raise coded(
                ValueError,
                "reshard-size",
                f"reshard_after_forward={value} does not divide the {size} ranks that parameters "
                f"are sharded over; pass True, False, or a divisor such as the GPUs of a node",
            )
    for plan in plans:
        if isinstance(plan.param, DTensor) or is_extended(plan.param):
            what = (
                "is a DTensor already"
                if isinstance(plan.param, DTensor)
                else "has all-gather hooks"
            )
            raise coded(
                ValueError,
                "reshard-smaller-group",
                f"reshard_after_forward={value} cannot be used with parameter '{plan.name}', which "
                f"{what}; pass True or False",
            )
    return True, value
