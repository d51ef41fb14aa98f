"""When each operation of a recorded step runs, and what waits meanwhile, as a timeline.

    notes ── Replay(cost) ──> slices, waits ──> Timeline

A lane runs its operations in the order of the host's calls, each one after its launch. A wait stops
a lane until the event's lane has reached the position at which the event was recorded. Operations
of one channel, such as collectives of one process group, never overlap. If the device has no
asynchronous lanes, all operations run one after the other.

A slice is an operation. Operators of the user's model that follow each other for one unit are one
slice. A collective that the host runs itself is apart from what it computes, on a lane of its own,
and compute stands still for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fsdp2.core.facts import Lane
from fsdp2.tracing.record.notes import (
    COLLECTIVE,
    HOST,
    PLACES,
    USER,
    Await,
    Note,
    Operation,
    Place,
    Signal,
)
from fsdp2.tracing.record.notes import COMPUTE as COMPUTED
from fsdp2.tracing.timeline import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    COMPUTE,
    COPY_IN,
    REDUCE,
    Memory,
    Slice,
    Timeline,
    Value,
    Wait,
)
from fsdp2.tracing.timeline import HOST as HOSTS

LANE_OF: Mapping[Place, str] = {
    Lane.COMPUTE: COMPUTE,
    Lane.COPY_IN: COPY_IN,
    Lane.ALL_GATHER: ALL_GATHER,
    Lane.REDUCE: REDUCE,
    Lane.ALL_REDUCE: ALL_REDUCE,
    HOST: HOSTS,
    USER: "user",
}
"""A timeline's name of each lane."""

LANE_OF_COLLECTIVE = dict(
    zip(COLLECTIVES, (Lane.ALL_GATHER, Lane.REDUCE, Lane.ALL_REDUCE, Lane.REDUCE), strict=True)
)

_TOUCHING = 1e-3  # µs


class Cost(NamedTuple):
    """The duration of an operation, in µs."""

    time: float | None
    launch: float = 0.0
    channel: Hashable = None


Named = Callable[[Operation], tuple[str, str]]
"""A timeline's names of an operation, and of its unit ("" for none)."""


def _plainly(op: Operation) -> tuple[str, str]:
    return op.name or op.kind, op.unit


class Replay:
    """A step in time, in µs.

    Attributes:
        slices: what lanes run, as of a `Timeline`.
        waits: what they wait for.
        times: after each note, when compute can begin what comes next.
    """

    def __init__(
        self,
        notes: Iterable[Note],
        cost: Callable[[Operation], Cost],
        named: Named = _plainly,
        groups: Sequence[Sequence[int]] = (),
        asynchronous: bool = True,
    ) -> None:
        self.slices: list[Slice] = []
        self.waits: list[Wait] = []
        self.times: list[float] = []
        self._named, self._groups, self._asynchronous = named, groups, asynchronous
        self._now: dict[Place, float] = dict.fromkeys(PLACES, 0.0)
        self._events: dict[int, tuple[float, Place, int]] = {}
        self._behind: dict[Place, int] = dict.fromkeys(PLACES, -1)  # the last slice of its notes
        self._last: dict[str, int] = {}  # the last slice of each lane
        self._channels: dict[Hashable, float] = {}
        self._stood = False  # compute, for the last collective
        for note in notes:
            if isinstance(note, Operation):
                self._run(note, cost(note))
            elif isinstance(note, Signal):
                event = (self._at(note.lane), note.lane, self._behind[note.lane])
                self._events[note.event] = event
            elif isinstance(note, Await):
                self._wait(note)
            self.times.append(self._at(Lane.COMPUTE))

    @property
    def end(self) -> float:
        """When all lanes and the host are done."""
        return max(self._now.values())

    def idle(self, lane: Place) -> float:
        """How long ``lane`` has nothing to run, until the last lane has run all."""
        busy = sum(each.duration for each in self.slices if each.lane == LANE_OF[lane])
        return max((each.end for each in self.slices), default=0.0) - busy

    def timeline(self, memory: Iterable[Memory], metadata: Mapping[str, Value]) -> Timeline:
        """The step as a timeline."""
        return Timeline(self.slices, self.waits, list(memory), dict(metadata)).sorted()

    def _at(self, lane: Place) -> float:
        """When what the host launches on ``lane`` next can begin."""
        return max(self._now[lane], self._now[HOST])

    def _run(self, op: Operation, cost: Cost) -> None:
        self._now[HOST] += cost.launch
        if cost.time is None:
            return
        start = self._at(op.lane)
        if cost.channel is not None:
            start = max(start, self._channels.get(cost.channel, 0.0))
            self._channels[cost.channel] = start + cost.time
        self._now[op.lane] = end = start + cost.time
        if not self._asynchronous:
            self._now[HOST] = end
        lane = LANE_OF[op.lane]
        if op.kind == COLLECTIVE and op.lane is Lane.COMPUTE:
            lane = LANE_OF[LANE_OF_COLLECTIVE.get(op.name, Lane.ALL_GATHER)]
        if end > start:
            self._draw(op, lane, start, end)
        self._behind[op.lane] = self._last.get(lane, -1)

    def _draw(self, op: Operation, lane: str, start: float, end: float) -> None:
        operation, unit = self._named(op)
        dtype = str(op.dtype).removeprefix("torch.") if op.nbytes else ""
        ranks = ranks_told(self._groups[op.group]) if op.group >= 0 else ""
        made = Slice(lane, operation, start, end, unit, op.nbytes, dtype, ranks)
        place = -1 if self._stood and lane == COMPUTE else self._last.get(lane, -1)
        if place >= 0 and op.kind == COMPUTED and self._continues(self.slices[place], made):
            last = self.slices[place]
            self.slices[place] = replace(last, end=end, bytes=last.bytes + op.nbytes)
        else:
            self._last[lane] = len(self.slices)
            self.slices.append(made)
        self._stood = op.lane is Lane.COMPUTE and lane != COMPUTE
        if self._stood:  # named as in real runs
            wait = Wait(COMPUTE, lane, f"the host waits for the {operation}", start, end)
            self.waits.append(wait_behind(wait, made, self._last[lane]))

    def _continues(self, last: Slice, made: Slice) -> bool:
        alike = (last.operation, last.unit) == (made.operation, made.unit)
        return alike and (not self._asynchronous or made.start <= last.end + _TOUCHING)

    def _wait(self, note: Await) -> None:
        if note.event in self._events:
            time, on, behind = self._events[note.event]
            start = self._at(note.lane)
            self._now[note.lane] = end = max(start, time)
            wait = Wait(LANE_OF[note.lane], LANE_OF[on], note.label, start, end)
            self.waits.append(
                wait if behind < 0 else wait_behind(wait, self.slices[behind], behind)
            )


def wait_behind(wait: Wait, by: Slice, index: int) -> Wait:
    """A wait for the slice of that index."""
    number = max(wait.iteration, by.iteration)
    return replace(wait, unit=by.unit, operation=by.operation, behind=index, iteration=number)


def ranks_told(ranks: Sequence[int]) -> str:
    """Ranks as people write them: "ranks 0-7", or "ranks 0, 8, 16"; "" for none."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}" if ranks else ""
