"""Parameters that are whole on every rank: their gradients are all-reduced together.

    unit    groups ──> ParamGroup   [norm.weight]      nothing is gathered
    unit    groups ──> ParamGroup   [norm.weight]
                           └── gradients stay where autograd left them
    end of backward        Together ──> one flat all-reduce for all of them ──> each ``.grad``

The end of a unit's backward does not reduce the gradients of such a group, or adds them up in the
reduce dtype if no all-reduce follows in this backward (`Scheduler._collect_late`). The end of the
whole backward reduces those of all units that all-reduce now (invariant I10), as one reduction. Its
members follow from the units' flags and from the bound records of the groups, so they are the same
on all ranks (invariant I1).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from fsdp2.core.params.param import ShardedParam
from fsdp2.core.reduce.binding import bind_reduction
from fsdp2.core.reduce.reduction import Job, Reduction
from fsdp2.core.reduce.spec import ReductionSpec, reduction_spec
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.iteration import InFlight
from fsdp2.core.schedule.states import GATHERING
from fsdp2.core.schedule.unit import Unit

Part = tuple[ParamGroup, Reduction]
"""A reduction of a group's own, of which the members are reduced together with others."""


class Family:
    """Whole parameters below a root that are all-reduced in one flat tensor, by the ``leader``."""

    def __init__(self, parts: Sequence[Part], spec: ReductionSpec) -> None:
        self.parts = parts
        self.leader = leader = parts[0][0]
        self.params: list[ShardedParam] = [m for _, part in parts for m in part.members]
        slots = [slot for _, part in parts for slot in part.context.slots]
        with torch.inference_mode(False):  # tensors that a later backward writes to
            self.joint = bind_reduction(
                leader.gradients_of(self.params),
                slots,
                0,
                spec,
                leader.collectives,
                leader.replicas,
                leader.kernels,
            )

    def job(self, taken: dict[Reduction, Job]) -> Job:
        """One job of what the groups had; zeros for a group that had nothing."""
        jobs = [taken.get(part) or part.absent() for _, part in self.parts]
        joined = Job(
            [g for job in jobs for g in job.grads], [p for job in jobs for p in job.present]
        )
        joined.seeks = False in joined.present
        return joined


class Together:
    """The whole parameters below a root."""

    def __init__(self, members: Sequence[tuple[Unit, ParamGroup]]) -> None:
        self._members = members
        self._bound: list[Part] = []  # what the families are bound to
        self._families: list[Family] = []

    def reduce(self, in_flight: InFlight) -> None:
        """All-reduce the gradients that are there, of the units that do so now. Ranks that have
        none take no part, as in the reduction of a unit; others do, with all families.
        """
        due = [group for unit, group in self._members if unit.sync and unit.all_reduce]
        taken: dict[Reduction, Job] = {}
        axes: set[Hashable] = set()
        for group in due:
            # Absent gradients count as zeros once per backward (I10).
            fill, group.fills = group.fills, False
            jobs = group.collect(True, fill)
            if jobs:
                taken.update(jobs)
                axes.add(_axis(group))
        if not taken:
            return
        units = {group: unit for unit, group in self._members}
        for group in due:
            if group.state is GATHERING and group.has_grad_hooks:
                group.reshard(forced=True)  # what is gathered ahead, and a hook writes
        for family in self._bind(due):
            # Also a family of which this rank has nothing: others of these ranks may, in another
            # dtype.
            if _axis(family.leader) in axes:
                if in_flight.holding:
                    in_flight.make_room(family.params, True)
                # Through the observers of one group, which thus see one reduction.
                operations = units[family.leader].operations_of(family.leader)
                pending = operations.reduce([(family.joint, family.job(taken))], True)
                if pending is not None:
                    # In place of the leader's, so that hooks of all groups count.
                    pending.params = family.params
                    in_flight.holding.append(pending)

    def abandon(self) -> None:
        """Let go of what an exception left half way."""
        for family in self._families:
            family.joint.abandon()

    def _bind(self, due: Sequence[ParamGroup]) -> list[Family]:
        """The families, rebuilt if a group was bound again, or if other groups are due."""
        parts = [(group, part) for group in due for part in group.bound.reductions]
        if parts != self._bound:
            families: dict[Hashable, tuple[ReductionSpec, list[Part]]] = {}
            for group, part in parts:
                member = part.members[0]
                spec = reduction_spec(group.options, member, group.offload, group.device)
                families.setdefault((_axis(group), spec), (spec, []))[1].append((group, part))
            self._families = [Family(found, spec) for spec, found in families.values()]
            self._bound = parts
        return self._families


def _axis(group: ParamGroup) -> Hashable:
    """The ranks that a group's gradients are summed over, and where."""
    return group.device, None if group.replicas is None else group.replicas.group


def together(units: Sequence[Unit]) -> Together | None:
    """The whole parameters of these units; ``None`` where there are none."""
    members = [(unit, group) for unit in units for group in unit.own_groups if group.is_whole]
    return Together(members) if members else None
