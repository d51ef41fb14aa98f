"""Groups that several units use, because their parameters are tied (decision 21).

    embed  unit ── groups ──>               TiedGroup ──> ParamGroup   [embed.weight]
    head   unit ── groups ──> GroupAlias ──────┘

The group belongs to one unit, its owner, whose flags count: it holds the shards and reduces the
gradients. In every other unit that has one of its parameters, an alias represents the group. Each
of these units therefore gathers the group when it runs, and frees it unless another unit that uses
it is running. Autograd delivers the gradient of a parameter after all its uses have run. It is
reduced once: when the owner's backward ends, or at the end of backward if the backward of another
unit that uses it is still to come, or if the owner has no backward.

Both are layers (`fsdp2.core.schedule.layers`), below all layers that are added on request.
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
    """A group that other units also use.

    Args:
        below: the group.
        owner: the unit to which it belongs.

    Attributes:
        owner: the same.
        users: the other units.
        leaving: the one of ``users`` that is freeing it.
        fills: whether its absent gradients count as zeros when it is reduced.
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
        """All units that use it."""
        return {unit for unit in (self.owner(), *self.users) if unit is not None}

    @property
    def _in_use(self) -> bool:
        """Whether another unit is running than the one that frees it."""
        leaving = self.leaving or self.owner()
        return any(u.phase in (FORWARD, BACKWARD) for u in self.units if u is not leaving)

    @property
    def _to_come(self) -> bool:
        """Whether backward may still reach another unit than the owner, or is in one."""
        return any(unit.phase is BACKWARD or unit.visits for unit in self.users)

    def reshard(self) -> None:
        """Free it, unless another unit that uses it is running."""
        if not self._in_use:
            self.below.reshard()

    def shard_smaller(self) -> None:
        """Keep a smaller group's rows, unless another unit that uses it is running."""
        if not self._in_use:
            self.below.shard_smaller()

    def hide(self) -> None:
        """Register the shards, unless another unit that uses it is running."""
        if not self._in_use:
            self.below.hide()

    def retain(self, granted: bool = False) -> None:
        """As `hide`."""
        if not self._in_use:
            self.below.retain(granted)

    def forbid_reading(self) -> None:
        """Do nothing: another unit's backward may still gather and read it."""

    def collect(
        self, all_reduce: bool, fill: bool, again: bool = False
    ) -> list[tuple[Reduction, Job]]:
        """Take the gradients, unless this is the owner's end and other units are still to come."""
        owner = self.owner()
        at_its_end = owner is not None and owner.phase is REDUCED and not again
        if at_its_end and self._to_come:
            self.fills = self.fills or fill
            return []
        fill, self.fills = fill or self.fills, False
        return self.below.collect(all_reduce, fill, again)

    @property
    def is_over(self) -> bool:
        """Whether it is sharded, and has nothing to reduce."""
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
        """It is one."""
        return True

    @property
    def params(self) -> list[ShardedParam]:
        """It has none."""
        return []

    # ---- free

    def reshard(self) -> None:
        """Free the group, unless another unit that uses it is running."""
        self._leave(self._tied.reshard)

    def shard_smaller(self) -> None:
        """As `reshard`, but keep a smaller group's rows."""
        self._leave(self._tied.shard_smaller)

    def hide(self) -> None:
        """As `reshard`, but keep unsharded parameters in memory."""
        self._leave(self._tied.hide)

    def retain(self, granted: bool = False) -> None:
        """As `hide`."""
        self._leave(functools.partial(self._tied.retain, granted))

    def _leave(self, free: Callable[[], None]) -> None:
        self._tied.leaving = self._user()
        try:
            free()
        finally:
            self._tied.leaving = None

    # ---- operations that only the owner performs

    @property
    def is_over(self) -> bool:
        """Always: the owner has the gradients."""
        return True

    @property
    def is_owed(self) -> bool:
        """Never: the owner reduces."""
        return False

    @property
    def accumulates(self) -> bool:
        """Never: the owner accumulates."""
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
    """The layer of a group that other units also use; ``None`` if no other unit uses it."""
    return next((layer for layer in layers_of(group) if isinstance(layer, TiedGroup)), None)


def lend(group: ParamGroup, owner: Unit, unit: Unit) -> None:
    """Let ``unit`` also use a group of ``owner``."""
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
            if layer is not tied:  # layers that were added on request
                alias = type(layer)(alias)
        unit.groups.append(alias)


def give_back(group: ParamGroup, unit: Unit) -> None:
    """End the use of another unit's group by ``unit``."""
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
    """Make ``unit`` the owner of groups that it uses and whose owner no longer has a module."""
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
