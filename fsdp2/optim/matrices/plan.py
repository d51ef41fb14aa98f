"""Members, owners and messages of a step: decided by facts that all ranks share, and kept.

present    members for which some rank has a gradient: ranks agree by a few numbers per line
waves      the messages of these members: created once for each such set
owners     assigned at a matrix's first gradient, so that frozen matrices do not count
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fsdp2.core.facts import device_of, gather_numbers, local_of, units_by_param
from fsdp2.optim.matrices.blocks import Split, matrices_of, plain_spread, spread_of
from fsdp2.optim.matrices.exchange import Item, Wave
from fsdp2.optim.matrices.members import Line, Member, line_of
from fsdp2.optim.matrices.owners import MatrixOwners, Tally, Weight, assign, join_units

KEPT = 16
"""Sets of members with gradients whose waves are kept: experts without tokens cause many."""

WORD = 62
"""Members per number: one bit each."""

Weigh = Callable[[Item], Weight]

Placed = Sequence[tuple[int, torch.Tensor]]
"""Parameters with matrices, each with the place of its group."""


class StepPlan:
    """Owners and messages for the parameters of an optimizer; may create process groups."""

    def __init__(
        self,
        params: Placed,
        names: Mapping[int, str],
        split: Split | None,
        travels_as: Callable[[torch.dtype], torch.dtype],
    ) -> None:
        self._facts = _facts_of(params)
        self._items: dict[Member, list[Item]] = {}
        self._known: dict[tuple[bool, ...], list[Wave]] = {}
        self._last: list[Wave] = []
        lines: dict[object, Line] = {}
        units = units_by_param()
        self.members: list[Member] = []
        for group, param in params:
            name = names.get(id(param), "")
            if isinstance(param, DTensor):
                spread = spread_of(name, param._spec, local_of(param).shape)
                device, mesh = device_of(param.device_mesh), param.device_mesh
            else:
                spread, device, mesh = plain_spread(param.shape), param.device, None
            dtype = travels_as(getattr(param, "grad_dtype", None) or param.dtype)
            key = (spread.ranks, dtype, device)
            if key not in lines:
                lines[key] = line_of(spread, mesh, dtype, device)
            unit = units.get(cast(nn.Parameter, param))
            matrices = matrices_of(name, param.shape, split)
            self.members.append(Member(param, name, group, unit, matrices, spread, lines[key]))
        self._loads = {line: Tally.of(len(line.order)) for line in lines.values()}

    def fits(self, params: Placed) -> bool:
        """Whether the parameters and their distributions are the same."""
        found = _facts_of(params)
        return len(found) == len(self._facts) and all(
            known is param and facts == own
            for (known, facts), (param, own) in zip(self._facts, found, strict=True)
        )

    def present(self, gradients: Sequence[torch.Tensor | None]) -> tuple[bool, ...]:
        """Whether any rank of each member's line has a gradient; the same on all of them."""
        found = [gradient is not None for gradient in gradients]
        asked: set[tuple[int, ...]] = set()
        for line in self._loads:
            if line.group is None or line.ranks in asked:
                continue
            asked.add(line.ranks)  # lines of several dtypes are one here
            mine = [i for i, m in enumerate(self.members) if m.line.ranks == line.ranks]
            answers = gather_numbers(line.group, _words([found[i] for i in mine]), line.device)
            for at, index in enumerate(mine):
                found[index] = any(words[at // WORD] >> at % WORD & 1 for words in answers)
        return tuple(found)

    def waves(self, present: tuple[bool, ...], weigh: Weigh, batched: bool) -> list[Wave]:
        """The waves if these members have gradients; matrices without owners get them now."""
        if present not in self._known:
            if len(self._known) >= KEPT:
                del self._known[next(iter(self._known))]
            found = [m for m, is_there in zip(self.members, present, strict=True) if is_there]
            self._known[present] = list(self._made(found, weigh, batched))
        self._last = self._known[present]
        return self._last

    def _made(self, members: Sequence[Member], weigh: Weigh, batched: bool) -> Iterator[Wave]:
        for line, load in self._loads.items():
            units = list(_units(m for m in members if m.line is line))
            weights = [[weigh(Item(*key, 0)) for key in _matrices(unit)] for unit in units]
            for run in join_units(weights, len(line.order)):
                joined = [member for index in run for member in units[index]]
                keys = list(_matrices(m for m in joined if m not in self._items))
                owners = assign([weigh(Item(*key, 0)) for key in keys], load)
                for key, owner in zip(keys, owners, strict=True):
                    self._items.setdefault(key[0], []).append(Item(*key, owner))
                yield Wave([i for m in joined for i in self._items[m]], line, batched)

    def owners(self) -> list[MatrixOwners]:
        """The owners of matrices, for each mesh."""
        lines = [wave.line for wave in self._last]
        return [
            MatrixOwners(
                line.ranks,
                tuple(load.flops),
                tuple(load.nbytes),
                tuple(load.matrices),
                lines.count(line),
            )
            for line, load in self._loads.items()
        ]


def _facts_of(params: Placed) -> list[tuple[torch.Tensor, tuple[int, DTensorSpec | None]]]:
    """Parameters, and the group and distribution of each."""
    return [(p, (at, p._spec if isinstance(p, DTensor) else None)) for at, p in params]


def _words(bits: Sequence[bool]) -> list[int]:
    return [
        sum(bit << at for at, bit in enumerate(bits[start : start + WORD]))
        for start in range(0, len(bits), WORD)
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
