"""Groups that several units use, because their parameters are tied (decision 21).

    embed  unit ── groups ──┬──> ParamGroup   [embed.weight]
    head   unit ── groups ──┘
           both ── ties ──> {embed unit, head unit}

The group belongs to one unit, its owner (`ParamGroup.owner`), whose flags count: it holds the
shards and reduces the gradients. Each unit that has one of its parameters gathers it when it runs,
and frees it unless another one that uses it is running (`ParamGroup.in_use`). Its gradients are
complete when no use is to come: at the owner's end, or at the end of the whole backward
(`Scheduler._collect_late`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable

from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import observed, observers_of
from fsdp2.core.schedule.unit import BACKWARD, FORWARD, Unit, owner_of


def lend(group: ParamGroup, owner: Unit, unit: Unit) -> None:
    """Let ``unit`` also use a group of ``owner``."""
    units = owner.ties.setdefault(group, weakref.WeakSet([owner]))
    if unit not in units:
        units.add(unit)
        unit.ties[group] = units
        group.in_use = functools.partial(_any_runs, units)
        unit.groups.append(observed(group, observers_of(owner.operations_of(group))))


def _any_runs(units: Iterable[Unit]) -> bool:
    return any(unit.phase in (FORWARD, BACKWARD) for unit in units)


def give_back(group: ParamGroup, unit: Unit) -> None:
    """End the use of another unit's group by ``unit``."""
    unit.groups.remove(unit.operations_of(group))
    units = unit.ties.pop(group)
    units.discard(unit)
    _untie_last(group, units)


def _untie_last(group: ParamGroup, units: weakref.WeakSet[Unit]) -> None:
    """If only the owner uses it from now on, it is a group like others."""
    owner = owner_of(group)
    if all(unit is owner for unit in units):
        group.in_use = None
        if owner is not None:
            owner.ties.pop(group, None)


def inherit(unit: Unit, is_gone: Callable[[Unit], bool]) -> None:
    """Make ``unit`` the owner of groups that it uses and whose owner no longer has a module."""
    for group, units in list(unit.ties.items()):
        owner = owner_of(group)
        if unit.borrows(group) and (owner is None or is_gone(owner)):
            found = unit.operations_of(group)
            group.owner = weakref.ref(unit)
            if owner is not None:
                units.discard(owner)
            group.set_options(unit.options_of(group))
            unit.groups.remove(found)
            unit.groups.insert(0, found)
            _untie_last(group, units)


def tied_to(unit: Unit) -> set[Unit]:
    """The other units that use a group with ``unit``."""
    return {other for units in unit.ties.values() for other in units} - {unit}
