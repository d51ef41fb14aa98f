"""Groups that several units use, because their parameters are tied (decision 21).

    embed  unit ── groups ──┬──> ParamGroup   [embed.weight]
    head   unit ── groups ──┘
           both ── ties ──> Tie   owner, users

The group belongs to one unit, its owner, whose flags count: it holds the shards and reduces the
gradients. Each unit that has one of its parameters gathers it when it runs, and frees it unless
another one that uses it is running (`ParamGroup.in_use`). Its gradients are complete when no use is
to come: at the owner's end, or at the end of the whole backward (`Scheduler._collect_late`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import observed, observers_of
from fsdp2.core.schedule.unit import Tie, Unit


def lend(group: ParamGroup, owner: Unit, unit: Unit) -> None:
    """Let ``unit`` also use a group of ``owner``."""
    tie = owner.ties.setdefault(group, Tie(owner))
    if unit not in tie.users:
        tie.users.add(unit)
        unit.ties[group] = tie
        group.in_use = tie.in_use
        unit.groups.append(observed(group, observers_of(owner.operations_of(group))))


def give_back(group: ParamGroup, unit: Unit) -> None:
    """End the use of another unit's group by ``unit``."""
    unit.groups.remove(unit.operations_of(group))
    tie = unit.ties.pop(group)
    tie.users.discard(unit)
    if not tie.users:
        _untie(group, tie)


def _untie(group: ParamGroup, tie: Tie) -> None:
    """Only the owner uses it from now on."""
    group.in_use = None
    owner = tie.owner()
    if owner is not None:
        owner.ties.pop(group, None)


def inherit(unit: Unit, is_gone: Callable[[Unit], bool]) -> None:
    """Make ``unit`` the owner of groups that it uses and whose owner no longer has a module."""
    for group, tie in list(unit.ties.items()):
        owner = tie.owner()
        if unit.borrows(group) and (owner is None or is_gone(owner)):
            found = unit.operations_of(group)
            tie.owner = weakref.ref(unit)
            tie.users.discard(unit)
            group.set_options(unit.options_of(group))
            unit.groups.remove(found)
            unit.groups.insert(0, found)
            if not tie.users:
                _untie(group, tie)


def tied_to(unit: Unit) -> set[Unit]:
    """The other units that use a group with ``unit``."""
    return {other for tie in unit.ties.values() for other in tie.units} - {unit}
