"""When each operation of a recorded step runs, and what waits meanwhile.

    notes ── replay(cost) ────> Replay(spans, stalls, times)
          ── measured(times) ──> the same, with the measured times of a real step

A lane runs its operations in the order of the host's calls, each one after its launch. A wait stops
a lane until the event's lane has reached the position at which the event was recorded. Operations
of one channel, such as collectives of one process group, never overlap. If the device has no
asynchronous lanes, all operations run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp2.core.facts import Lane
from fsdp2.tracing.record.notes import HOST, PLACES, Await, Note, Operation, Place, Signal


class Cost(NamedTuple):
    """The duration of an operation, in any unit."""

    seconds: float | None
    launch: float = 0.0
    channel: Hashable = None


class Span(NamedTuple):
    """One operation, and when it runs."""

    operation: Operation
    start: float
    end: float


class Stall(NamedTuple):
    """A wait, however short."""

    lane: Place
    on: Place
    label: str
    start: float
    end: float
    behind: int
    iteration: int = 0


@dataclass
class Replay:
    """A step in time."""

    spans: list[Span] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    host: float = 0.0
    end: float = 0.0


def replay(
    notes: Sequence[Note], cost: Callable[[Operation], Cost], asynchronous: bool = True
) -> Replay:
    """When every operation runs."""
    clock = _Clock(asynchronous)
    found = clock.found
    for note in notes:
        if isinstance(note, Operation):
            clock.run(note, cost(note))
        elif isinstance(note, Signal):
            clock.signalled(note, clock.at(note.lane))
        elif isinstance(note, Await):
            clock.wait(note)
        found.times.append(clock.at(Lane.COMPUTE))
    found.host, found.end = clock.now[HOST], max(clock.now.values())
    return found


def measured(notes: Sequence[Note], times: Sequence[tuple[float, float]]) -> Replay:
    """When every operation ran, from measured times."""
    made = _Step()
    for note, (start, end) in zip(notes, times, strict=True):
        if isinstance(note, Operation):
            made.ran(note, start, end)
        elif isinstance(note, Signal):
            made.signalled(note, start)
        elif isinstance(note, Await) and note.event in made.events:
            made.stood(note, start, end)
    return made.found


def idle(spans: Iterable[Span], lane: Place) -> float:
    """How long ``lane`` has nothing to run, from 0 to the end of all lanes."""
    spans = list(spans)
    busy = sum(span.end - span.start for span in spans if span.operation.lane is lane)
    return max((span.end for span in spans), default=0.0) - busy


class _Step:
    """Spans and stalls as they come: which event stands for which operation."""

    def __init__(self) -> None:
        self.found = Replay()
        self.events: dict[int, tuple[float, Place, int]] = {}
        self._latest: dict[Place, int] = dict.fromkeys(PLACES, -1)  # span of each lane

    def ran(self, note: Operation, start: float, end: float) -> None:
        self._latest[note.lane] = len(self.found.spans)
        self.found.spans.append(Span(note, start, end))

    def signalled(self, note: Signal, time: float) -> None:
        self.events[note.event] = (time, note.lane, self._latest[note.lane])

    def stood(self, note: Await, start: float, end: float) -> None:
        _, on, behind = self.events[note.event]
        about = (start, end, behind, note.iteration)
        self.found.stalls.append(Stall(note.lane, on, note.label, *about))


class _Clock(_Step):
    """How far each lane, and the host, has come."""

    def __init__(self, asynchronous: bool) -> None:
        super().__init__()
        self.now: dict[Place, float] = dict.fromkeys(PLACES, 0.0)
        self._asynchronous = asynchronous
        self._channels: dict[Hashable, float] = {}

    def at(self, lane: Place) -> float:
        """When what the host launches on ``lane`` next can begin."""
        return max(self.now[lane], self.now[HOST])

    def run(self, note: Operation, cost: Cost) -> None:
        self.now[HOST] += cost.launch
        if cost.seconds is None:
            return
        start = self.at(note.lane)
        if cost.channel is not None:
            start = max(start, self._channels.get(cost.channel, 0.0))
            self._channels[cost.channel] = start + cost.seconds
        self.now[note.lane] = end = start + cost.seconds
        if not self._asynchronous:
            self.now[HOST] = end
        self.ran(note, start, end)

    def wait(self, note: Await) -> None:
        if note.event in self.events:
            start = self.at(note.lane)
            self.now[note.lane] = end = max(start, self.events[note.event][0])
            self.stood(note, start, end)
