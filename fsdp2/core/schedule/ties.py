"""Groups that several units use, because their parameters are tied (decision 21).

    embed  unit ── groups ──> TiedUse ──┬──> ParamGroup   [embed.weight]
                                Tie     │
    head   unit ── groups ──> TiedUse ──┘

The group belongs to one unit, its owner, whose flags count: it holds the shards and reduces the
gradients. Every other unit that has one of its parameters only gathers and frees it. Each of them
gathers the group when it runs, and frees it unless another unit that uses it is running. Autograd
delivers the gradient of a parameter after all its uses have run. It is reduced once: when the
owner's backward ends, or at the end of backward if the backward of another unit that uses it is
still to come, or if the owner has no backward.

A use is a layer (`fsdp2.core.schedule.observers`), below all layers that are added on request.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

from fsdp2.core.params.param import ShardedParam
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import Reduction
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import (
    GroupOperations,
    Layer,
    layers_of,
    observed,
    observers_of,
    with_layer,
    without_layer,
)
from fsdp2.core.schedule.unit import BACKWARD, FORWARD, REDUCED, Unit


class Tie:
    """The units that use a group.

    Args:
        owner: the unit to which it belongs.

    Attributes:
        owner: the same.
        users: the other units.
        fills: whether absent gradients count as zeros when it is reduced.
    """

    __slots__ = ("fills", "owner", "users")

    def __init__(self, owner: Unit) -> None:
        self.owner = weakref.ref(owner)
        self.users: weakref.WeakSet[Unit] = weakref.WeakSet()
        self.fills = False

    @property
    def units(self) -> set[Unit]:
        """All units that use it."""
        return {unit for unit in (self.owner(), *self.users) if unit is not None}


class TiedUse(Layer):
    """The use of a tied group by one of its units.

    Args:
        below: the group.
        tie: all of its units.
        unit: the one that uses it here.

    Attributes:
        tie: the same.
    """

    __slots__ = ("_unit", "tie")

    height = 0

    def __init__(self, below: GroupOperations, tie: Tie, unit: Unit) -> None:
        super().__init__(below)
        self.tie = tie
        self._unit = weakref.ref(unit)

    @property
    def is_alias(self) -> bool:
        """Whether the group belongs to another unit."""
        return self.tie.owner() is not self._unit()

    @property
    def params(self) -> list[ShardedParam]:
        """The owner's."""
        return [] if self.is_alias else self.below.params

    # ---- free, unless another unit that uses it is running

    @property
    def _in_use(self) -> bool:
        own = self._unit()
        return any(u.phase in (FORWARD, BACKWARD) for u in self.tie.units if u is not own)

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

    # ---- gradients: the owner has them

    def accumulate(self) -> None:
        """Keep this backward's gradients, unreduced."""
        if not self.is_alias:
            self.below.accumulate()

    def collect(
        self, all_reduce: bool, fill: bool, again: bool = False
    ) -> list[tuple[Reduction, Job]]:
        """Take the gradients, unless this is the owner's end and other units are still to come."""
        tie, owner = self.tie, self.tie.owner()
        if self.is_alias:
            return []
        at_its_end = owner is not None and owner.phase is REDUCED and not again
        if at_its_end and any(unit.phase is BACKWARD or unit.visits for unit in tie.users):
            tie.fills = tie.fills or fill
            return []
        fill, tie.fills = fill or tie.fills, False
        return self.below.collect(all_reduce, fill, again)

    @property
    def is_over(self) -> bool:
        """Whether it is sharded, and its owner has nothing to reduce."""
        return self.is_alias or (not self.tie.fills and self.below.is_over)

    @property
    def is_owed(self) -> bool:
        """Whether another unit's backward has left gradients, which the owner reduces."""
        return not self.is_alias and self.base.has_gradients

    @property
    def accumulates(self) -> bool:
        """Whether gradients of the owner's are waiting."""
        return not self.is_alias and self.below.accumulates

    def discard_gradients(self) -> None:
        """Drop gradients that are not reduced yet."""
        if not self.is_alias:
            self.tie.fills = False
            self.below.discard_gradients()


def tie_of(group: GroupOperations) -> Tie | None:
    """The units that use a group; ``None`` if only one does."""
    use = _use_of(group)
    return None if use is None else use.tie


def _use_of(group: GroupOperations) -> TiedUse | None:
    return next((layer for layer in layers_of(group) if isinstance(layer, TiedUse)), None)


def lend(group: ParamGroup, owner: Unit, unit: Unit) -> None:
    """Let ``unit`` also use a group of ``owner``."""
    place = owner.place_of(group)
    if tie_of(owner.groups[place]) is None:
        use = functools.partial(TiedUse, tie=Tie(owner), unit=owner)
        owner.groups[place] = with_layer(owner.groups[place], use, TiedUse.height)
    own = _use_of(owner.groups[place])
    assert own is not None
    if unit not in own.tie.users:
        own.tie.users.add(unit)
        alias: GroupOperations = TiedUse(own.below, own.tie, unit)
        for layer in reversed(layers_of(owner.groups[place])):
            if layer.height > TiedUse.height:  # that of a user's unshard()
                alias = type(layer)(alias)
        unit.groups.append(observed(alias, observers_of(owner.groups[place])))


def give_back(group: ParamGroup, unit: Unit) -> None:
    """End the use of another unit's group by ``unit``."""
    alias = next(each for each in unit.groups if each.is_alias and each.base is group)
    unit.groups.remove(alias)
    tie = tie_of(alias)
    assert tie is not None
    owner = tie.owner()
    tie.users.discard(unit)
    if not tie.users and owner is not None and group in owner.own_groups:  # it may be empty
        place = owner.place_of(group)
        owner.groups[place] = without_layer(owner.groups[place], TiedUse)


def inherit(unit: Unit, is_gone: Callable[[Unit], bool]) -> None:
    """Make ``unit`` the owner of groups that it uses and whose owner no longer has a module."""
    for group in [group for group in unit.groups if group.is_alias]:
        tie = tie_of(group)
        assert tie is not None
        owner = tie.owner()
        if owner is None or is_gone(owner):
            unit.groups.remove(group)
            tie.owner = weakref.ref(unit)
            tie.users.discard(unit)
            group.base.set_options(unit.options_of(group.base))
            unit.groups.insert(0, group if tie.users else without_layer(group, TiedUse))


def tied_to(unit: Unit) -> set[Unit]:
    """The other units that use a group with ``unit``."""
    found: set[Unit] = set()
    for group in unit.groups:
        tie = tie_of(group)
        found |= set() if tie is None else tie.units
    return found - {unit}
