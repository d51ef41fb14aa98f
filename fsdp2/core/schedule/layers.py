"""The operations of a group that the scheduler calls, and layers that wrap it on request.

    nothing is asked    unit.groups ──> ParamGroup
    a profiler runs     unit.groups ──> ProfiledGroup ──> ParamGroup
    checks are on too   unit.groups ──> ProfiledGroup ──> CheckedGroup ──> ParamGroup

A unit's list of groups is the single point of interception (decision 27). It holds the outermost
object of each group, and the scheduler calls groups only through this list. A layer therefore sees
every operation of the scheduler, the scheduler calls a group without layers directly, and no step
checks whether there are any. Layers do not know each other.

No layer sees the calls that a `ParamGroup` makes to itself: for example, its `abandon` also frees
it. A layer therefore overrides each operation to which it adds something. Names, options and
layouts are not operations: callers read them from `GroupOperations.base`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from fsdp2.core.config import GroupOptions
from fsdp2.core.params.param import PlannedParam, ShardedParam
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import PendingReduction, Reduction
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.states import HIDDEN, GroupState


class Watchers:
    """Notifications for rooms above core; each adds itself when it is imported.

    Attributes:
        plans: called before anything is changed, with the name of a unit's modules, the plans of
            their parameters, and the options of its groups. They may raise.
        groups: called with a unit's new groups; they return them with their layers.
    """

    plans: ClassVar[list[Callable[[str, list[PlannedParam], GroupOptions], None]]] = []
    groups: ClassVar[list[Callable[[Sequence[GroupOperations]], Sequence[GroupOperations]]]] = []


class Layer:
    """A layer around a group: it passes everything on to what is below it.

    It has the operations that the scheduler calls; `ParamGroup` says what each one does.

    Args:
        below: the group, or the next layer around it.

    Attributes:
        base: the group itself.
        below: what it passes operations on to.
        height: where it is among other layers; the highest is called first.
    """

    __slots__ = ("base", "below")

    base: ParamGroup
    height: ClassVar[int]

    def __init__(self, below: GroupOperations) -> None:
        self.base = below.base
        self.below = below

    @property
    def params(self) -> list[ShardedParam]:
        """As below."""
        return self.below.params

    # ---- where it is

    @property
    def state(self) -> GroupState:
        """As below."""
        return self.base.state

    @property
    def stale(self) -> int:
        """As below."""
        return self.base.stale

    @property
    def is_outdated(self) -> bool:
        """As below."""
        return self.below.is_outdated

    @property
    def is_whole(self) -> bool:
        """As below."""
        return self.base.is_whole

    @property
    def is_over(self) -> bool:
        """As below."""
        return self.below.is_over

    @property
    def is_referred_to(self) -> bool:
        """As below."""
        return self.below.is_referred_to

    @property
    def accumulates(self) -> bool:
        """As below."""
        return self.below.accumulates

    @property
    def written(self) -> str | None:
        """As below."""
        return self.below.written

    # ---- gather and free

    def bind(self) -> None:
        """As below."""
        self.below.bind()

    def start_unshard(self) -> None:
        """As below."""
        self.below.start_unshard()

    def finish_unshard(self) -> None:
        """As below."""
        self.below.finish_unshard()

    def refresh_requires_grad(self) -> None:
        """As below."""
        self.below.refresh_requires_grad()

    def shard_smaller(self) -> None:
        """As below."""
        self.below.shard_smaller()

    def reshard(self) -> None:
        """As below."""
        self.below.reshard()

    def hide(self, to: GroupState = HIDDEN) -> None:
        """As below."""
        self.below.hide(to)

    def show(self) -> None:
        """As below."""
        self.below.show()

    def take_back(self, stays: bool = True) -> None:
        """As below."""
        self.below.take_back(stays)

    def forbid_reading(self) -> None:
        """As below."""
        self.below.forbid_reading()

    def abandon(self) -> None:
        """As below."""
        self.below.abandon()

    def settle(self) -> None:
        """As below."""
        self.below.settle()

    # ---- gradients

    def accumulate(self) -> None:
        """As below."""
        self.below.accumulate()

    def collect(
        self, all_reduce: bool, fill: bool, again: bool = False
    ) -> list[tuple[Reduction, Job]]:
        """As below."""
        return self.below.collect(all_reduce, fill, again)

    def reduce(
        self, jobs: list[tuple[Reduction, Job]], all_reduce: bool
    ) -> PendingReduction | None:
        """As below."""
        return self.below.reduce(jobs, all_reduce)

    def discard_gradients(self) -> None:
        """As below."""
        self.below.discard_gradients()


GroupOperations = ParamGroup | Layer
"""A group as the scheduler calls it: the group itself, or the outermost layer around it."""


def layers_of(group: GroupOperations) -> list[Layer]:
    """The layers around a group, the outermost first."""
    found = []
    while isinstance(group, Layer):
        found.append(group)
        group = group.below
    return found


def with_layer(
    group: GroupOperations, layer: Callable[[GroupOperations], Layer], height: int
) -> GroupOperations:
    """Put a layer around a group, above lower layers; returns the outermost.

    Args:
        group: the group, or the outermost layer around it.
        layer: makes the layer around the object below it.
        height: the layer's.
    """
    if isinstance(group, Layer) and group.height > height:
        group.below = with_layer(group.below, layer, height)
        return group
    return layer(group)


def without_layer(group: GroupOperations, kind: type[Layer]) -> GroupOperations:
    """Take a layer of a kind off a group; returns the outermost that is left."""
    if not isinstance(group, Layer):
        return group
    if type(group) is kind:
        return group.below
    group.below = without_layer(group.below, kind)
    return group


def layered(
    groups: Sequence[GroupOperations], kind: type[Layer], wanted: bool
) -> list[GroupOperations]:
    """Put a layer of a kind around groups, or take it off; returns the outermost of each."""
    found = []
    for group in groups:
        if any(type(layer) is kind for layer in layers_of(group)) is not wanted:
            group = with_layer(group, kind, kind.height) if wanted else without_layer(group, kind)
        found.append(group)
    return found


def watched(groups: Sequence[GroupOperations]) -> Sequence[GroupOperations]:
    """New groups with the layers that `Watchers` want around them now."""
    for watch in Watchers.groups:
        groups = watch(groups)
    return groups
