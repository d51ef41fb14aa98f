"""Owners and messages: decided by facts that all ranks share, and kept.

waves      the members that have gradients: created once for each such set of members
owners     assigned at a matrix's first gradient, so that frozen matrices do not count
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fsdp2.optim.matrices.exchange import Item, Wave
from fsdp2.optim.matrices.members import Line, MatrixMembers, Member, first_group
from fsdp2.optim.matrices.owners import MatrixOwners, Tally, Weight, assign, join_units
from fsdp2.optim.runs import ParamGroupOptions

KEPT = 16
"""Sets of members with gradients whose waves are kept: experts without tokens cause many."""

Weigh = Callable[[Item], Weight]

Specs = list[tuple[torch.Tensor, DTensorSpec | None]]
"""Parameters, and the distribution of each."""


def specs_of(groups: Iterable[ParamGroupOptions]) -> Specs:
    """The facts on which a plan depends: if one changes, fsdp2 creates another plan."""
    return [
        (param, param._spec if isinstance(param, DTensor) else None)
        for group in groups
        for param in first_group(group)
    ]


@dataclass(eq=False)
class StepPlan:
    """Owners and messages."""

    members: MatrixMembers
    specs: Specs
    _items: dict[Member, list[Item]] = field(default_factory=dict)
    _loads: dict[Line, Tally] = field(default_factory=dict)
    _known: dict[tuple[bool, ...], list[Wave]] = field(default_factory=dict)
    _last: list[Wave] = field(default_factory=list)

    def fits(self, groups: Iterable[ParamGroupOptions]) -> bool:
        """Whether the facts on which it depends are the same."""
        found = specs_of(groups)
        if len(found) != len(self.specs):
            return False
        return all(
            a is c and (b is d or b == d) for (a, b), (c, d) in zip(self.specs, found, strict=True)
        )

    def waves(
        self,
        present: tuple[bool, ...],
        weigh: Weigh,
        batched: bool,
    ) -> list[Wave]:
        """The waves if these members have gradients; matrices without owners get them now."""
        if present not in self._known:
            if len(self._known) >= KEPT:
                del self._known[next(iter(self._known))]
            found = [
                m for m, is_there in zip(self.members.listed, present, strict=True) if is_there
            ]
            self._known[present] = self._made(found, weigh, batched)
        self._last = self._known[present]
        return self._last

    def _made(self, members: Sequence[Member], weigh: Weigh, batched: bool) -> list[Wave]:
        waves: list[Wave] = []
        for line in self.members.lines:
            ranks = len(line.order)
            load = self._loads.setdefault(line, Tally.of(ranks))
            units = list(_units(m for m in members if m.line is line))
            weights = [[weigh(Item(*key, 0)) for key in _matrices(unit)] for unit in units]
            for run in join_units(weights, ranks):
                joined = [member for index in run for member in units[index]]
                fresh = [m for m in joined if m not in self._items]
                if fresh:
                    keys = list(_matrices(fresh))
                    owners = assign([weigh(Item(*key, 0)) for key in keys], load)
                    for key, owner in zip(keys, owners, strict=True):
                        self._items.setdefault(key[0], []).append(Item(*key, owner))
                waves.append(Wave([i for m in joined for i in self._items[m]], line, batched))
        return waves

    def owners(self) -> list[MatrixOwners]:
        """The owners of matrices, for each mesh."""
        waves = [wave.line for wave in self._last]
        return [
            MatrixOwners(
                line.ranks,
                tuple(load.flops),
                tuple(load.nbytes),
                tuple(load.matrices),
                waves.count(line),
            )
            for line, load in self._loads.items()
        ]


def _units(members: Iterable[Member]) -> Iterator[list[Member]]:
    """Runs of members of one unit; a member without a unit is a run by itself."""
    run: list[Member] = []
    for member in members:
        if run and (member.unit is None or member.unit != run[-1].unit):
            yield run
            run = []
        run.append(member)
    if run:
        yield run


def _matrices(members: Iterable[Member]) -> Iterator[tuple[Member, int]]:
    return ((member, n) for member in members for n in range(len(member.matrices)))
