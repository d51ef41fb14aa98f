"""From plans to parameter groups: what `fully_shard` makes of a unit's parameters.

plans ── make_groups ──> a ParamGroup for each mesh, laid out, its parameters DTensors
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch import nn

from fsdp2.checks.presence import announce
from fsdp2.core.config import CPUOffloadPolicy, GroupOptions
from fsdp2.core.device import rehearsal
from fsdp2.core.device.buffers import empties_storages
from fsdp2.core.device.collectives import (
    Collectives,
    GroupCollectives,
    SoloCollectives,
)
from fsdp2.core.device.kernels import Kernels, kernels_for
from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.device.streams import Streams, make_streams
from fsdp2.core.errors import coded
from fsdp2.core.gather.smaller_group import SmallerGroup
from fsdp2.core.layout.mesh import MeshAxes, local_of, smaller_mesh
from fsdp2.core.modules.registrations import mark_managed
from fsdp2.core.modules.registry import Arguments, UnitRecord
from fsdp2.core.modules.walks import managed_modules
from fsdp2.core.params.aliases import REPLACED, aliases_in, refuse_gradients
from fsdp2.core.params.param import (
    GATHERED,
    OWNER,
    PlannedParam,
    ShardedParam,
    axes_in,
    is_extended,
)
from fsdp2.core.schedule.bound import Runtime
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import newly_observed, plan_checks
from fsdp2.core.schedule.unit import Unit, all_groups

_streams: dict[torch.device, Streams] = {}


def check_groups(
    name: str, plans: list[PlannedParam], options: GroupOptions, compare: bool = True
) -> None:
    """Raise where `make_groups` could not make them, or ranks would make others.

    Args:
        name: of the unit's modules.
        plans: the plans of their parameters.
        options: of the groups to be.
        compare: whether those are told who compare what ranks have.
    """
    _check_memory(plans)
    for check in plan_checks if compare else ():
        check(name, plans, options)


def connect_meshes(plans: list[PlannedParam], arguments: Arguments) -> None:
    """Create the process groups that groups of ``plans`` use: this fails if a peer is missing."""
    for plan in plans:
        if plan.cut.bands > 1:
            plan.axes.mesh_of(plan.cut)
    for axes in axes_in(plans):
        _smaller_group(axes, arguments.reshard_to)
        announce(axes.group, axes.device)
        announce(axes.replicas, axes.device)


def make_groups(
    name: str, plans: list[PlannedParam], options: GroupOptions, arguments: Arguments
) -> list[ParamGroup]:
    """A group for each mesh, in the order in which parameters name them."""
    groups = []
    for axes in axes_in(plans):
        smaller = _smaller_group(axes, arguments.reshard_to)
        streams = streams_for(axes.device)
        members = [plan for plan in plans if plan.axes is axes]
        params = [ShardedParam(plan) for plan in members]
        device, asynchronous = axes.device, streams.asynchronous
        collectives: Collectives = SoloCollectives()
        if axes.group is not None:
            collectives = GroupCollectives(axes.group, device, asynchronous)
        replicas = between = None
        if axes.replicas is not None and axes.levels:
            between = GroupCollectives(axes.replicas, device, asynchronous)
        elif axes.replicas is not None:
            replicas = GroupCollectives(axes.replicas, device, asynchronous)
        runtime = Runtime(
            collectives,
            streams,
            _kernels(axes.device, streams),
            axes.device,
            replicas,
            _effective_offload(arguments.offload, axes.device),
            between=between,
        )
        group = ParamGroup(name, params, runtime, options)
        group.is_whole = axes.whole
        mark_managed(params)
        for plan, managed in zip(members, params, strict=True):
            plan.param.__dict__[OWNER] = managed.attributes[OWNER] = name
            plan.param.__dict__[REPLACED] = weakref.ref(managed)
            managed.sharded.__dict__[OWNER] = name
            if plan.param.requires_grad:
                refuse_gradients(plan.param, name)
        group.set_smaller_group(smaller)
        groups.append(group)
    return groups


def _check_memory(plans: list[PlannedParam]) -> None:
    """Extended parameters are made by their own hooks, and freed by emptying their storages."""
    for plan in plans:
        if not empties_storages(plan.axes.device) and is_extended(local_of(plan.param)):
            raise coded(
                ValueError,
                "extended-not-emptied",
                f"parameter '{plan.name}' has all-gather hooks, but the memory of their results "
                f"cannot be freed on {plan.axes.device}, which cannot resize a storage to zero; "
                f"shard it as a plain tensor, or name it in ignored_params",
            )


def _effective_offload(
    offload: CPUOffloadPolicy | None, device: torch.device
) -> CPUOffloadPolicy | None:
    """``None`` where shards are in CPU memory anyway."""
    return None if device.type == "cpu" else offload


def _smaller_group(axes: MeshAxes, size: int | None) -> SmallerGroup | None:
    """``None`` where backward gathers from all ranks, or not at all."""
    if size is None or axes.whole or axes.size == size:
        return None
    mesh = smaller_mesh(axes.mesh, size)
    group, asynchronous = mesh.get_group("shard"), streams_for(axes.device).asynchronous
    return SmallerGroup(GroupCollectives(group, axes.device, asynchronous), mesh)


def choose_reshard(record: UnitRecord, value: bool | int) -> None:
    """Set the end of a unit's forward according to ``reshard_after_forward``.

    Args:
        record: the unit's.
        value: whether it frees the gathered parameters; or to how many ranks' shards it goes.
    """
    to = None if isinstance(value, bool) else value
    groups = record.unit.own_groups
    smaller = [_smaller_group(group.params[0].axes, to) for group in groups]
    record.unit.reshard_after_forward = bool(value)
    record.arguments = replace(record.arguments, reshard_to=to)
    for group, chosen in zip(groups, smaller, strict=True):
        group.set_smaller_group(chosen)
    if record.scheduler is not None:
        record.scheduler.connected = False


def process_group(group: ParamGroup) -> ProcessGroup | None:
    """The process group of the shard axis; ``None`` if nothing is sharded."""
    return group.collectives.group


def join_unit(groups: list[ParamGroup], unit: Unit, present: list[ParamGroup]) -> None:
    """Let groups join a unit, and reduce over the process groups that groups there reduce over.

    Args:
        groups: new ones.
        unit: theirs from now on.
        present: groups of the unit, then of units below.
    """
    for group in groups:
        group.set_options(unit.options_of(group))
        shared = process_group(group)
        alike = [other for other in present if process_group(other) is shared]
        if shared is None or not alike:
            continue
        first = alike[0]
        if first.reducers is not first.collectives:
            group.set_reducers(first.reducers)
    unit.groups += newly_observed(groups)


def follow_aliases(modules: tuple[nn.Module, ...]) -> None:
    """Let attributes of modules that refer to what parameters were before follow them from now on.

    Args:
        modules: the unit's; attributes of all modules below are looked at.
    """
    for alias, former in aliases_in(dict(managed_modules(modules, into_units=True))):
        replaced = former.__dict__.get(REPLACED)
        param = None if replaced is None or GATHERED in former.__dict__ else replaced()
        if param is not None:
            param.aliases.append(alias)
            alias[param.name] = param.sharded
            _rebind(param)


def _rebind(param: ShardedParam) -> None:
    """Let the group of a parameter notice at the next gather that it fills other places."""
    for group in all_groups():
        if param in group.params:
            group.rebind()


def move_buffers(modules: tuple[nn.Module, ...], device: torch.device) -> None:
    """Move the buffers of a unit's modules to the device that it computes on."""
    for owner, _ in managed_modules(modules):
        for buffer in owner._buffers.values():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                buffer.data = buffer.to(device)


def streams_for(device: torch.device) -> Streams:
    """The lanes of a device, the same for all roots."""
    if device == rehearsal.META and rehearsal.stage is not None:
        return rehearsal.stage.streams
    if device not in _streams:
        _streams[device] = make_streams(device)
    return _streams[device]


def _kernels(device: torch.device, streams: Streams) -> Kernels:
    if device == rehearsal.META and rehearsal.stage is not None:
        return rehearsal.stage.kernels
    return kernels_for(device, streams.asynchronous)
