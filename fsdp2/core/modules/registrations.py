"""Parameters that modules register after `fully_shard`, found at the next forward of the root.

    module.weight = …, module.bias = None, module.adapter = …   ──> Registrations.count += 1
    root's forward begins: one comparison   ──> only if it changed: look at every parameter

A unit fills its modules' entries of managed parameters at every gather. Without this check, it
would overwrite a parameter that a user assigned, undo a tie, and let each rank train a new
parameter separately, all without an error. `torch.func.functional_call` writes without a
registration: a look at one entry finds that.

A parameter that is assigned while the unit is sharded, and is sharded in the same way, replaces the
managed parameter; loaders that fill a model from the meta device do this. A parameter of the same
model that is assigned there is tied, and one that is registered elsewhere moves:
`fsdp2.core.modules.ties` handles both.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Set
from typing import NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fsdp2.core.notices import Notice
from fsdp2.core.params.param import (
    OWNER,
    REPLACED,
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
    """Counts registrations of parameters and submodules in this process, except by units.

    Attributes:
        count: how many so far.
    """

    count = 0


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
    _watch_removals()


def _watch_removals() -> None:
    """Count removals of managed parameters: torch calls no hook, and a gather would undo them."""
    register, delete = nn.Module.register_parameter, nn.Module.__delattr__

    @functools.wraps(register)
    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None and is_managed(self, name):
            Registrations.count += 1

    @functools.wraps(delete)
    def delattr_(self: nn.Module, name: str) -> None:
        delete(self, name)
        if is_managed(self, name):
            Registrations.count += 1

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]  # see above
    nn.Module.__delattr__ = delattr_  # type: ignore[method-assign]  # see above


def mark_managed(entries: Iterable[ModuleEntry]) -> None:
    """Note in modules which of their parameters are managed."""
    for module, name in entries:
        module.__dict__.setdefault(MANAGED, set()).add(name)


def is_managed(module: nn.Module, name: str) -> bool:
    """Whether a unit manages the parameter that ``module`` registers under ``name``."""
    return name in module.__dict__.get(MANAGED, ())


def follow_replaced(group: ParamGroup, known: set[int]) -> None:
    """Manage tensors in the entries of a group's parameters that are sharded like them.

    Args:
        group: the group.
        known: ids of all forms of managed parameters: those may be tied, but do not replace any. A
            tensor that is accepted here is one from now on, because a loader may put it into
            several entries.
    """
    if not group.state.is_sharded:
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
    """Whether the first entry of a group holds the parameter that the group registered.

    One check covers all entries: `torch.func.functional_call` fills every one that it is given a
    tensor for, without a registration.
    """
    param = group.params[0]
    expected = _expected(group, param)
    found = next(iter(param.entries), None)
    return expected is None or found is None or found[0]._parameters.get(found[1]) is expected


def put_back(group: ParamGroup) -> None:
    """Fill a group's entries by its state, if they hold another form of its parameters.

    `torch.func.functional_call` restores entries from before the forward, which has gathered since.
    """
    for param in group.params:
        expected = _expected(group, param)
        if expected is None:
            continue
        if any(module._parameters.get(name) is not expected for module, name in param.entries):
            param.register(expected)


def _expected(group: ParamGroup, param: ShardedParam) -> nn.Parameter | None:
    """The expected contents of a parameter's entries; ``None`` if the state does not determine
    them.
    """
    if group.state is GroupState.UNSHARDED:
        return param.unsharded
    shows_shards = group.state.is_sharded or group.state is GroupState.HIDDEN
    return param.sharded if shows_shards else None


class Move(NamedTuple):
    """An entry that holds another managed parameter than before.

    Attributes:
        name: the name that the parameter has there.
        module: the module there.
        key: its name in the module.
        param: the parameter; ``None``: the entry was deleted, or set to ``None``.
        before: the managed parameter that was there.
    """

    name: str
    module: nn.Module
    key: str
    param: ShardedParam | None
    before: ShardedParam | None


class Unexpected(NamedTuple):
    """A registration that belongs to no unit.

    Attributes:
        name: its name.
        registered: the registered object.
        param: the managed parameter whose entry it is in.
        other: the managed parameter of which it is a form.
        meshes: those of all managed parameters.
    """

    name: str
    registered: nn.Parameter
    param: ShardedParam | None
    other: ShardedParam | None
    meshes: Set[DeviceMesh]


unexpected: Notice[[Unexpected]] = Notice()
"""Called with a parameter that was registered in another way than by a tying assignment."""


def find_emptied(managed: Mapping[ModuleEntry, ShardedParam]) -> list[Move]:
    """Find entries without a parameter: deleted, or set to ``None``."""
    return [
        Move(param.name, module, key, None, param)
        for (module, key), param in managed.items()
        if module._parameters.get(key) is None
    ]


def find_moves(
    root: nn.Module,
    params: Collection[ShardedParam],
    managed: Mapping[ModuleEntry, ShardedParam],
    ignored: Set[ModuleEntry],
) -> list[Move]:
    """Find new entries of managed parameters, which are ties; report all other registrations.

    Args:
        root: the module whose forward begins.
        params: the parameters of its scheduler's units. One may have no entry: its module is gone,
            and another one registers it now.
        managed: the entries that units of its scheduler fill.
        ignored: the entries of ``ignored_params``.
    """
    moves: list[Move] = []
    # A loader may have put one tensor in the place of two parameters.
    are_distinct = len({id(param.sharded) for param in params}) == len(params)
    forms: dict[int, ShardedParam] = {}
    known = {id(param): param for param in params}
    meshes = {p.sharded.device_mesh for p in params if isinstance(p.sharded, DTensor)}
    for prefix, module in root.named_modules():
        for key, registered in module._parameters.items():
            if registered is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            marks = registered.__dict__
            param = managed.get((module, key))
            is_shard = param is not None and registered is param.sharded
            if is_shard and are_distinct and WHOLE not in marks:
                continue
            forms = forms or {id(form): each for each in params for form in each.forms()}
            other = forms.get(id(registered))
            is_whole = param is not None and WHOLE in marks
            if param is not None and other is param and not is_whole:
                continue
            if REPLACED in marks:
                # What it was before it was sharded. Of this one, it would be out of date.
                former = known.get(id(marks[REPLACED]()))
                other = other or (None if former is param else former)
            if other is not None and key in module.__dict__.get(ASSIGNED, ()) and not is_whole:
                moves.append(Move(name, module, key, other, param))
            elif param is not None or other is not None or (module, key) not in ignored:
                unexpected(Unexpected(name, registered, param, other, meshes))
    return moves
