"""From plans to parameter groups: what `fully_shard` makes of a unit's parameters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from fsdp2.checks.presence import announce
from fsdp2.core.config import CPUOffloadPolicy
from fsdp2.core.device.collectives import Collectives, GroupCollectives, SoloCollectives
from fsdp2.core.device.kernels import stage_of
from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.gather.keeping import SmallerGroup
from fsdp2.core.layout.mesh import MeshAxes, smaller_mesh
from fsdp2.core.modules.optimizers import watch_optimizers
from fsdp2.core.modules.registrations import (
    Move,
    Owners,
    fill,
    link,
    mark_managed,
    owners_of,
    take_up,
)
from fsdp2.core.modules.registry import UnitRecord, managed_modules
from fsdp2.core.params.param import (
    FORM,
    OWNER,
    Form,
    ModuleEntry,
    ShardedParam,
    aliases_in,
    form_of,
    refuse_gradients,
)
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import newly_observed
from fsdp2.core.schedule.unit import Unit, all_groups, all_units, operations_of
from fsdp2.sharding.plan import PlannedCall, Stray, strays
from fsdp2.sharding.state_dicts import watch_state_dicts


def connect_meshes(planned: PlannedCall) -> None:
    """Create the process groups that its groups use: this fails if a peer is missing."""
    for plan in planned.plans:
        if plan.cut.bands > 1:
            plan.axes.mesh_of(plan.cut)
    for axes in planned.axes:
        _smaller_group(axes, planned.arguments.reshard_to)
        announce(axes.group, axes.device)
        announce(axes.replicas, axes.device)


def make_groups(planned: PlannedCall) -> list[ParamGroup]:
    """A group for each mesh, in the order in which parameters name them."""
    groups, name = [], planned.name
    for axes in planned.axes:
        members = [plan for plan in planned.plans if plan.axes is axes]
        params = [ShardedParam(plan) for plan in members]
        device, stage = axes.device, stage_of(axes.device)
        asynchronous = stage.streams.asynchronous
        collectives: Collectives = SoloCollectives()
        if axes.group is not None:
            collectives = GroupCollectives(axes.group, device, asynchronous)
        replicas = between = None
        if axes.replicas is not None and axes.levels:
            between = GroupCollectives(axes.replicas, device, asynchronous)
        elif axes.replicas is not None:
            replicas = GroupCollectives(axes.replicas, device, asynchronous)
        offload = _effective_offload(planned.arguments.offload, device)
        on = collectives, stage.streams, stage.kernels, device
        group = ParamGroup(
            name, params, planned.options, *on, replicas=replicas, between=between, offload=offload
        )
        group.is_whole = axes.whole
        for plan, managed in zip(members, params, strict=True):
            mark_managed(plan.entries)
            plan.param.__dict__[OWNER] = managed.attributes[OWNER] = name
            plan.param.__dict__[FORM] = Form(weakref.ref(managed))
            managed.sharded.__dict__[OWNER] = name
            if plan.param.requires_grad:
                refuse_gradients(plan.param, name)
        group.set_smaller_group(_smaller_group(axes, planned.arguments.reshard_to))
        groups.append(group)
    device = planned.arguments.axes.device
    for owner, _ in planned.members:  # which compute there
        for buffer in owner._buffers.values():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                buffer.data = buffer.to(device)
    return groups


def finish(planned: PlannedCall, record: UnitRecord, groups: list[ParamGroup]) -> None:
    """Let state dicts, attributes, other units and optimizers follow a unit's parameters."""
    for group in groups:
        watch_state_dicts(owners_of(group), group)
    _follow_aliases(planned.modules)
    if planned.tied:
        owners = Owners(all_units())
        for param in planned.tied:
            owned = owners.of(param)
            assert owned is not None
            operations_of(owned.group).reshard()
            present = list(owned.param.entries)
            found: list[ModuleEntry] = [(entry.module, entry.key) for entry in planned.found[param]]
            fill(owned, [*present, *(entry for entry in found if entry not in present)])
        link([record])
    if planned.has_strays:
        _take_strays(strays(planned.found, planned.modules))
    watch_optimizers()


def _take_strays(places: Sequence[Stray]) -> None:
    """Manage what `strays` has found; the parameters are sharded now."""
    owners = Owners(all_units())
    moves = []
    for entry, registered, before in places:
        owned = owners.of(registered)
        if owned is not None:
            moves.append(Move(entry.name, entry.module, entry.key, owned.param, before))
    take_up(moves, all_units())


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
    group, asynchronous = mesh.get_group("shard"), stage_of(axes.device).streams.asynchronous
    return SmallerGroup(GroupCollectives(group, axes.device, asynchronous), mesh)


def choose_reshard(record: UnitRecord, value: bool | int) -> None:
    """Set the end of a unit's forward according to ``reshard_after_forward``."""
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
    """Let new groups join a unit, and reduce over the same process groups as ``present`` ones."""
    for group in groups:
        group.owner = weakref.ref(unit)
        group.set_options(unit.options_of(group))
        shared = process_group(group)
        alike = [other for other in present if process_group(other) is shared]
        if shared is None or not alike:
            continue
        first = alike[0]
        if first.reducers is not first.collectives:
            group.set_reducers(first.reducers)
    unit.groups += newly_observed(groups)


def _follow_aliases(modules: tuple[nn.Module, ...]) -> None:
    """Let attributes of modules at and below ``modules`` follow the parameters they refer to."""
    for alias, former in aliases_in(dict(managed_modules(modules, into_units=True))):
        form = form_of(former)
        param = None if form is None or form.gathered is not None else form.param()
        if param is not None:
            param.aliases.append(alias)
            alias[param.name] = param.sharded
            for group in all_groups():  # the next gather fills other places
                if param in group.params:
                    group.rebind()
