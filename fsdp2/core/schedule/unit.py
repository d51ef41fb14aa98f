"""The result of one call of ``fully_shard`` for the scheduler: groups and flags.

IDLE ──enter_forward──> FORWARD ──exit_forward──> IDLE
 ^                         ·  derivative of an earlier call, inside this one
 |                         v
 | <──end_backward── BACKWARD <──enter_backward── IDLE
 |                       |  ^
 |           exit_backward  enter_backward, of another call
 |                       v  |
 └────end_backward── REDUCED

After `give_up`, a unit is IDLE. `MOVES` is this diagram as a table.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from fsdp2.core.config import GroupOptions
from fsdp2.core.device.comm_memory import OwnComms
from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import (
    CLAIMED,
    GroupOperations,
    Observer,
    note,
    observed,
    observers_of,
    with_observer,
)
from fsdp2.core.schedule.states import HIDDEN, GroupState


class Phase(Enum):
    """The phase of a unit in its iteration."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCED = "reduced"


class PrefetchTime(Enum):
    """When a unit's backward prefetches the next unit: see `FSDPModule.set_tuning`.

    Example::

        model.set_tuning(backward_prefetch=PrefetchTime.NEVER)  # gather each unit when it is needed
    """

    BEFORE = "before"
    AFTER = "after"
    NEVER = "never"


IDLE, FORWARD, BACKWARD, REDUCED = Phase
"""For the hot path, as in `fsdp2.core.device.streams`."""

MOVES: Mapping[Phase, frozenset[Phase]] = {
    IDLE: frozenset({IDLE, FORWARD, BACKWARD}),
    FORWARD: frozenset({IDLE, BACKWARD}),
    BACKWARD: frozenset({IDLE, REDUCED}),
    REDUCED: frozenset({IDLE, BACKWARD}),
}
"""The phases that may follow each one. `fsdp2.testing.phases` raises for others, with a watcher of
`watching`. `Unit` itself has no check, so that a phase costs a step one store."""


def _unknown() -> None:
    """The record of a unit without modules."""


class Unit:
    """The result of one call of ``fully_shard``: groups that are used together, and their flags.

    Attributes:
        name: full name of its module ("" for the root), or several joined by commas.
        groups: its parameter groups, and those of other units that have parameters tied to its own,
            each with its observers.
        comms: collectives in memory of process groups, on request; `options_of` adds them.
        reshard_after_forward: ``None`` for the default: keep at the root, reshard elsewhere.
        sync: whether backward reduces gradients; otherwise they accumulate unreduced.
        all_reduce: whether reductions sum over replicas too; otherwise partial sums are kept.
        input_buffers: number of reductions whose inputs may be alive at the same time.
        prefetches: when its backward prefetches the next unit: before it computes, after, or never.
        prefetch_window: the number of units to prefetch; the largest number of all units counts.
        forward_prefetch: units to gather when its forward starts; empty for the recorded order.
        claimed: whether the user has unsharded it, and not resharded it since.
        ties: of the groups that other units use, too: all that do.
        visits: a position in the forward's order of exits for each call whose backward will follow.
        record: returns what rooms above know of its modules; ``None`` once those are gone.
    """

    __slots__ = (
        "__weakref__",
        "all_reduce",
        "backward_prefetch",
        "claimed",
        "comms",
        "forward_prefetch",
        "groups",
        "input_buffers",
        "is_root",
        "name",
        "options",
        "phase",
        "prefetch_window",
        "prefetches",
        "record",
        "reshard_after_backward",
        "reshard_after_forward",
        "sync",
        "ties",
        "unshard_in_backward",
        "visits",
    )

    def __init__(
        self,
        name: str,
        groups: Sequence[GroupOperations],
        options: GroupOptions = GroupOptions(),  # noqa: B008  # frozen
    ) -> None:
        self.name = name
        self.groups = list(groups)
        for group in groups:
            (group if isinstance(group, ParamGroup) else group.base).owner = weakref.ref(self)
        self.options = options
        self.comms: dict[ProcessGroup, OwnComms] = {}
        self.reshard_after_forward: bool | None = None
        self.reshard_after_backward = True
        self.sync = True
        self.all_reduce = True
        self.unshard_in_backward = True
        self.input_buffers = 1
        self.prefetch_window = 1
        self.prefetches = PrefetchTime.BEFORE
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        self.is_root = False
        self.claimed = False
        self.phase = IDLE
        self.ties: dict[ParamGroup, weakref.WeakSet[Unit]] = {}
        self.visits: list[int] = []
        self.record: Callable[[], object | None] = _unknown

    @property
    def own_groups(self) -> list[ParamGroup]:
        """The groups that belong to it, without their observers."""
        # `ParamGroup.base` would be one call per group, in each look at all units.
        bases = [g if isinstance(g, ParamGroup) else g.base for g in self.groups]
        return [g for g in bases if not self.borrows(g)] if self.ties else bases

    def borrows(self, group: GroupOperations) -> bool:
        """Whether a group that it uses belongs to another unit, which reduces its gradients."""
        base = group.base
        return base in self.ties and base.owner() is not self

    def operations_of(self, group: ParamGroup) -> GroupOperations:
        """A group that it uses, with its observers; without, one that it uses no longer."""
        return next((found for found in self.groups if found.base is group), group)

    def put_around(self, observer: Observer, wanted: bool) -> None:
        """Let an observer see its groups, or no longer."""
        self.groups = [with_observer(group, observer, wanted) for group in self.groups]

    @property
    def title(self) -> str:
        """Its name for messages: "(root)" for the root."""
        return self.name or "(root)"

    @property
    def frees_after_forward(self) -> bool:
        """Whether parameters are freed when its forward ends."""
        if self.reshard_after_forward is None:
            return not self.is_root
        return self.reshard_after_forward

    @property
    def is_sharded(self) -> bool:
        """Whether a group of it must be gathered before use."""
        for group in self.groups:  # noqa: SIM110  # asked in every prefetch
            if group.state.needs_gather:
                return True
        return False

    @property
    def is_gathered(self) -> bool:
        """Whether a group of it is gathered, or being gathered, and not only retained."""
        states = [group.state for group in self.groups]
        return any(not (state.needs_gather or state.is_sharded) for state in states)

    def change(self, **options: Any) -> None:
        """Replace options of its groups, and of those that will be added."""
        self.options = replace(self.options, **options)
        self._hand_options_on()

    def set_comms(self, comms: dict[ProcessGroup, OwnComms]) -> None:
        """Allocate buffers of all-gathers and reductions only in memory of these process groups."""
        self.comms = comms
        self._hand_options_on()

    def options_of(self, group: ParamGroup) -> GroupOptions:
        """The options of a group that belongs to it; the user's collectives precede ``comms``."""
        options, shared = self.options, group.collectives.group
        if shared is None or shared not in self.comms:
            return options
        gather, reduce = options.all_gather, options.reduce_scatter
        own_gather, own_reduce = self.comms[shared]
        if gather is None:
            gather = own_gather
        if reduce is None and (options.sum_only or not own_reduce.memory.only_sums):
            reduce = own_reduce
        return replace(options, all_gather=gather, reduce_scatter=reduce)

    def _hand_options_on(self) -> None:
        for group in self.own_groups:
            group.set_options(self.options_of(group))

    def reshard(self) -> None:
        """Free its unsharded parameters; no-op if they are sharded."""
        for group in self.groups:
            group.reshard()

    def note_contents(self) -> None:
        """Note what a user is given, so that `give_up` sees his writes."""
        self.put_around(CLAIMED, True)
        for group in self.own_groups:
            note(group)

    def give_up(self) -> None:
        """Free it for a user, who may have used its unsharded parameters."""
        for group in self.groups:
            group.take_back(stays=False)
            group.base.drop_for_user()
        self.claimed = False
        self.reshard()
        self.put_around(CLAIMED, False)

    def give_up_iteration(self) -> None:
        """Free it and drop unreduced gradients, in any state in which an exception left it."""
        self.phase = IDLE
        self.claimed = False
        self.visits.clear()
        for group in self.groups:
            group.abandon()
            if not self.borrows(group):
                group.discard_gradients()

    def hide(self, to: GroupState = HIDDEN) -> None:
        """Register its sharded parameters; unsharded ones stay in memory (`ParamGroup.hide`)."""
        for group in self.groups:
            group.hide(to)

    def drop_retained(self) -> None:
        """Free what is gathered while its sharded parameters are registered."""
        for group in self.groups:
            group.base.drop_retained()

    def settle(self) -> None:
        for group in self.groups:
            group.settle()

    def forbid_reading(self) -> None:
        """Make a backward raise if it reads parameters that are not gathered.

        They have no memory then; some backwards, such as that of an embedding, do not read it. The
        backward of another unit may still gather and read those that are tied.
        """
        for group in self.groups:
            if group.state.needs_gather and group.base not in self.ties:
                group.forbid_reading()

    def reshard_if_outdated(self) -> None:
        """Free parameters that were gathered before an optimizer step."""
        for group in self.groups:
            if not group.state.is_sharded:
                free_if_outdated(group)

    def __repr__(self) -> str:
        return f"Unit({self.title!r}, {self.phase.value})"


# ---- the units of this process


_enlisted: weakref.WeakSet[Unit] = weakref.WeakSet()


def enlist(unit: Unit, record: object) -> None:
    """Note the unit of a sharded module, so that observers find it, and its record."""
    unit.record = weakref.ref(record)
    _enlisted.add(unit)


def all_units() -> list[Unit]:
    """The units of all sharded modules in this process, in no particular order."""
    return list(_enlisted)


def all_groups() -> Iterator[ParamGroup]:
    """The groups of all sharded modules in this process, each once, in no particular order."""
    for unit in all_units():
        yield from unit.own_groups


def owner_of(group: ParamGroup) -> Unit | None:
    """The unit to which ``group`` belongs, if it still exists."""
    unit = group.owner()
    return unit if isinstance(unit, Unit) else None


def unit_of(group: ParamGroup) -> Unit:
    """The unit to which ``group`` belongs."""
    unit = owner_of(group)
    assert unit is not None
    return unit


def operations_of(group: ParamGroup) -> GroupOperations:
    """A group with its observers, which see each all-gather and free; none if its unit is gone."""
    unit = owner_of(group)
    return group if unit is None else unit.operations_of(group)


def free_if_outdated(group: GroupOperations) -> None:
    """Free parameters that were gathered before an optimizer step, because they are out of date."""
    if group.is_outdated:
        if group.state is HIDDEN:  # a graph that reads them raises, as it would without sharding
            group.forbid_reading()
        group.reshard()


def put_around(units: Iterable[Unit], observer: Observer, wanted: bool) -> None:
    """Let an observer see the groups of units, or no longer."""
    for unit in units:
        unit.put_around(observer, wanted)


# ---- watchers of phases


Watcher = Callable[[Unit, Phase, Phase], None]
"""Called with a unit, its phase until now, and the one that is stored next, unless it raises."""


def watched_phase(watcher: Watcher) -> property:
    """A property that hides the slot of phases, and tells ``watcher`` of each store."""
    hidden = vars(Unit)["phase"]  # the slot, or what tells another watcher

    def store(unit: Unit, phase: Phase) -> None:
        before = getattr(unit, "phase", None)
        if before is not None:  # a unit that is being made has none
            watcher(unit, before, phase)
        hidden.__set__(unit, phase)

    return property(hidden.__get__, store)


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher`` of each store of a phase, of every unit in this process, while it is on."""
    hidden = vars(Unit)["phase"]
    type.__setattr__(Unit, "phase", watched_phase(watcher))
    try:
        yield
    finally:
        type.__setattr__(Unit, "phase", hidden)


# ---- groups that several units use, because their parameters are tied (decision 21)

#     embed  unit ── groups ──┬──> ParamGroup   [embed.weight]
#     head   unit ── groups ──┘
#            both ── ties ──> {embed unit, head unit}
#
# The group belongs to one unit, its owner, whose flags count: it holds the shards and reduces the
# gradients. Each unit that has one of its parameters gathers it when it runs, and frees it unless
# another one that uses it is running (`ParamGroup.in_use`). Its gradients are complete when no use
# is to come: at the owner's end, or at that of the whole backward (`Scheduler._collect_late`).


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
