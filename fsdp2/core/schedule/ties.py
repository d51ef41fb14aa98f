"""Groups that several units use, as parameters of theirs are tied (decision 21).

    embed  unit ── groups ──> TiedGroup   [embed.weight, also head.weight]
    head   unit ── groups ──> GroupAlias ──┘

The group belongs to one unit, whose flags count: it holds the shards and reduces the gradients. In
every other unit that has one of its parameters an alias stands for it. So each of them gathers the
group when it runs, and frees it if no other unit that uses it is under way. Autograd leaves the
gradient of a parameter when all its uses have been run through, and it is reduced once: when the
owner's backward ends, or at the end of backward if a unit that uses it is still to come then, or if
the owner takes no part in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import Reduction
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.layers import Layer, put_around
from fsdp2.core.schedule.unit import BACKWARD, FORWARD, REDUCED, Unit


@dataclass(eq=False)
class Tie:
    """Which units use a group.

    Attributes:
        owner: the unit that it belongs to.
        users: the others.
        leaving: the one of ``users`` that frees it at this moment.
        forced: whether it is freed at this moment whoever uses it.
        fills: whether its absent gradients are to be taken as zeros when it is reduced.
    """

    owner: weakref.ref[Unit]
    users: weakref.WeakSet[Unit] = field(default_factory=weakref.WeakSet)
    leaving: Unit | None = None
    forced: bool = False
    fills: bool = False

    @property
    def in_use(self) -> bool:
        """Whether a unit is under way besides the one that frees it."""
        if self.forced:
            return False
        owner = self.owner()
        leaving = self.leaving or owner
        if owner is not leaving and owner is not None and owner.phase in (FORWARD, BACKWARD):
            return True
        return any(u.phase in (FORWARD, BACKWARD) for u in self.users if u is not leaving)

    @property
    def to_come(self) -> bool:
        """Whether backward may still come to another unit than the owner, or is in one."""
        return any(unit.phase is BACKWARD or unit.visits for unit in self.users)


_ties: weakref.WeakKeyDictionary[ParamGroup, Tie] = weakref.WeakKeyDictionary()


class TiedGroup(Layer):
    """A group that other units use, too."""

    __slots__ = ()

    height = 0  # below all that is put around groups on request

    def reshard(self) -> None:
        """Free it, but not while another unit is under way that uses it."""
        if not _ties[self].in_use:
            super().reshard()

    def shard_smaller(self) -> None:
        """Keep a smaller group's rows, but not while another unit is under way that uses it."""
        if not _ties[self].in_use:
            super().shard_smaller()

    def hide(self) -> None:
        """Register the shards, but not while another unit is under way that uses it."""
        if not _ties[self].in_use:
            super().hide()

    def abandon(self) -> None:
        """Free it, whoever uses it."""
        tie = _ties[self]
        tie.forced = True
        try:
            super().abandon()
        finally:
            tie.forced = False

    def forbid_reading(self) -> None:
        """Nothing: another unit's backward may be to come, which gathers it, and reads it."""

    def collect(
        self, all_reduce: bool, fill: bool, again: bool = False
    ) -> list[tuple[Reduction, Job]]:
        """Take the gradients, but not at the owner's own end while others are to come."""
        tie = _ties[self]
        owner = tie.owner()
        at_its_end = owner is not None and owner.phase is REDUCED and not again
        if at_its_end and tie.to_come:
            tie.fills = tie.fills or fill
            return []
        fill, tie.fills = fill or tie.fills, False
        return super().collect(all_reduce, fill, again)

    @property
    def is_over(self) -> bool:
        """Whether it is sharded, and nothing is there to reduce."""
        return not _ties[self].fills and super().is_over

    @property
    def is_owed(self) -> bool:
        """Whether another unit's backward has left gradients."""
        return self.has_gradients

    def discard_gradients(self) -> None:
        """Drop gradients that are not reduced yet."""
        _ties[self].fills = False
        super().discard_gradients()


class GroupAlias(ParamGroup):
    """What stands for a tied group in a unit that it does not belong to.

    It gathers and frees the group. It has no parameters and gradients. What else is asked of it
    (state, options) the group answers.

    Args:
        tied: the group.
        unit: the unit.
    """

    __slots__ = ("_user", "tied")

    is_alias = True

    def __init__(self, tied: ParamGroup, unit: Unit) -> None:
        # Attributes that are not set here are the group's: `__getattr__`.
        self.tied = tied
        self._user = weakref.ref(unit)
        self.name = f"{unit.title} (tied)"
        self.params = []
        self.layout = None
        self.offload = None
        self.smaller_group = None
        self._accumulated = False
        self._reductions = []

    def __getattr__(self, name: str) -> object:
        return getattr(object.__getattribute__(self, "tied"), name)

    # ---- gather and free

    def bind(self) -> None:
        """Bind the group."""
        self.tied.bind()

    def start_unshard(self) -> None:
        """Issue the group's all-gather."""
        self.tied.start_unshard()

    def finish_unshard(self) -> None:
        """Finish it."""
        self.tied.finish_unshard()

    def refresh_requires_grad(self) -> None:
        """Carry ``requires_grad`` from one form of a parameter to the other."""
        self.tied.refresh_requires_grad()

    def reshard(self) -> None:
        """Free the group, if no other unit is under way that uses it."""
        self._leave(self.tied.reshard)

    def shard_smaller(self) -> None:
        """As `reshard`, but for a smaller group's rows."""
        self._leave(self.tied.shard_smaller)

    def hide(self) -> None:
        """As `reshard`, but what is gathered stays in memory."""
        self._leave(self.tied.hide)

    def show(self) -> None:
        """Register what is gathered and was hidden."""
        self.tied.show()

    def take_back(self, stays: bool = True) -> None:
        """As the group."""
        self.tied.take_back(stays)

    @property
    def written(self) -> str | None:
        """As the group's."""
        return self.tied.written

    def _leave(self, free: Callable[[], None]) -> None:
        tie = _ties[self.tied]
        tie.leaving = self._user()
        try:
            free()
        finally:
            tie.leaving = None

    def abandon(self) -> None:
        """Free it, whoever uses it."""
        self.tied.abandon()

    def settle(self) -> None:
        """Block the host until it may write offloaded shards."""
        self.tied.settle()

    def rebind(self) -> None:
        """Notice changed parameters at the next gather."""
        self.tied.rebind()

    def forbid_reading(self) -> None:
        """Nothing, as for the group."""

    # ---- what the owner does

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do here."""
        return True

    def accumulate(self) -> None:
        """Nothing."""

    def collect(
        self, all_reduce: bool, fill: bool, again: bool = False
    ) -> list[tuple[Reduction, Job]]:
        """Nothing."""
        return []

    def discard_gradients(self) -> None:
        """Nothing."""

    def set_options(self, options: object) -> None:
        """Nothing: those of the owner count."""

    def set_reducers(self, reducers: object) -> None:
        """Nothing."""

    def set_smaller_group(self, smaller: object) -> None:
        """Nothing."""


def lend(group: ParamGroup, owner: Unit, unit: Unit) -> None:
    """Let ``unit`` use a group of ``owner``, too."""
    if group not in _ties:
        _ties[group] = Tie(weakref.ref(owner))
        put_around([group], TiedGroup, True)
    users = _ties[group].users
    if unit not in users:
        users.add(unit)
        unit.groups.append(GroupAlias(group, unit))


def give_back(alias: GroupAlias, unit: Unit) -> None:
    """Let ``unit`` use the group of ``alias`` no longer."""
    unit.groups.remove(alias)
    group = alias.tied
    _ties[group].users.discard(unit)
    if not _ties[group].users:
        put_around([group], TiedGroup, False)
        del _ties[group]


def inherit(unit: Unit, is_gone: Callable[[Unit], bool]) -> None:
    """Let groups belong to ``unit`` that it uses, and whose own unit has no module any more."""
    for alias in [group for group in unit.groups if isinstance(group, GroupAlias)]:
        group = alias.tied
        owner = _ties[group].owner()
        if owner is None or is_gone(owner):
            _ties[group].owner = weakref.ref(unit)
            unit.groups.insert(0, group)
            give_back(alias, unit)


def users_of(group: ParamGroup) -> set[Unit]:
    """The units that use a tied group."""
    tie = _ties[group]
    return {unit for unit in (tie.owner(), *tie.users) if unit is not None}


def tied_to(unit: Unit) -> set[Unit]:
    """The other units that use a group with ``unit``."""
    found: set[Unit] = set()
    for group in unit.groups:
        if isinstance(group, GroupAlias) or group in _ties:
            found |= users_of(group.tied if isinstance(group, GroupAlias) else group)
    return found - {unit}
