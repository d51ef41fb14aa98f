"""From plans to parameter groups: what `fully_shard` makes of a unit's parameters.

plans ── make_groups ──> a ParamGroup for each mesh, laid out, its parameters DTensors
groups ── watch_state_dicts ──> hooks: a state dict that is taken has the shards
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions
from fsdp2.core.device import rehearsal
from fsdp2.core.device.buffers import empties_storages
from fsdp2.core.device.collectives import (
    Collectives,
    GroupCollectives,
    ReplicaCollectives,
    SoloCollectives,
)
from fsdp2.core.device.kernels import Kernels, kernels_for
from fsdp2.core.device.presence import announce
from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.device.streams import Streams, make_streams
from fsdp2.core.gather.smaller_group import SmallerGroup
from fsdp2.core.layout.mesh import MeshAxes, local_of, smaller_mesh
from fsdp2.core.modules.explain import explain_loading
from fsdp2.core.modules.registrations import mark_managed
from fsdp2.core.modules.registry import Arguments, UnitRecord, scheduler_of
from fsdp2.core.modules.selection import managed_modules
from fsdp2.core.params.aliases import REPLACED, aliases_in, refuse_gradients
from fsdp2.core.params.param import (
    GATHERED,
    OWNER,
    ModuleEntries,
    PlannedParam,
    ShardedParam,
    axes_in,
    is_extended,
)
from fsdp2.core.schedule.group import ParamGroup, Runtime
from fsdp2.core.schedule.layers import Watchers
from fsdp2.core.schedule.states import SHARDED
from fsdp2.core.schedule.ties import GroupAlias
from fsdp2.core.schedule.unit import Unit, all_groups, all_units

_streams: dict[torch.device, Streams] = {}


def check_groups(name: str, plans: list[PlannedParam], options: GroupOptions) -> None:
    """Raise where `make_groups` could not make them, or ranks would make others.

    Args:
        name: of the unit's modules.
        plans: what is to become of their parameters.
        options: of the groups to be.
    """
    _check_memory(plans)
    for check in Watchers.plans:
        check(name, plans, options)


def connect_meshes(plans: list[PlannedParam], arguments: Arguments) -> None:
    """Make the process groups that groups of ``plans`` use: what may fail, for want of a peer."""
    for plan in plans:
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
        runtime = Runtime(
            _collectives(axes, streams),
            streams,
            _kernels(axes.device, streams),
            axes.device,
            None if axes.replicas is None else _replicas(axes, streams),
            _effective_offload(arguments.offload, axes.device),
        )
        group = ParamGroup(name, params, runtime, options)
        group.adopt()
        mark_managed(params)
        for plan, managed in zip(members, params, strict=True):
            plan.param.__dict__[OWNER] = managed.attributes[OWNER] = name
            plan.param.__dict__[REPLACED] = weakref.ref(managed)
            managed.sharded.__dict__[OWNER] = name
            if plan.param.requires_grad:
                refuse_gradients(plan.param, name)
        group.set_smaller_group(smaller)
        for watch in Watchers.groups:
            watch(group)
        groups.append(group)
    return groups


def _check_memory(plans: list[PlannedParam]) -> None:
    """Extended parameters are made by their own hooks, and freed by emptying their storages."""
    for plan in plans:
        if not empties_storages(plan.axes.device) and is_extended(local_of(plan.param)):
            raise ValueError(
                f"parameter '{plan.name}' has all-gather hooks, and the memory of what they make "
                f"cannot be freed on {plan.axes.device}, where storages cannot be emptied; shard "
                f"it as a plain tensor, or name it in ignored_params"
            )


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


def choose_reshard(record: UnitRecord, value: bool | int) -> None:
    """Choose what a unit's forward does at its end, as ``reshard_after_forward`` says it.

    Args:
        record: the unit's.
        value: whether it frees the gathered parameters; or to how many ranks' shards it goes.
    """
    to = None if isinstance(value, bool) else value
    smaller = [_smaller_group(group.params[0].axes, to) for group in record.unit.groups]
    record.unit.reshard_after_forward = bool(value)
    record.arguments = replace(record.arguments, reshard_to=to)
    for group, chosen in zip(record.unit.groups, smaller, strict=True):
        group.set_smaller_group(chosen)
    if record.scheduler is not None:
        record.scheduler.connected = False


def process_group(group: ParamGroup) -> ProcessGroup | None:
    """The process group of the shard axis; ``None`` where nothing is sharded."""
    shared = group.collectives
    return shared.group if isinstance(shared, GroupCollectives) else None


def join_unit(groups: list[ParamGroup], unit: Unit, present: list[ParamGroup]) -> None:
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


def follow_aliases(modules: tuple[nn.Module, ...]) -> None:
    """Let attributes of modules that refer to what parameters were before follow them from now on.

    Args:
        modules: the unit's; attributes of all modules below are looked at.
    """
    for module, _ in managed_modules(modules, into_units=True):
        for alias, former in aliases_in(module):
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


def watch_state_dicts(groups: list[ParamGroup]) -> None:
    """State dicts hold the sharded parameters, without communication.

    Between steps those are registered first. During a forward or a backward nothing is: it goes on
    to use what is gathered, and what the state dict has taken of that is exchanged for the shards.
    """
    for group in groups:
        watch_state_dicts_of(owners_of(group), group)


def owners_of(group: ParamGroup) -> set[nn.Module]:
    """The modules that register a parameter of a group."""
    return {module for param in group.params for module, _ in param.entries}


def watch_state_dicts_of(owners: set[nn.Module], group: ParamGroup) -> None:
    """As `watch_state_dicts`, for state dicts of some modules."""
    collected: list[list[str]] = []  # where the load under way collects its errors
    shown = _Shown(group)
    outside = _OutsideInference()

    def before() -> None:
        group.reshard()
        group.settle()

    def before_save(*_: object) -> None:
        outside.enter()
        if not _is_in_use(group):
            before()

    def after_save(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        shown.put_into(state, module, prefix)
        outside.leave()

    def before_load(*given: Any) -> None:
        before()
        collected[:] = given[-1:]

    def after_load(*_: object) -> None:
        group.reregister()
        explain_loading(collected.pop() if collected else [])

    for owner in owners:
        owner.register_state_dict_pre_hook(before_save)
        handle = owner.register_state_dict_post_hook(after_save)
        hooks = cast("OrderedDict[int, object]", owner._state_dict_hooks)
        hooks.move_to_end(handle.id, last=False)  # others may rename the keys
        owner.register_load_state_dict_pre_hook(before_load)
        owner.register_load_state_dict_post_hook(after_load)


class _OutsideInference(threading.local):
    """State dicts are taken outside of ``torch.inference_mode()``, which makes no DTensors' views.

    Of each thread: several may take one at once.
    """

    def __init__(self) -> None:
        self._left: list[torch.inference_mode] = []

    def enter(self) -> None:
        mode = torch.inference_mode(False)
        mode.__enter__()
        self._left.append(mode)

    def leave(self) -> None:
        self._left.pop().__exit__(None, None, None)


def _is_in_use(group: ParamGroup) -> bool:
    """Whether a forward or a backward is under way that may read what is gathered of a group."""
    if group.state is SHARDED and group.offload is None:
        return False
    for unit in all_units():
        groups = [own.tied if isinstance(own, GroupAlias) else own for own in unit.groups]
        if group in groups:
            scheduler = scheduler_of(unit)
            if scheduler is None or scheduler.iteration.failed:
                continue
            if scheduler.is_running:
                return True
    return False


class _Shown:
    """What state dicts show of a group's parameters: shards, whatever modules register.

    Args:
        group: the group.
    """

    def __init__(self, group: ParamGroup) -> None:
        self._group = group
        self._known: list[ModuleEntries] = []
        self._places: dict[int, list[tuple[str, ShardedParam]]] = {}  # by id of the module

    def put_into(self, state: dict[str, Any], module: nn.Module, prefix: str) -> None:
        """Exchange what was taken of the gathered parameters that ``module`` registers.

        Another thread may take it while units are gathered and freed: not the group's state counts,
        but what each value is.
        """
        for name, param in self._places_of(module):
            value = state.get(prefix + name)
            if any(value is form for form in param.forms()):  # with keep_vars=True
                state[prefix + name] = param.sharded
            elif isinstance(value, torch.Tensor) and self._is_gathered(value, param, module, name):
                state[prefix + name] = param.sharded.detach()

    def _places_of(self, module: nn.Module) -> list[tuple[str, ShardedParam]]:
        entries = [param.entries for param in self._group.params]
        if entries != self._known:  # some were tied, or dropped
            places: dict[int, list[tuple[str, ShardedParam]]] = {}
            for param in self._group.params:
                for owner, name in param.entries:
                    places.setdefault(id(owner), []).append((name, param))
            self._places, self._known = places, entries
        return self._places.get(id(module), [])

    @staticmethod
    def _is_gathered(
        value: torch.Tensor, param: ShardedParam, module: nn.Module, name: str
    ) -> bool:
        """Whether it is of another form of a parameter than the sharded one, and not the user's."""
        if isinstance(value, DTensor) and _is_placed_alike(
            value._spec, cast(DTensor, param.sharded)._spec
        ):
            return False
        if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
            registered = module._parameters.get(name)
            return any(registered is form for form in param.forms())
        others = [form for form in param.forms() if form is not param.sharded]
        return any(_shares_memory(local_of(value), local_of(form)) for form in others)


def _is_placed_alike(spec: DTensorSpec, other: DTensorSpec) -> bool:
    return spec.mesh == other.mesh and spec.placements == other.placements


def _shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if is_traceable_wrapper_subclass(tensor) or is_traceable_wrapper_subclass(other):
        return type(tensor) is type(other)
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)
