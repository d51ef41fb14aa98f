"""What modules register after `fully_shard`, found at the next forward of the root.

    module.weight = …, module.adapter = …   ──> Registrations.count += 1
    root's forward begins: one comparison   ──> only where it changed: look at every parameter

A managed parameter's entries of modules are filled by its unit at every gather. Whatever a user put
there would be overwritten, a tie undone, and a new parameter trained by each rank for itself, all
in silence. `torch.func.functional_call` writes past the registration: a look at one entry finds
that.

What is put there while the unit is sharded, and is sharded alike, replaces the managed parameter:
so loaders that fill a model from the meta device do it. A parameter of the same model that is put
there is tied: `fsdp2.core.modules.ties` takes it up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Set
from typing import NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fsdp2.core.config import ShardingStateError
from fsdp2.core.params.aliases import REPLACED
from fsdp2.core.params.param import (
    GATHERED,
    OWNER,
    WHOLE,
    AttributeStore,
    ModuleEntry,
    ShardedParam,
)
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.states import GroupState

MANAGED = "_fsdp2_managed"
"""Attribute of a module: the names of its parameters that a unit manages."""


ASSIGNED = "_fsdp2_assigned"
"""Attribute of a module: the names under which sharded parameters were registered in it."""


class Registrations:
    """What modules of this process register: parameters and submodules, but for units' stores.

    Attributes:
        count: how many so far.
        leave_unmanaged: called with the name of a parameter that no unit manages, where that is
            not an error; ``None`` (default): it is one.
    """

    count = 0
    leave_unmanaged: Callable[[str], None] | None = None


@functools.cache
def watch_registrations() -> None:
    """Count from the first call on."""

    def count(module: nn.Module, name: str, registered: object) -> None:
        if registered is None or registered is not AttributeStore.storing:
            Registrations.count += 1
            if isinstance(registered, DTensor) or OWNER in getattr(registered, "__dict__", ()):
                module.__dict__.setdefault(ASSIGNED, set()).add(name)

    register_module_parameter_registration_hook(count)
    register_module_module_registration_hook(count)


def mark_managed(params: Iterable[ShardedParam]) -> None:
    """Note in the modules which of their parameters are managed."""
    for param in params:
        for module, name in param.entries:
            module.__dict__.setdefault(MANAGED, set()).add(name)


def is_managed(module: nn.Module, name: str) -> bool:
    """Whether a unit manages the parameter that ``module`` registers under ``name``."""
    return name in module.__dict__.get(MANAGED, ())


def follow_replaced(group: ParamGroup, known: set[int]) -> None:
    """Manage what was put in the entries of a group's parameters and is sharded like them.

    Args:
        group: the group.
        known: ids of all forms of managed parameters: those may be tied, but replace none. What is
            followed here is one from now on: a loader may put it into entries of several.
    """
    if group.state is not GroupState.SHARDED:
        return  # the entries are filled with what was gathered
    followed = False
    for param in group.params:
        if param.was_replaced(known):
            param.follow_registered()
            known.add(id(param.sharded))
            followed = True
    if followed:
        group.rebind()


def is_registered(group: ParamGroup) -> bool:
    """Whether the first entry of a group holds what the group has put there.

    One look stands for all entries: `torch.func.functional_call` fills every one that it is given a
    tensor for, and no registration tells of it.
    """
    param = group.params[0]
    expected = _expected(group, param)
    found = next(iter(param.entries), None)
    return expected is None or found is None or found[0]._parameters.get(found[1]) is expected


def put_back(group: ParamGroup) -> None:
    """Fill a group's entries by its state, where they hold another form of its parameters.

    `torch.func.functional_call` leaves what it found before the forward, which has gathered since.
    """
    for param in group.params:
        expected = _expected(group, param)
        if expected is None:
            continue
        if any(module._parameters.get(name) is not expected for module, name in param.entries):
            param.register(expected)


def _expected(group: ParamGroup, param: ShardedParam) -> nn.Parameter | None:
    """What a parameter's entries hold; ``None`` where that is not told by the state alone."""
    if group.state is GroupState.UNSHARDED:
        return param.unsharded
    shows_shards = group.state in (GroupState.SHARDED, GroupState.HIDDEN)
    return param.sharded if shows_shards else None


class Move(NamedTuple):
    """A managed parameter that was registered where it was not.

    Attributes:
        name: the name that it has there.
        module: the module there.
        key: its name in the module.
        param: the parameter.
        before: the managed parameter that was there.
    """

    name: str
    module: nn.Module
    key: str
    param: ShardedParam
    before: ShardedParam | None


def check_registered(
    root: nn.Module, managed: Mapping[ModuleEntry, ShardedParam], ignored: Set[ModuleEntry]
) -> list[Move]:
    """Raise, naming the parameter, if one was replaced or added after `fully_shard`.

    Args:
        root: the module whose forward begins.
        managed: the entries that units of its scheduler fill.
        ignored: the entries of ``ignored_params``.

    Returns:
        Where managed parameters were put since: those that were tied.
    """
    moves: list[Move] = []
    forms = {id(form): p for p in managed.values() for form in p.forms()}
    params = {id(p): p for p in managed.values()}
    meshes = {p.sharded.device_mesh for p in managed.values() if isinstance(p.sharded, DTensor)}
    for prefix, module in root.named_modules():
        for key, registered in module._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            param = managed.get((module, key))
            if param is not None and registered is not None and WHOLE in registered.__dict__:
                raise ShardingStateError(
                    f"a forward began inside gathered(), which has registered parameter '{name}' "
                    f"whole; leave the context first, as a forward gathers by itself"
                )
            other = forms.get(id(registered))
            if param is not None and other is param:
                continue
            if registered is not None and REPLACED in registered.__dict__:
                # What it was before it was sharded. Of this one, it would be out of date.
                former = params.get(id(registered.__dict__[REPLACED]()))
                other = other or (None if former is param else former)
            if other is not None:
                if key not in module.__dict__.get(ASSIGNED, ()):
                    raise ShardingStateError(
                        f"parameter '{name}' was replaced by parameter '{other.name}' without a "
                        f"registration, as torch.func.functional_call does; tie the two by an "
                        f"assignment, module_b.weight = module_a.weight"
                    )
                moves.append(Move(name, module, key, other, param))
                continue
            if param is not None:
                raise ShardingStateError(
                    f"parameter '{name}' was replaced by a {type(registered).__name__} after "
                    f"fully_shard; copy new values into the parameter under torch.no_grad(), or "
                    f"use load_state_dict(assign=True)"
                )
            if registered is not None and (module, key) not in ignored:
                _refuse_unmanaged(name, registered, meshes)
    return moves


def _refuse_unmanaged(name: str, param: nn.Parameter, meshes: Set[DeviceMesh]) -> None:
    if OWNER in param.__dict__ or GATHERED in param.__dict__:
        raise ShardingStateError(
            f"parameter '{name}' is tied to a parameter of another fully_shard model; call "
            f"fully_shard on the model that holds both, and run that, or tie them before either "
            f"is sharded"
        )
    if Registrations.leave_unmanaged is not None:
        Registrations.leave_unmanaged(name)
        return
    if isinstance(param, DTensor) and param.device_mesh in meshes:
        raise ShardingStateError(
            f"parameter '{name}' was made from sharded parameters after fully_shard, as a "
            f"parametrization does, so that no unit gathers it; make it before fully_shard"
        )
    raise ShardingStateError(
        f"parameter '{name}' was added after fully_shard, so that no unit shards it or reduces "
        f"its gradients; call shard_new_parameters() on the sharded module around it, or "
        f"fully_shard on the new module"
    )
