"""The record of a step: operations on lanes, events between lanes, memory that comes and goes.

    Notes.note ──> [Operation | Allocation | Free | Signal | Await, …] in the order of the host

Streams tell of events and lanes, kernels of copies and memory, collectives of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

import torch

from fsdp2.core.facts import Lane


class Beside(IntEnum):
    """Clocks besides the lanes': the host, and a stream of the user's."""

    HOST = len(Lane)
    USER = len(Lane) + 1


Place = Lane | Beside
PLACES: tuple[Place, ...] = (*Lane, *Beside)
HOST, USER = Beside.HOST, Beside.USER

COMPUTE, COPY, COLLECTIVE, VIEW = "compute", "copy", "collective", "view"
"""Kinds of operations."""


class Allocation(NamedTuple):
    """An allocation of memory."""

    number: int
    nbytes: int = 0
    lane: Place = Lane.COMPUTE
    name: str = ""

    @property
    def host(self) -> bool:
        """Whether it is in CPU memory next to a device's."""
        return self.lane is HOST

    @property
    def kind(self) -> str:
        return "alloc"


class Free(NamedTuple):
    """Memory that went."""

    number: int
    lane: Place = Lane.COMPUTE
    name: str = ""

    @property
    def kind(self) -> str:
        return "free"


class Operation(NamedTuple):
    """Something that takes time on a device or on the host.

    Attributes:
        lane: where it runs; `HOST` for operations on the host's own memory.
        name: name of the operator or collective; "" on a virtual device.
        kind: `COMPUTE` for the user's model; `VIEW`, which takes only the host's time; `COPY` for
            the engine's copies; `COLLECTIVE`. On a virtual device the kernel's name.
        unit: the unit that it is for; "" for none.
        phase: "forward", "backward" or "optimizer"; "" if it is unknown.
        flops: arithmetic operations; a multiplication and an addition count 2.
        nbytes: bytes read and written; for a collective the bytes of the whole tensors.
        dtype: dtype that it computes or sends.
        group: index in `Recording.groups` of a collective's ranks, otherwise -1.
        tensors: tensors per launch, of a collective or of an operator on lists.
        reads: the memory it reads, if that is recorded.
        writes: the memory it writes, if that is recorded.
        iteration: number of the step, from 0.
    """

    lane: Place
    name: str
    kind: str
    unit: str = ""
    phase: str = ""
    flops: int = 0
    nbytes: int = 0
    dtype: torch.dtype = torch.float32
    group: int = -1
    tensors: int = 1
    reads: tuple[Allocation, ...] = ()
    writes: tuple[Allocation, ...] = ()
    iteration: int = 0

    def __str__(self) -> str:
        moved = [", ".join(each.name for each in some) or "-" for some in (self.reads, self.writes)]
        about = " -> ".join(moved) if self.reads or self.writes else ""
        return f"{self.lane.name.lower():<11}{self.name or self.kind} {about}".rstrip()


class Signal(NamedTuple):
    """An event was recorded on a lane: it stands for what the lane has run by then."""

    lane: Place
    event: int
    label: str

    @property
    def kind(self) -> str:
        return "record"


class Await(NamedTuple):
    """A lane waits for an event, or the host does."""

    lane: Place
    event: int
    label: str
    iteration: int = 0

    @property
    def kind(self) -> str:
        return "synchronize" if self.lane is HOST else "wait"


Note = Operation | Allocation | Free | Signal | Await


def operations(notes: Iterable[Note]) -> list[Operation]:
    """The operations among them."""
    return [note for note in notes if isinstance(note, Operation)]


class Notes:
    """The notes of a step so far, and where the host is in it."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.lane: Place = Lane.COMPUTE
        self._events = 0
        self._last = 0  # number of a storage

    @contextmanager
    def on(self, lane: Place) -> Iterator[None]:
        """Calls in this context run on ``lane``."""
        outer, self.lane = self.lane, lane
        try:
            yield
        finally:
            self.lane = outer

    def note(self, note: Note) -> None:
        """Add to the record."""
        self.notes.append(note)

    def signal(self, lane: Place, label: str) -> int:
        """An event is recorded; returns its number."""
        self._events += 1
        self.note(Signal(lane, self._events, label))
        return self._events

    def number(self) -> int:
        """The number of new memory."""
        self._last += 1
        return self._last
