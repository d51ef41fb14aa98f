"""Rows to the owners of matrices, and updates back: one message per direction and wave of units.

    start      rows of every rank ──> those of my matrices    while matrices are updated
    stacks     received rows ──> matrices of equal shape, in one tensor
    send_back  updates ──> each rank's rows of them
    run        wave i + 1 is sent while wave i is updated

A rank holds the matrices of two waves at a time: the wave that is updated, and the one that is
received. The updates of a wave are sent while the first stack of the next wave is updated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fsdp2.core.facts import Work, exchange_messages
from fsdp2.optim.matrices.blocks import Box, Matrix
from fsdp2.optim.matrices.members import Line, Member


@dataclass(frozen=True, eq=False)
class Item:
    """A matrix of a member, and the position of its owner."""

    member: Member
    number: int
    owner: int

    @property
    def matrix(self) -> Matrix:
        """The matrix in the parameter."""
        return self.member.matrices[self.number]

    def held_by(self, position: int) -> Box:
        """The part that a rank holds, in indices of the parameter."""
        return self.member.spread.boxes[position].meet(self.matrix.box)

    def feeds(self, position: int) -> bool:
        """Whether a rank's rows belong to the owner's replica: others have the same rows."""
        copies = self.member.spread.copies
        return copies[position] == copies[self.owner]


class _Piece(NamedTuple):
    """A part of a message: elements of an item."""

    item: Item
    box: Box


Message = Iterator[tuple[_Piece, torch.Tensor]]
"""A message that is being sent; its end is waited for when the received parts are taken."""


@dataclass(frozen=True)
class Stack:
    """This rank's matrices of one shape in a wave, that are updated by one call."""

    items: Sequence[Item]
    blocks: torch.Tensor

    @property
    def matrices(self) -> torch.Tensor:
        """[items, rows, columns]."""
        return self.items[0].matrix.seen(self.blocks)


def _sent(
    line: Line,
    sent: Sequence[Sequence[_Piece]],
    received: Sequence[Sequence[_Piece]],
    values: Callable[[_Piece], torch.Tensor],
) -> Message:
    """Start to send a message: flat, with one part after the other, by rank."""
    memory = torch.empty(sum(_sizes(sent)), dtype=line.dtype, device=line.device)
    for piece, flat in _parts(sent, memory):
        flat.copy_(values(piece))
    if line.group is None:
        return _parts(received, memory)
    sizes = _sizes(received)
    output = memory.new_empty(sum(sizes))
    work = exchange_messages(output, memory, sizes, _sizes(sent), line.group)
    assert work is not None  # this rank is one of the group
    return _arriving([work], [memory], output, received)


def _arriving(
    work: list[Work],
    memory: list[torch.Tensor],
    output: torch.Tensor,
    received: Sequence[Sequence[_Piece]],
) -> Message:
    """Wait for a message, and free what was sent; then its parts."""
    work.pop().wait()
    memory.clear()
    yield from _parts(received, output)


class Wave:
    """Matrices that are exchanged in one message per direction."""

    def __init__(self, items: Sequence[Item], line: Line, stacked: bool) -> None:
        me = line.position
        self.items = items
        self.line = line
        self.members = list(dict.fromkeys(item.member for item in items))
        self._mine = [item for item in items if item.owner == me]
        self._to_owners = [
            _pieces((item, me) for item in items if item.owner == position and item.feeds(me))
            for position in line.order
        ]
        self._to_me = [
            _pieces((item, position) for item in self._mine if item.feeds(position))
            for position in line.order
        ]
        self._to_ranks = [
            _pieces((item, position) for item in self._mine) for position in line.order
        ]
        self._back_to_me = [
            _pieces((item, me) for item in items if item.owner == position)
            for position in line.order
        ]
        self._stacks = _stacks(self._mine, stacked)
        self.nbytes = sum(item.matrix.box.numel for item in self._mine) * line.dtype.itemsize
        self.all_nbytes = sum(item.matrix.box.numel for item in items) * line.dtype.itemsize

    def start(self, rows: Mapping[Member, torch.Tensor]) -> Message:
        """Send this rank's rows to owners."""
        return _sent(
            self.line,
            self._to_owners,
            self._to_me,
            lambda p: p.box.within(p.item.member.spread.own).of(rows[p.item.member]),
        )

    def stacks(self, message: Message) -> list[Stack]:
        """This rank's matrices, whole."""
        line = self.line
        stacks = [
            Stack(
                items,
                torch.empty(
                    (len(items), *items[0].matrix.box.lengths), dtype=line.dtype, device=line.device
                ),
            )
            for items in self._stacks
        ]
        blocks = _blocks(stacks)
        for piece, values in message:
            piece.box.within(piece.item.matrix.box).of(blocks[piece.item]).copy_(values)
        return stacks

    def send_back(self, updates: Iterable[Stack]) -> Message:
        """Send updates to the ranks that have rows of them."""
        blocks = _blocks(updates)
        return _sent(
            self.line,
            self._to_ranks,
            self._back_to_me,
            lambda p: p.box.within(p.item.matrix.box).of(blocks[p.item]),
        )


# ---- pieces of messages


def _pieces(held: Iterable[tuple[Item, int]]) -> list[_Piece]:
    """The parts of items that ranks hold, without empty ones."""
    found = (_Piece(item, item.held_by(position)) for item, position in held)
    return [piece for piece in found if piece.box.numel]


def _sizes(parts: Sequence[Sequence[_Piece]]) -> list[int]:
    """Elements of each rank's part."""
    return [sum(piece.box.numel for piece in part) for part in parts]


def _parts(
    parts: Sequence[Sequence[_Piece]], flat: torch.Tensor
) -> Iterator[tuple[_Piece, torch.Tensor]]:
    """Each piece with its part of a message."""
    start = 0
    for piece in itertools.chain.from_iterable(parts):
        end = start + piece.box.numel
        yield piece, flat[start:end].view(piece.box.lengths)
        start = end


def _stacks(items: Sequence[Item], stacked: bool) -> list[list[Item]]:
    """Items that are updated by one call."""
    found: dict[object, list[Item]] = {}
    for item in items:
        matrix = item.matrix
        alike = (item.member.group, matrix.shape, matrix.box.lengths, matrix.transposed)
        found.setdefault(alike if stacked else item, []).append(item)
    return list(found.values())


def _blocks(stacks: Iterable[Stack]) -> dict[Item, torch.Tensor]:
    """The block of each item."""
    return {
        item: block
        for stack in stacks
        for item, block in zip(stack.items, stack.blocks, strict=True)
    }
