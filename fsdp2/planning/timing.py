"""When each operation of a rehearsed step runs on a machine, and what stands still meanwhile.

    Recording + Hardware ── schedule ──> Timing(spans, waits, times)

A lane runs its operations in the order of the host's calls, none before the host has launched it. A
wait holds a lane up until the event's lane has come to where it was recorded. Collectives of one
process group run one at a time. Where lanes are one, as on a CPU, all is one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp2.core.device.streams import Lane
from fsdp2.paper.recording import Operation, Recording, Signal, Wait
from fsdp2.planning.costs import costs_of
from fsdp2.planning.hardware import Hardware

HOST_BANDWIDTH = 2.0e10
"""Bytes a second of what the host computes on its own memory, such as an offloaded optimizer."""


@dataclass(frozen=True)
class Span:
    """One operation, and when it runs: seconds from the step's begin."""

    operation: Operation
    start: float
    end: float


@dataclass(frozen=True)
class Stall:
    """A wait, however short.

    Attributes:
        lane: which waited; ``None``: the host.
        on: the lane of the event.
        label: the order that this makes.
        start: when the lane came to it.
        end: when it went on.
        behind: index in `Timing.spans` of the last operation before the event; -1: none.
    """

    lane: Lane | None
    on: Lane
    label: str
    start: float
    end: float
    behind: int


@dataclass
class Timing:
    """A step in time, in seconds.

    Attributes:
        spans: all operations that take the device's time, in the order of the host.
        stalls: all waits.
        times: for each note, how far COMPUTE is then.
        host: when the host has launched all.
        stragglers: how long ranks wait for the slowest besides.
        step: when all lanes and the host are done, and the slowest rank.
    """

    spans: list[Span] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    host: float = 0.0
    stragglers: float = 0.0
    step: float = 0.0


@dataclass(frozen=True)
class Times:
    """Seconds of a step, of one rank.

    Attributes:
        step: from begin to end.
        compute: of the user's operators, on the device.
        copies: of the engine's casts and copies, on the lane that computes.
        communication: of all collectives, hidden or not.
        exposed: of communication for which compute stands still.
        host: how long compute stands still otherwise: the host is late, or has work of its own.
        stragglers: how long it waits for slower ranks, on average.
        forward: of the user's operators in forward.
        backward: the same in backward.
        optimizer: the same in the optimizer's step.
    """

    step: float
    compute: float
    copies: float
    communication: float
    exposed: float
    host: float
    stragglers: float
    forward: float
    backward: float
    optimizer: float


@dataclass(frozen=True)
class UnitTimes:
    """What a unit takes in a step, in seconds; of all micro-batches.

    Attributes:
        name: of the unit.
        compute: of its operators.
        gathers: how often it is gathered.
        gather: of its all-gathers.
        gather_exposed: how long compute stands still for them.
        reduction: of its reduce-scatters and all-reduces.
        reduction_exposed: how long compute stands still for them.
        nbytes: of its collectives, of whole tensors.
    """

    name: str
    compute: float
    gathers: int
    gather: float
    gather_exposed: float
    reduction: float
    reduction_exposed: float
    nbytes: int


def schedule(recording: Recording, hardware: Hardware, world: int) -> Timing:
    """When everything runs.

    Args:
        recording: a step.
        hardware: the machine.
        world: ranks in all.
    """
    clock = _Clock(recording, hardware, world)
    for note in recording.notes:
        if isinstance(note, Operation):
            clock.run(note)
        elif isinstance(note, Signal):
            clock.signal(note)
        elif isinstance(note, Wait):
            clock.wait(note)
        clock.timing.times.append(max(clock.now[Lane.COMPUTE], clock.host))
    timing = clock.timing
    timing.host = clock.host
    alone = max(clock.host, *clock.now.values())
    timing.stragglers = alone * hardware.waits_for_slowest(world)
    timing.step = alone + timing.stragglers
    return timing


class _Clock:
    def __init__(self, recording: Recording, hardware: Hardware, world: int) -> None:
        self.timing = Timing()
        self.now = dict.fromkeys(Lane, 0.0)
        self.host = 0.0
        self._recording, self._costs = recording, costs_of(hardware, world)
        self._unit = ""
        self._channels = dict.fromkeys(range(len(recording.groups)), 0.0)
        self._events: dict[int, tuple[float, Lane, int]] = {}
        self._latest = dict.fromkeys(Lane, -1)  # span of each lane

    def run(self, note: Operation) -> None:
        launch = self._costs.launch(note)
        if note.unit != self._unit:
            launch, self._unit = launch + self._costs.unit, note.unit
        if note.lane is None:
            self.host += launch + note.nbytes / HOST_BANDWIDTH
            return
        lane, seconds = note.lane, self._seconds(note)
        if not self._recording.asynchronous:
            self.host = max(self.host, self.now[lane]) + launch
        else:
            self.host += launch
        if note.kind == "view":
            return
        start = max(self.now[lane], self.host)
        if note.kind == "collective":
            start = max(start, self._channels[note.group])
            self._channels[note.group] = start + seconds
        self.now[lane] = start + seconds
        if not self._recording.asynchronous:
            self.host = self.now[lane]
        self._latest[lane] = len(self.timing.spans)
        self.timing.spans.append(Span(note, start, start + seconds))

    def _seconds(self, note: Operation) -> float:
        if note.kind == "collective":
            return self._costs.collective(note, self._recording.groups[note.group])
        return 0.0 if note.kind == "view" else self._costs.operator(note)

    def signal(self, note: Signal) -> None:
        time = max(self.now[note.lane], self.host)
        self._events[note.event] = (time, note.lane, self._latest[note.lane])

    def wait(self, note: Wait) -> None:
        time, on, behind = self._events.get(note.event, (0.0, Lane.COMPUTE, -1))
        if note.lane is None:
            start = self.host
            self.host = end = max(self.host, time)
        else:
            start = max(self.now[note.lane], self.host)
            self.now[note.lane] = end = max(start, time)
        self.timing.stalls.append(Stall(note.lane, on, note.label, start, end, behind))
