"""Memory that forwards leave gathered, and whether later ones use it again: contents decide.

    forward that autograd records   unsharded parameters are registered until backward has freed
                                    them: a write to them raises, because it would be lost
    forward without gradients       sharded parameters are registered when it returns; what is
                                    gathered is retained
    backward                        the same, with `set_reshard_after_backward(False)`
    kept rows                       stay where they are (`fsdp2.core.gather.segments`)
    unshard() by the user           unsharded parameters are registered until reshard()

When a root's next forward begins, the shards from which these were gathered may have been written.
Version counters do not show all writes (decision 25). A fingerprint of the shards does, taken at
each such gather, and again now. Ranks then tell each other which groups differ, with one small
collective per process group, so that all of them gather a group again, or none does (I1).

    no fingerprint was taken     gather again, without a question; also, without gradients, what is
                                 sent as differences: another message makes it more exact
    a backward's optimizer step  the same: the shards have certainly changed
    otherwise                    one question for all groups of the root

Forwards without gradients take fingerprints, and gathers of kept rows. Forwards that autograd
records do once any forward has found what a backward left, before the optimizer's step. Training
steps that use nothing again neither take one nor ask.

Units that the user has unsharded stay so until an optimizer steps or the user reshards them. No
forward asks between backwards that belong together (`set_is_last_backward(False)`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from fsdp2.core.device.collectives import Collectives, largest_over
from fsdp2.core.progress import Counts, naming_unit
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.states import GATHERING, RESHARDED, RETAINED, UNSHARDED
from fsdp2.core.schedule.unit import IDLE, Unit


class Reuse:
    """The units below one root that may be left gathered, in order, and the groups that keep rows.

    Attributes:
        units: those that the end of their forward, or of their backward, has left unsharded.
        flags: `Counts.flag_changes` when an iteration began last.
        steps: `Counts.steps` when a forward began last.
        asks: whether fingerprints are taken now.
        hides: whether units may be hidden for others than graphs.
        repeats: whether a forward has found what a backward left, before the optimizer's step.
    """

    def __init__(self) -> None:
        self.flags = Counts.flag_changes
        self.steps = -1
        # A dict, not a set: ranks ask about groups in this order (I1).
        self.units: dict[Unit, None] = {}
        self.rows: list[ParamGroup] = []
        self.asks = self.hides = self.repeats = False

    def begin_forward(self, units: Sequence[Unit], records: bool) -> None:
        """A root's forward begins: free what was gathered from other shards than there are now."""
        held = self._held()
        self.repeats = self.repeats or any(self._is_repeated(*each) for each in held.items())
        asked = {
            group: unit
            for group, unit in held.items()
            if group.is_known and (records or not group.options.wire.differences)
        }
        # A set is no order, so what follows goes through `held` instead (I1).
        lost = {*held}.difference(asked).union(_changed(asked))
        for group, unit in held.items():
            if group in lost:
                for operations in () if unit is None else unit.groups:
                    if operations.base is group:
                        # First: it raises if the user has written what is freed here.
                        operations.take_back(stays=False)
                        operations.reshard()
                group.forget_rows()
            else:
                group.grant()
        self._watch(units, records)

    @staticmethod
    def _is_repeated(group: ParamGroup, unit: Unit | None) -> bool:
        """Whether a forward with a backward has left it gathered, and no optimizer has stepped."""
        last = group.last_gather
        if group.gathered_at != Counts.steps:
            return False
        if last.fingerprint is not None:
            return last.recorded
        if unit is None or group.is_retained:
            return group.is_retained
        return unit.reshard_after_forward is not None or not unit.reshard_after_backward

    def _held(self) -> dict[ParamGroup, Unit | None]:
        """The groups that something was gathered for, except by the user; ``None``: only rows."""
        held: dict[ParamGroup, Unit | None] = {}
        for unit in self.units:
            if unit.claimed or unit.phase is not IDLE:
                continue
            for operations in unit.groups:
                group = operations.base
                if group.state is UNSHARDED:
                    group.take_back()
                    held.setdefault(group, unit)
                elif group.is_retained or group.last_gather.dropped:
                    held.setdefault(group, unit)
        for group in self.rows:
            # Dropped on one rank: it must be asked about on all, or ranks would run other
            # collectives.
            rows = group.has_rows or group.last_gather.dropped
            if rows and group.state not in (GATHERING, RESHARDED):
                held.setdefault(group, None)
        return held

    def _watch(self, units: Iterable[Unit], records: bool) -> None:
        """Let gathers of this forward take fingerprints, if the next one may ask."""
        # Training that uses nothing again pays for no fingerprint.
        wanted = self.repeats or not records
        if not (wanted or self.asks or self.rows):
            return
        self.asks = wanted
        for unit in units:
            stays = wanted and not (unit.frees_after_forward and unit.reshard_after_backward)
            for group in unit.own_groups:
                group.watch(stays or group.keeps_rows, records)

    def end_forward(self, held: bool) -> None:
        """A forward without gradients ends: register sharded parameters.

        Memory that a backward without its own all-gather or a caller, or, with ``held``, a graph
        can still read is kept in any case.
        """
        for unit in tuple(self.units):
            reads = bool(unit.visits) and not unit.unshard_in_backward
            if unit.claimed:
                continue
            if held or reads:
                unit.hide()
                self.hides = True
            else:
                unit.hide(RETAINED)
        self._forget_freed()

    def end_iteration(self) -> None:
        """Its last backward is over: what is gathered now is retained, or the user's."""
        self._forget_freed()
        self.hides = False

    def _forget_freed(self) -> None:
        for unit in tuple(self.units):
            bases = [group.base for group in unit.groups]
            if not (unit.is_gathered or any(b.is_retained or b.last_gather.dropped for b in bases)):
                del self.units[unit]
                unit.claimed = False

    def forget(self) -> None:
        for unit in self.units:
            for operations in unit.groups:
                operations.base.forget_rows()
        for group in self.rows:
            group.forget_rows()

    def succeed(self, former: Reuse) -> None:
        """Take over from a root that is part of a larger model now."""
        self.units.update(former.units)
        self.asks = self.asks or former.asks
        self.hides = self.hides or former.hides


def _changed(asked: Mapping[ParamGroup, Unit | None]) -> list[ParamGroup]:
    """The groups whose shards differ, on any rank, from those that were gathered."""
    groups = list(asked)
    differ = _compared(groups)
    axes: dict[object, tuple[Collectives, list[int]]] = {}
    for place, group in enumerate(groups):
        for axis in group.axes_of(rows=asked[group] is None):
            # One collective per process group, however many parameter groups ask.
            axes.setdefault(axis.group, (axis, []))[1].append(place)
    for axis, places in axes.values():
        with naming_unit("all-reduce", groups[places[0]].name):
            # An answer of one axis becomes part of the question to the next one.
            agreed = largest_over([axis], [differ[place] for place in places])
        for place, number in zip(places, agreed, strict=True):
            differ[place] = number
    return [group for group, number in zip(groups, differ, strict=True) if number]


def _compared(groups: Sequence[ParamGroup]) -> list[int]:
    """1 for each group whose shards differ on this rank, otherwise 0."""
    # A group without both fingerprints counts as changed.
    differ = [1] * len(groups)
    by_device: dict[object, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
    for place, group in enumerate(groups):
        before = group.last_gather.fingerprint
        now = group.fingerprint()
        if now is not None and before is not None:
            by_device.setdefault(group.shard.device, {})[place] = now, before
    for pairs in by_device.values():
        kernels = groups[min(pairs)].kernels
        # All of a device at once: each answer makes the host wait.
        found = kernels.differ(*zip(*pairs.values(), strict=True))
        for place, number in zip(pairs, found, strict=True):
            differ[place] = number
    return differ
