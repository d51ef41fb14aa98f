"""Parameters that modules of several units register: tied weights, and modules with two parents.

    fully_shard finds one of another unit  ──> tied_parameters, join: one more entry of it
    a root's forward finds one moved       ──> take_up: entries as they are registered now
    either way                             ──> link: a unit that has one of another uses its group

The parameter stays the object that it is, in the group that it is in. One that another has replaced
everywhere leaves its group. One that was deleted stays, because it may be registered again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fsdp2.core.config import MixedPrecisionPolicy
from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.modules.optimizers import watch_optimizers
from fsdp2.core.modules.registrations import MANAGED, Move, mark_managed
from fsdp2.core.modules.registry import UnitRecord, managed_modules, record_of_unit
from fsdp2.core.notices import Notice
from fsdp2.core.params.param import (
    REPLACED,
    ModuleEntries,
    ModuleEntry,
    ShardedParam,
    compute_dtype,
)
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.ties import give_back, lend
from fsdp2.core.schedule.unit import Unit, all_units, operations_of

gained: Notice[[set[nn.Module], ParamGroup]] = Notice()
"""Called with modules that register parameters of a group, and registered none of it before."""


class Owned(NamedTuple):
    """A parameter, and its group and unit."""

    param: ShardedParam
    group: ParamGroup
    unit: Unit


class Owners:
    """The owners of parameters.

    Args:
        units: the units to look in.
    """

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
        """The owner of a registered object: a form of a parameter, or its object from before
        sharding.

        ``None`` if no unit manages it.
        """
        replaced = registered.__dict__.get(REPLACED)
        return self._owned.get(id(registered if replaced is None else replaced()))


class Computed(NamedTuple):
    """How a unit computes with one of its parameters.

    Attributes:
        name: the parameter's.
        dtype: of its shard.
        chosen: compute dtype; ``None``: the shard's.
        is_exception: whether the user has chosen that only for this parameter.
    """

    name: str
    dtype: torch.dtype
    chosen: torch.dtype | None
    is_exception: bool


def computed(owned: Owned) -> Computed:
    param = owned.param
    chosen = compute_dtype(owned.group.options, param)
    return Computed(param.name, param.dtype, chosen, param.dtype_override is not None)


def check_same_dtype(name: str, other: Computed, policy: MixedPrecisionPolicy) -> None:
    """Raise if a unit would compute with another unit's parameter in another dtype than that does.

    Args:
        name: of the parameter in the unit.
        other: of the one that it is.
        policy: the unit's.

    Raises:
        ValueError: it would.
    """
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
    """Manage parameters where modules register them now.

    Args:
        moves: which ones were registered elsewhere since.
        units: those that have them.

    Raises:
        ValueError: a unit computes with one in another dtype than the parameter's own.
    """
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
            move.module.__dict__[MANAGED].discard(move.key)
        elif move.before is not None and not entries[move.before]:
            move.param.absorb(move.before)
    link([found for unit in units if (found := record_of_unit(unit)) is not None])
    watch_optimizers()  # they may hold one that is gone


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
