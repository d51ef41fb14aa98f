"""The record of a step: operations on lanes, events between lanes, memory that comes and goes.

    Notes.note ──> [Operation | Allocation | Free | Signal | Await, …] in the order of the host

Streams tell of events and lanes, kernels of copies and memory, collectives of themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
"""Kinds of operations: the user's, the engine's copies, and what takes only the host's time."""


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
    """Something that takes time on a device or on the host."""

    lane: Place
    name: str  # of the operator or collective; "" on a virtual device
    kind: str  # one of the kinds; on a virtual device the kernel's name
    unit: str = ""
    phase: str = ""  # "forward", "backward" or "optimizer"
    flops: int = 0  # a multiplication and an addition count 2
    nbytes: int = 0  # read and written; for a collective those of the whole tensors
    dtype: torch.dtype = torch.float32
    group: int = -1  # index in `Recording.groups` of a collective's ranks
    tensors: int = 1  # per launch, of a collective or of an operator on lists
    reads: tuple[Allocation, ...] = ()
    writes: tuple[Allocation, ...] = ()

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

    @property
    def kind(self) -> str:
        return "synchronize" if self.lane is HOST else "wait"


Note = Operation | Allocation | Free | Signal | Await


def operations(notes: Iterable[Note]) -> list[Operation]:
    """The operations among them."""
    return [note for note in notes if isinstance(note, Operation)]


@contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    """Let attributes of a module, a class or an object be others inside."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


class Notes:
    """The notes of a step so far: the lanes of a device that runs nothing."""

    asynchronous = True
    captures: Callable[[], bool] | None = None

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.lane: Place = Lane.COMPUTE
        self._events = 0
        self._last = 0  # number of a storage

    def note(self, note: Note) -> None:
        """Add to the record."""
        self.notes.append(note)

    def number(self) -> int:
        """The number of new memory."""
        self._last += 1
        return self._last

    # ---- as `fsdp2.core.device.streams.Streams`

    def on(self, lane: Place) -> AbstractContextManager[None]:
        """Calls in this context run on ``lane``."""
        return replaced(self, lane=lane)

    def make_event(self) -> None:
        """Each record is an event of its own."""

    def record(self, lane: Place, label: str, event: object = None) -> int | None:
        """Note an event; returns its number."""
        self._events += 1
        self.note(Signal(lane, self._events, label))
        return self._events

    def wait(self, lane: Place, event: int | None, label: str) -> None:
        """Note that a lane waits for an event."""
        if event is not None:
            self.note(Await(lane, event, label))

    def synchronize(self, event: int | None, label: str) -> None:
        """Note that the host waits."""
        self.wait(HOST, event, label)
