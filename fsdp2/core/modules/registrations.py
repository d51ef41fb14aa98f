"""Parameters that modules register after `fully_shard`, or that units share.

    module.weight = …, module.bias = None, module.adapter = …   ──> Counts.registrations += 1
    root's forward begins: one comparison   ──> only if it changed: look at every parameter

A unit fills its modules' entries of managed parameters at every gather. Without this check, it
would overwrite a parameter that a user assigned, undo a tie, and let each rank train a new
parameter separately, all without an error. `torch.func.functional_call` writes without a
registration: a look at one entry finds that.

A parameter that is assigned while the unit is sharded, and is sharded in the same way, replaces the
managed one; loaders that fill a model from the meta device do this. A parameter of the same model
that is assigned there is tied, and one that is registered elsewhere moves.

    fully_shard finds one of another unit  ──> Owners, fill: one more entry of it
    a root's forward finds one moved       ──> take_up: entries as they are registered now
    either way                             ──> link: a unit that has one of another uses its group
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fsdp2.core.config import MixedPrecisionPolicy
from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.modules.registry import UnitRecord, managed_modules, record_of_unit
from fsdp2.core.notices import Notice
from fsdp2.core.params.param import (
    FORM,
    NAMES,
    OWNER,
    AttributeStore,
    ModuleEntries,
    ModuleEntry,
    ShardedParam,
    compute_dtype,
    form_of,
)
from fsdp2.core.progress import Counts
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.states import GroupState
from fsdp2.core.schedule.unit import Unit, all_units, give_back, lend, operations_of

MANAGED, ASSIGNED = 1, 2
"""Notes of a name in a module (`NAMES`): a unit manages the parameter; a sharded one was registered
under it."""


@functools.cache
def watch_registrations() -> None:
    """Count from the first call on."""

    def count(module: nn.Module, name: str, registered: object) -> None:
        if registered is None or registered is not AttributeStore.storing:
            Counts.registrations += 1
            if isinstance(registered, DTensor) or OWNER in getattr(registered, "__dict__", ()):
                names: dict[str, int] = module.__dict__.setdefault(NAMES, {})
                names[name] = names.get(name, 0) | ASSIGNED

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
            Counts.registrations += 1

    @functools.wraps(delete)
    def delattr_(self: nn.Module, name: str) -> None:
        delete(self, name)
        if is_managed(self, name):
            Counts.registrations += 1

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]  # see above
    nn.Module.__delattr__ = delattr_  # type: ignore[method-assign]  # see above


def _noted(module: nn.Module, name: str) -> int:
    noted: int = module.__dict__.get(NAMES, {}).get(name, 0)
    return noted


def mark_managed(entries: Iterable[ModuleEntry]) -> None:
    """Note in modules which of their parameters are managed."""
    for module, name in entries:
        names: dict[str, int] = module.__dict__.setdefault(NAMES, {})
        names[name] = names.get(name, 0) | MANAGED


def is_managed(module: nn.Module, name: str) -> bool:
    """Whether a unit manages the parameter that ``module`` registers under ``name``."""
    return bool(_noted(module, name) & MANAGED)


def follow_replaced(group: ParamGroup, known: set[int]) -> None:
    """Manage tensors in the entries of a group's parameters that are sharded like them.

    ``known`` are ids of all forms of managed parameters: those may be tied, but do not replace any.
    A tensor that is accepted here is one from now on: a loader may put it into several entries.
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
    """Whether a group's first entry, and so each, holds the parameter that it registered."""
    # `torch.func.functional_call` fills all entries that it has tensors for, unregistered.
    param = group.params[0]
    expected = _expected(group, param)
    found = next(iter(param.entries), None)
    return expected is None or found is None or found[0]._parameters.get(found[1]) is expected


def put_back(group: ParamGroup) -> None:
    """Fill a group's entries by its state, if they hold another form of its parameters, as after
    `torch.func.functional_call`, which restores entries from before the forward's gather.
    """
    for param in group.params:
        expected = _expected(group, param)
        if expected is None:
            continue
        if any(module._parameters.get(name) is not expected for module, name in param.entries):
            param.register(expected)


def _expected(group: ParamGroup, param: ShardedParam) -> nn.Parameter | None:
    """The expected contents of a parameter's entries; ``None`` if the state does not tell."""
    if group.state is GroupState.UNSHARDED:
        return param.unsharded
    shows_shards = group.state.is_sharded or group.state is GroupState.HIDDEN
    return param.sharded if shows_shards else None


class Move(NamedTuple):
    """An entry of ``module`` that held ``before``, and now another managed parameter, or none."""

    name: str
    module: nn.Module
    key: str
    param: ShardedParam | None
    before: ShardedParam | None


unexpected: Notice[
    [str, nn.Parameter, ShardedParam | None, ShardedParam | None, Set[DeviceMesh]]
] = Notice()
"""Called where a parameter was registered in another way than by a tying assignment: with its name,
itself, the parameter in whose entry it is, that of which it is a form, and the meshes of all."""


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

    One of ``params``, of the scheduler's units, may have no entry: its module is gone, and another
    one registers it now. ``managed`` are the entries that these units fill.
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
            param = managed.get((module, key))
            is_shard = param is not None and registered is param.sharded
            if is_shard and are_distinct and FORM not in registered.__dict__:
                continue
            form = form_of(registered)
            is_whole = param is not None and form is not None and form.is_whole
            forms = forms or {id(form): each for each in params for form in each.forms()}
            other = forms.get(id(registered))
            if param is not None and other is param and not is_whole:
                continue
            if form is not None:
                # What it was before it was sharded. Of this one, it would be out of date.
                former = known.get(id(form.param()))
                other = other or (None if former is param else former)
            if other is not None and _noted(module, key) & ASSIGNED and not is_whole:
                moves.append(Move(name, module, key, other, param))
            elif param is not None or other is not None or (module, key) not in ignored:
                unexpected(name, registered, param, other, meshes)
    return moves


# ---- parameters that modules of several units register: tied weights, modules with two parents

# The parameter stays the object that it is, in the group that it is in. One that another has
# replaced everywhere leaves its group. One that was deleted stays, because it may be registered
# again.

gained: Notice[[set[nn.Module], ParamGroup]] = Notice()
"""Called with modules that register parameters of a group, and registered none of it before."""


class Owned(NamedTuple):
    """A parameter, and its group and unit."""

    param: ShardedParam
    group: ParamGroup
    unit: Unit


class Owners:
    """The owners of parameters, among units."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = list(units)  # they keep alive what has these ids
        self._owned: dict[int, Owned] = {}
        for unit in self._units:
            for group in unit.own_groups:
                for param in group.params:
                    for known in (param, *param.forms()):
                        self._owned[id(known)] = Owned(param, group, unit)

    def __getitem__(self, param: ShardedParam) -> Owned:
        return self._owned[id(param)]

    def of(self, registered: nn.Parameter) -> Owned | None:
        """The owner of a form of a parameter, or of its object from before sharding, if any."""
        form = form_of(registered)
        return self._owned.get(id(registered if form is None else form.param()))


class Computed(NamedTuple):
    """How a unit computes with a parameter: in ``chosen``, if any, maybe as an exception."""

    name: str
    dtype: torch.dtype
    chosen: torch.dtype | None
    is_exception: bool


def computed(owned: Owned) -> Computed:
    param = owned.param
    chosen = compute_dtype(owned.group.options, param)
    return Computed(param.name, param.dtype, chosen, param.dtype_override is not None)


def check_same_dtype(name: str, other: Computed, policy: MixedPrecisionPolicy) -> None:
    """Raise if a unit would compute with another unit's parameter in another dtype than that."""
    if not other.dtype.is_floating_point or other.is_exception:
        return
    computes, wanted = other.chosen or other.dtype, policy.param_dtype or other.dtype
    if computes != wanted:
        raise coded(
            ValueError,
            "tied-dtypes",
            f"parameter '{name}' is tied to parameter '{other.name}', whose unit computes in "
            f"{computes}, not in {wanted}; give both units the same param_dtype",
        )


def owners_of(group: ParamGroup) -> set[nn.Module]:
    """The modules that register a parameter of a group."""
    return {module for param in group.params for module, _ in param.entries}


def fill(owned: Owned, entries: list[ModuleEntry]) -> None:
    """Let these be a parameter's entries."""
    param, group, _ = owned
    watched = owners_of(group)
    param.entries = ModuleEntries(entries)
    param.register(param.sharded)
    group.rebind()
    mark_managed(entries)
    gained(owners_of(group) - watched, group)


def take_up(moves: Sequence[Move], units: Iterable[Unit]) -> None:
    """Manage parameters where modules register them now; raise if compute dtypes differ."""
    units = list(units)
    owners = Owners(units)
    for move in moves:
        if move.param is None:
            continue
        for record in around(move.module, units):
            policy = record.unit.options.precision
            check_same_dtype(move.name, computed(owners[move.param]), policy)
    entries = _moved(moves)
    for param in entries:
        operations_of(owners[param].group).reshard()
    taken: dict[ParamGroup, list[ShardedParam]] = {}
    replaced = {move.before for move in moves if move.param is not None}
    for param, where in entries.items():
        group = owners[param].group
        _refuse_late_gradients(group)
        if where or param not in replaced:
            fill(owners[param], where)
        else:
            taken.setdefault(group, []).append(param)
    for group, params in taken.items():
        group.drop(params)
    for move in moves:
        if move.param is None:
            move.module.__dict__[NAMES][move.key] &= ~MANAGED
        elif move.before is not None and not entries[move.before]:
            move.param.absorb(move.before)
    link([found for unit in units if (found := record_of_unit(unit)) is not None])
    Counts.registrations += 1  # optimizers may hold one that is gone


def _moved(moves: Sequence[Move]) -> dict[ShardedParam, list[ModuleEntry]]:
    """The entries of parameters that have others now."""
    entries: dict[ShardedParam, list[ModuleEntry]] = {}
    for move in moves:
        for param in (move.param, move.before):
            if param is not None:
                entries.setdefault(param, list(param.entries))
    for move in moves:
        if move.before is not None:
            entries[move.before].remove((move.module, move.key))
    for move in moves:
        if move.param is not None:
            entries[move.param].append((move.module, move.key))
    return entries


def around(module: nn.Module, units: Iterable[Unit]) -> Iterator[UnitRecord]:
    """The records of units that have ``module``, and no unit inside does."""
    for unit in units:
        record = record_of_unit(unit)
        if record is not None and any(m is module for m, _ in managed_modules(record.modules)):
            yield record


def _refuse_late_gradients(group: ParamGroup) -> None:
    """Let a backward raise whose forward ran with the gathered parameters there were until now."""
    for param in group.params:
        gathered, name = param.unsharded, param.name
        if gathered is not None and gathered.requires_grad and gathered.is_leaf:

            def refuse(_: torch.Tensor, name: str = name) -> None:
                raise coded(
                    ShardingStateError,
                    "tied-late",
                    f"parameter '{name}' got a gradient from a forward that ran before parameters "
                    f"of its unit were tied or moved; run that backward before the next forward",
                )

            gathered.register_post_accumulate_grad_hook(refuse)


def link(records: Sequence[UnitRecord]) -> None:
    """Let each unit use the groups of others that have a parameter which its modules register."""
    owners = Owners(all_units())
    for record in records:
        unit = record.unit
        used: dict[ParamGroup, Unit] = {}
        for module, _ in managed_modules(record.modules):
            for registered in module._parameters.values():
                owned = None if registered is None else owners.of(registered)
                if owned is not None and owned.unit is not unit:
                    used[owned.group] = owned.unit
        for group in list(unit.groups):
            if unit.borrows(group) and group.base not in used:
                give_back(group.base, unit)
        unit.groups = [group for group in unit.groups if unit.borrows(group) or group.params]
        for group, owner in used.items():
            lend(group, owner, unit)
