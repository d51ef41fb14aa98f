"""From plans to parameter groups: what `fully_shard` makes of a unit's parameters.

plans ── make_groups ──> a ParamGroup for each mesh, laid out, its parameters DTensors
groups ── watch_state_dicts ──> hooks that register the shards before a state dict is taken
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from fsdp2.core.checks import check_plans, follow
from fsdp2.core.collectives import (
    Collectives,
    GroupCollectives,
    ReplicaCollectives,
    SoloCollectives,
)
from fsdp2.core.config import CPUOffloadPolicy, GroupOptions
from fsdp2.core.group import ParamGroup
from fsdp2.core.kernels import TorchKernels
from fsdp2.core.misuse import explain_loading
from fsdp2.core.param import OWNER, REPLACED, ShardedParam
from fsdp2.core.post_forward import SmallerGroup
from fsdp2.core.registrations import mark_managed
from fsdp2.core.selection import Arguments, Plan, axes_in, managed_modules
from fsdp2.core.sharding import MeshAxes, smaller_mesh
from fsdp2.core.streams import DeviceStreams, InlineStreams, Streams
from fsdp2.core.unit import Unit

_streams: dict[torch.device, Streams] = {}


def make_groups(
    name: str, plans: list[Plan], options: GroupOptions, arguments: Arguments
) -> list[ParamGroup]:
    """A group for each mesh, in the order in which parameters name them."""
    check_plans(name, plans, options)
    meshes = axes_in(plans)
    # What makes process groups, and may raise: before anything changes.
    for plan in plans:
        plan.axes.mesh_of(plan.cut)
    smaller_groups = [_smaller_group(axes, arguments.smaller) for axes in meshes]
    groups = []
    for axes, smaller in zip(meshes, smaller_groups, strict=True):
        streams = streams_for(axes.device)
        members = [plan for plan in plans if plan.axes is axes]
        params = [
            ShardedParam(plan.name, plan.param, plan.slots, plan.cut, axes, plan.compute_dtype)
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
            _effective_offload(arguments.offload, axes.device),
        )
        group.adopt()
        mark_managed(params)
        for plan, managed in zip(members, params, strict=True):
            plan.param.__dict__[OWNER] = managed.attributes[OWNER] = name
            plan.param.__dict__[REPLACED] = weakref.ref(managed)
            managed.sharded.__dict__[OWNER] = name
        group.set_smaller_group(smaller)
        follow(group)
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


def _smaller_group(axes: MeshAxes, size: int | None) -> SmallerGroup | None:
    """``None`` where backward gathers from all ranks, or not at all."""
    if size is None or axes.size == size:
        return None
    mesh = smaller_mesh(axes.mesh, size)
    group, asynchronous = mesh.get_group("shard"), streams_for(axes.device).asynchronous
    return SmallerGroup(GroupCollectives(group, axes.device, asynchronous), mesh)


def process_group(group: ParamGroup) -> Any:
    """The process group of the shard axis; ``None`` where nothing is sharded."""
    shared = group.collectives
    return shared.group if isinstance(shared, GroupCollectives) else None


def settle_in(groups: list[ParamGroup], unit: Unit, present: list[ParamGroup]) -> None:
    """Let groups join a unit, with what others have that belongs to a process group.

    Collectives' memory from the unit's groups, the reductions' process group from those below too.

    Args:
        groups: new ones.
        unit: theirs from now on.
        present: groups of the unit, then of units below.
    """
    for group in groups:
        shared = process_group(group)
        alike = [other for other in present if process_group(other) is shared]
        if shared is None or not alike:
            continue
        first = alike[0]
        if first in unit.groups:
            group.set_options(first.options)
        if first.reducers is not first.collectives:
            group.set_reducers(first.reducers)
    unit.groups += groups


def move_buffers(modules: tuple[nn.Module, ...], device: torch.device) -> None:
    """Move the buffers of a unit's modules to the device that it computes on."""
    for owner, _ in managed_modules(modules):
        for buffer in owner._buffers.values():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                buffer.data = buffer.to(device)


def streams_for(device: torch.device) -> Streams:
    """The lanes of a device, the same for all roots."""
    if device not in _streams:
        _streams[device] = InlineStreams() if device.type == "cpu" else DeviceStreams(device)
    return _streams[device]


def watch_state_dicts(groups: list[ParamGroup]) -> None:
    """State dicts hold the sharded parameters: register those first, without communication."""
    for group in groups:
        _watch_state_dicts(group)


def _watch_state_dicts(group: ParamGroup) -> None:
    collected: list[list[str]] = []  # where the load under way collects its errors

    def before(*_: Any) -> None:
        group.reshard()
        group.settle()

    def before_load(*given: Any) -> None:
        before()
        collected[:] = given[-1:]

    def after_load(*_: Any) -> None:
        group.reregister()
        explain_loading(collected.pop() if collected else [])

    for owner in {module for param in group.params for module, _ in param.slots}:
        owner.register_state_dict_pre_hook(before)
        owner.register_load_state_dict_pre_hook(before_load)
        owner.register_load_state_dict_post_hook(after_load)
