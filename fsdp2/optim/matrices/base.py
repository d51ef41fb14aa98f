"""A step of Muon, wave by wave: rows to owners, updates of whole matrices there, rows back.

State consists of DTensors that are sharded like the parameter.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from fsdp2.core.layout.mesh import local_of
from fsdp2.optim.matrices.exchange import Item, Message, Stack, Wave
from fsdp2.optim.matrices.members import Member
from fsdp2.optim.runs import ParamState, wrapped

if TYPE_CHECKING:
    from fsdp2.optim.matrices.muon import Muon

RowUpdate = tuple[torch.Tensor, torch.Tensor, tuple[int, int]]
"""A view of rows, their updates, and the shape of the whole matrix."""


class Step:
    """One step of an optimizer, for `run`."""

    def __init__(self, optimizer: Muon, gradients: Mapping[Member, torch.Tensor | None]) -> None:
        self._optimizer = optimizer
        self._gradients = gradients

    def rows_to_send(self, members: Sequence[Member]) -> dict[Member, torch.Tensor]:
        """The momentum of rows, group by group."""
        optimizer = self._optimizer
        found: dict[Member, torch.Tensor] = {}
        by_group: defaultdict[int, list[Member]] = defaultdict(list)
        for member in members:
            by_group[member.group].append(member)
        for place, own in by_group.items():
            grads = [self._gradient(member) for member in own]
            states = [_row_state(optimizer.state[member.param]) for member in own]
            rows = optimizer.momentum_of(grads, states, optimizer.param_groups[place])
            found.update(zip(own, rows, strict=True))
            for member, state in zip(own, states, strict=True):
                kept = optimizer.state[member.param]
                for key, value in state.items():
                    if key not in kept or local_of(kept[key]) is not value:
                        kept[key] = wrapped(value, member.param)
        return found

    def update(self, stack: Stack) -> torch.Tensor:
        """The updates of matrices of one shape."""
        group = self._optimizer.param_groups[stack.items[0].member.group]
        return self._optimizer.orthogonalized(stack.matrices, group)

    def write(self, members: Sequence[Member], updates: dict[Item, torch.Tensor]) -> None:
        """Step the rows of each parameter."""
        optimizer = self._optimizer
        of_member: defaultdict[Member, list[RowUpdate]] = defaultdict(list)
        for item, values in updates.items():
            own = item.member.spread.own
            held = item.held_by(item.member.spread.position).within(own)
            view = held.of(item.member.rows)
            of_member[item.member].append((view, values, item.matrix.shape))
        for member in members:
            if member in of_member:
                group = optimizer.param_groups[member.group]
                optimizer.write_rows(member.rows, of_member[member], group)
        torch.autograd.graph.increment_version(
            [member.param for member in members if isinstance(member.param, DTensor)]
        )

    def _gradient(self, member: Member) -> torch.Tensor:
        grad = self._gradients[member]
        if grad is not None:
            return grad
        dtype = getattr(member.param, "grad_dtype", None) or member.param.dtype
        return torch.zeros_like(member.rows, dtype=dtype)


def _row_state(state: ParamState) -> ParamState:
    """The state of rows: the momentum."""
    return {key: local_of(value) for key, value in state.items()}


# ---- wave by wave

_Outgoing = tuple[Wave, Message]


def run(waves: Sequence[Wave], step: Step) -> None:
    """Update all matrices; all ranks start messages in the same order."""
    unit = max((wave.all_nbytes for wave in waves), default=0)
    incoming = waves[0].start(step.rows_to_send(waves[0].members)) if waves else None
    outgoing: _Outgoing | None = None
    for index, wave in enumerate(waves):
        if outgoing is not None and 2 * wave.nbytes + outgoing[0].nbytes > 2 * unit:
            outgoing = _finished(outgoing, step)  # memory for two waves only
        assert incoming is not None
        stacks = deque(wave.stacks(incoming))
        first = 1 if len(stacks) > 1 else 0
        updates = _updates(stacks, first, step)
        outgoing = _finished(outgoing, step)
        incoming = None
        if index + 1 < len(waves):
            following = waves[index + 1]
            incoming = following.start(step.rows_to_send(following.members))
        updates += _updates(stacks, len(stacks), step)
        outgoing = wave, wave.send_back(updates)
        del updates
    _finished(outgoing, step)


def _finished(outgoing: _Outgoing | None, step: Step) -> _Outgoing | None:
    """Finish the message; ``None`` is typed like the caller's variable."""
    if outgoing is not None:
        wave, message = outgoing
        step.write(wave.members, wave.received(message))
    return None


def _updates(stacks: deque[Stack], count: int, step: Step) -> list[Stack]:
    """Update the next stacks, and keep only the updates."""
    found = []
    for _ in range(count):
        stack = stacks.popleft()
        update = step.update(stack)
        found.append(Stack(stack.items, stack.items[0].matrix.unseen(update)))
    return found
