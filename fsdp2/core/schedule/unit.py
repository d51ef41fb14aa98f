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

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from fsdp2.core.config import GroupOptions
from fsdp2.core.custom_collectives import MemoryComms
from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.schedule.claimed import ClaimedGroup
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.layers import GroupOperations, Layer, layered, layers_of
from fsdp2.core.schedule.states import HIDDEN, SHARDED


class Phase(Enum):
    """The phase of a unit in its iteration."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCED = "reduced"


class PrefetchTime(Enum):
    """When a unit's backward prefetches the next unit."""

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
`fsdp2.core.schedule.moves`. `Unit` itself has no check, so that a phase costs a step one store."""


def _unknown() -> None:
    """The record of a unit without modules."""


class Unit:
    """The result of one call of ``fully_shard``: groups that are used together, and their flags.

    Attributes:
        name: full name of its module ("" for the root), or several joined by commas.
        groups: its parameter groups, and aliases of other units' if parameters are tied to theirs,
            each with the layers around it; empty if every parameter belongs to other units.
        options: the user's choices for its groups, including those that are added later.
        comms: collectives in memory of process groups, on request; `options_of` adds them.
        reshard_after_forward: ``None`` for the default: keep at the root, reshard elsewhere.
        reshard_after_backward: whether parameters are resharded after backward.
        sync: whether backward reduces gradients; otherwise they accumulate unreduced.
        all_reduce: whether reductions sum over replicas too; otherwise partial sums are kept.
        unshard_in_backward: whether backward needs the unsharded parameters.
        input_buffers: number of reductions whose inputs may be alive at the same time.
        prefetches: when its backward prefetches the next unit: before it computes, after, or never.
        prefetch_window: the number of units to prefetch; the largest number of all units counts.
        forward_prefetch: units to gather when this one's forward starts; empty for the recorded
            order.
        backward_prefetch: the same for backward.
        is_root: whether it is the root of its scheduler.
        claimed: whether the user has unsharded it, and not resharded it since.
        phase: its phase in the iteration.
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
        self.options = options
        self.comms: dict[ProcessGroup, MemoryComms] = {}
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
        self.visits: list[int] = []
        self.record: Callable[[], object | None] = _unknown

    @property
    def own_groups(self) -> list[ParamGroup]:
        """The groups that belong to it, without the layers around them."""
        return [group.base for group in self.groups if not group.is_alias]

    def place_of(self, group: ParamGroup) -> int:
        """The index in ``groups`` of a group that belongs to it."""
        return next(
            place
            for place, found in enumerate(self.groups)
            if found.base is group and not found.is_alias
        )

    def operations_of(self, group: ParamGroup) -> GroupOperations:
        """A group that belongs to it, with the layers around it."""
        return self.groups[self.place_of(group)]

    def put_around(self, layer: type[Layer], wanted: bool) -> None:
        """Add a layer around its groups, or remove it."""
        self.groups = layered(self.groups, layer, wanted)

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
        """Whether a group of it is gathered, or being gathered."""
        return any(not group.state.needs_gather for group in self.groups)

    def change(self, **options: Any) -> None:
        """Replace options of its groups, and of those that will be added."""
        self.options = replace(self.options, **options)
        self._hand_options_on()

    def set_comms(self, comms: dict[ProcessGroup, MemoryComms]) -> None:
        """Allocate buffers of all-gathers and reductions only in memory of these process groups."""
        self.comms = comms
        self._hand_options_on()

    def options_of(self, group: ParamGroup) -> GroupOptions:
        """The options of a group that belongs to it; the user's collectives precede ``comms``."""
        options, shared = self.options, group.collectives.group
        if shared is None or shared not in self.comms:
            return options
        gather, reduce = options.all_gather, options.reduce_scatter
        comms = self.comms[shared]
        if gather is None:
            gather = comms.all_gather
        if reduce is None and (options.sum_only or not comms.only_sums):
            reduce = comms.reduce_scatter
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
        self.put_around(ClaimedGroup, True)
        for group in self.groups:
            for layer in layers_of(group):
                if isinstance(layer, ClaimedGroup):
                    layer.note()

    def give_up(self) -> None:
        """Free it for a user, who may have used its unsharded parameters."""
        for group in self.groups:
            group.take_back(stays=False)
            group.base.drop_for_user()
        self.claimed = False
        self.reshard()
        self.put_around(ClaimedGroup, False)

    def give_up_iteration(self) -> None:
        """Free it and drop unreduced gradients, in any state in which an exception left it."""
        self.phase = IDLE
        self.claimed = False
        self.visits.clear()
        for group in self.groups:
            group.abandon()
            group.discard_gradients()

    def hide(self) -> None:
        """Register its sharded parameters; unsharded ones stay in memory."""
        for group in self.groups:
            group.hide()

    def retain(self, granted: bool = False) -> None:
        """Register its sharded parameters; later forwards decide whether to use the rest again."""
        for group in self.groups:
            group.retain(granted)

    def drop_retained(self) -> None:
        """Free what is gathered while its sharded parameters are registered."""
        for group in self.groups:
            group.base.drop_retained()

    def settle(self) -> None:
        """Block the host until it may write offloaded shards."""
        for group in self.groups:
            group.settle()

    def forbid_reading(self) -> None:
        """Make a backward raise if it reads parameters that are not gathered.

        They have no memory then; some backwards, such as that of an embedding, do not read it.
        """
        for group in self.groups:
            if group.state.needs_gather:
                group.forbid_reading()

    def reshard_if_outdated(self) -> None:
        """Free parameters that were gathered before an optimizer step."""
        for group in self.groups:
            if group.state is not SHARDED:
                free_if_outdated(group)

    def __repr__(self) -> str:
        return f"Unit({self.title!r}, {self.phase.value})"


# ---- the units of this process


_enlisted: weakref.WeakSet[Unit] = weakref.WeakSet()


def enlist(unit: Unit, record: object) -> None:
    """Note the unit of a sharded module, so that layers for all groups find it, and its record."""
    unit.record = weakref.ref(record)
    _enlisted.add(unit)


def all_units() -> list[Unit]:
    """The units of all sharded modules in this process, in no particular order."""
    return list(_enlisted)


def all_groups() -> Iterator[ParamGroup]:
    """The groups of all sharded modules in this process, each once, in no particular order."""
    for unit in all_units():
        yield from unit.own_groups


_owners: weakref.WeakKeyDictionary[ParamGroup, weakref.ref[Unit]] = weakref.WeakKeyDictionary()
"""The unit in which a group was found; a tie may have moved the group since."""


def _owner_of(group: ParamGroup) -> Unit | None:
    known = _owners.get(group)
    unit = None if known is None else known()
    if unit is None or group not in unit.own_groups:
        unit = next((unit for unit in all_units() if group in unit.own_groups), None)
        if unit is not None:
            _owners[group] = weakref.ref(unit)
    return unit


def unit_of(group: ParamGroup) -> Unit:
    """The unit to which ``group`` belongs."""
    unit = _owner_of(group)
    assert unit is not None
    return unit


def operations_of(group: ParamGroup) -> GroupOperations:
    """A group of a sharded module, with the layers around it, which see each all-gather and free.

    A group whose unit was deleted, or has dropped it, has no layers.
    """
    unit = _owner_of(group)
    return group if unit is None else unit.operations_of(group)


def free_if_outdated(group: GroupOperations) -> None:
    """Free parameters that were gathered before an optimizer step, because they are out of date."""
    if group.is_outdated:
        if group.state is HIDDEN:  # a graph that reads them raises, as it would without sharding
            group.forbid_reading()
        group.reshard()


def put_around(units: Iterable[Unit], layer: type[Layer], wanted: bool) -> None:
    """Add a layer around the groups of units, or remove it."""
    for unit in units:
        unit.put_around(layer, wanted)
