"""Groups that several units use, as parameters of theirs are tied (decision 21).

    embed  unit ── groups ──>               TiedGroup ──> ParamGroup   [embed.weight]
    head   unit ── groups ──> GroupAlias ──────┘

The group belongs to one unit, whose flags count: it holds the shards and reduces the gradients. In
every other unit that has one of its parameters an alias stands for it. So each of them gathers the
group when it runs, and frees it if no other unit that uses it is under way. Autograd leaves the
gradient of a parameter when all its uses have been run through, and it is reduced once: when the
owner's backward ends, or at the end of backward if a unit that uses it is still to come then, or if
the owner takes no part in it.

Both are layers (`fsdp2.core.schedule.layers`), below all that is put around groups on request.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

from fsdp2.core.params.param import ShardedParam
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import Reduction
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.layers import GroupOperations, Layer, layers_of, with_layer, without_layer
from fsdp2.core.schedule.unit import BACKWARD, FORWARD, REDUCED, Unit


class TiedGroup(Layer):
    """A group that other units use, too.

    Args:
        below: the group.
        owner: the unit that it belongs to.

    Attributes:
        owner: the same.
        users: the other units.
        leaving: the one of ``users`` that frees it at this moment.
        fills: whether its absent gradients are to be taken as zeros when it is reduced.
    """

    __slots__ = ("fills", "leaving", "owner", "users")

    height = 0

    def __init__(self, below: GroupOperations, owner: Unit) -> None:
        super().__init__(below)
        self.owner = weakref.ref(owner)
        self.users: weakref.WeakSet[Unit] = weakref.WeakSet()
        self.leaving: Unit | None = None
        self.fills = False

    @property
    def units(self) -> set[Unit]:
        """All that use it."""
        return {unit for unit in (self.owner(), *self.users) if unit is not None}

    @property
    def _in_use(self) -> bool:
        """Whether a unit is under way besides the one that frees it."""
        leaving = self.leaving or self.owner()
        return any(u.phase in (FORWARD, BACKWARD) for u in self.units if u is not leaving)

    @property
    def _to_come(self) -> bool:
        """Whether backward may still come to another unit than the owner, or is in one."""
        return any(unit.phase is BACKWARD or unit.visits for unit in self.users)

    def reshard(self) -> None:
        """Free it, but not while another unit is under way that uses it."""
        if not self._in_use:
            self.below.reshard()

    def shard_smaller(self) -> None:
        """Keep a smaller group's rows, but not while another unit is under way that uses it."""
        if not self._in_use:
            self.below.shard_smaller()

    def hide(self) -> None:
        """Register the shards, but not while another unit is under way that uses it."""
        if not self._in_use:
            self.below.hide()

    def forbid_reading(self) -> None:
        """Nothing: another unit's backward may be to come, which gathers it, and reads it."""

    def collect(
        self, all_reduce: bool, fill: bool, again: bool = False
    ) -> list[tuple[Reduction, Job]]:
        """Take the gradients, but not at the owner's own end while others are to come."""
        owner = self.owner()
        at_its_end = owner is not None and owner.phase is REDUCED and not again
        if at_its_end and self._to_come:
            self.fills = self.fills or fill
            return []
        fill, self.fills = fill or self.fills, False
        return self.below.collect(all_reduce, fill, again)

    @property
    def is_over(self) -> bool:
        """Whether it is sharded, and nothing is there to reduce."""
        return not self.fills and self.below.is_over

    @property
    def is_owed(self) -> bool:
        """Whether another unit's backward has left gradients."""
        return self.base.has_gradients

    def discard_gradients(self) -> None:
        """Drop gradients that are not reduced yet."""
        self.fills = False
        self.below.discard_gradients()


class GroupAlias(Layer):
    """Represents a tied group in a unit that does not own it.

    It unshards and reshards the group. It has no parameters and gradients, which are the owner's.

    Args:
        tied: the group.
        unit: the unit.
    """

    __slots__ = ("_tied", "_user")

    height = 1

    def __init__(self, tied: TiedGroup, unit: Unit) -> None:
        super().__init__(tied)
        self._tied = tied
        self._user = weakref.ref(unit)

    @property
    def is_alias(self) -> bool:
        """Yes."""
        return True

    @property
    def params(self) -> list[ShardedParam]:
        """None of its own."""
        return []

    # ---- free

    def reshard(self) -> None:
        """Free the group, if no other unit is under way that uses it."""
        self._leave(self._tied.reshard)

    def shard_smaller(self) -> None:
        """As `reshard`, but for a smaller group's rows."""
        self._leave(self._tied.shard_smaller)

    def hide(self) -> None:
        """As `reshard`, but what is gathered stays in memory."""
        self._leave(self._tied.hide)

    def _leave(self, free: Callable[[], None]) -> None:
        self._tied.leaving = self._user()
        try:
            free()
        finally:
            self._tied.leaving = None

    # ---- what the owner does

    @property
    def is_over(self) -> bool:
        """Nothing is left to do here."""
        return True

    @property
    def is_owed(self) -> bool:
        """Nothing is reduced here."""
        return False

    @property
    def accumulates(self) -> bool:
        """Nothing waits here."""
        return False

    def accumulate(self) -> None:
        """Nothing."""

    def collect(
        self, all_reduce: bool, fill: bool, again: bool = False
    ) -> list[tuple[Reduction, Job]]:
        """Nothing."""
        return []

    def discard_gradients(self) -> None:
        """Nothing."""


def tied_group(group: GroupOperations) -> TiedGroup | None:
    """The layer of a group that other units use, too; ``None`` where there is none."""
    return next((layer for layer in layers_of(group) if isinstance(layer, TiedGroup)), None)


def lend(group: ParamGroup, owner: Unit, unit: Unit) -> None:
    """Let ``unit`` use a group of ``owner``, too."""
    place = owner.place_of(group)
    tied = tied_group(owner.groups[place])
    if tied is None:
        tie = functools.partial(TiedGroup, owner=owner)
        owner.groups[place] = with_layer(owner.groups[place], tie, TiedGroup.height)
        tied = tied_group(owner.groups[place])
        assert tied is not None
    if unit not in tied.users:
        tied.users.add(unit)
        alias: GroupOperations = GroupAlias(tied, unit)
        for layer in reversed(layers_of(owner.groups[place])):
            if layer is not tied:  # what stands around the group on request
                alias = type(layer)(alias)
        unit.groups.append(alias)


def give_back(group: ParamGroup, unit: Unit) -> None:
    """Let ``unit`` use another unit's group no longer."""
    alias = next(each for each in unit.groups if each.is_alias and each.base is group)
    unit.groups.remove(alias)
    tied = tied_group(alias)
    assert tied is not None
    owner = tied.owner()
    tied.users.discard(unit)
    if not tied.users and owner is not None and group in owner.own_groups:  # it may be empty
        place = owner.place_of(group)
        owner.groups[place] = without_layer(owner.groups[place], TiedGroup)


def inherit(unit: Unit, is_gone: Callable[[Unit], bool]) -> None:
    """Let groups belong to ``unit`` that it uses, and whose own unit has no module any more."""
    for alias in [group for group in unit.groups if group.is_alias]:
        tied = tied_group(alias)
        assert tied is not None
        owner = tied.owner()
        if owner is None or is_gone(owner):
            unit.groups.remove(alias)
            own = without_layer(alias, GroupAlias)
            tied.owner = weakref.ref(unit)
            tied.users.discard(unit)
            tied.base.set_options(unit.options_of(tied.base))
            unit.groups.insert(0, own if tied.users else without_layer(own, TiedGroup))


def tied_to(unit: Unit) -> set[Unit]:
    """The other units that use a group with ``unit``."""
    found: set[Unit] = set()
    for group in unit.groups:
        tied = tied_group(group)
        found |= set() if tied is None else tied.units
    return found - {unit}
