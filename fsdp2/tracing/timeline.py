"""The data of a timeline, from paper, a stand-in or a real run.

    Timeline
      slices    [Slice(lane, operation, unit, start, end, …), …]    what a lane did
      waits     [Wait(lane, on, label, start, end, …), …]           why a lane waited
      memory    [Memory(time, {category: bytes}), …]                what was allocated, by category
      metadata  {"source": "run", "rank": 0, …}

Times are microseconds from the timeline's own zero. Nothing here imports torch, so that tools can
read files without it.

A file contains the JSON of Chrome's trace events, which Perfetto opens:

    thread      a lane
    "X"         a slice, or a wait (category "wait"); fields that the format lacks are in args
    "s", "f"    an arrow from the end of an operation to the operation that waited for it
    "C"         memory by category
    otherData   metadata

Fields and phases are those of "Trace Event Format" (Google's document of 2016). Times are written
to the nanosecond, which is the unit of Perfetto's tables. The two ends of an arrow are in the order
of time, because Perfetto finds the slices at its ends by their time (json_trace_parser_impl.cc,
v49).
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp2.core.errors import coded
from fsdp2.tracing.record.categories import CATEGORIES

HOST = "host"
COMPUTE = "compute"
COPY_IN = "copy-in"
ALL_GATHER = "all-gather"
REDUCE = "reduce"
ALL_REDUCE = "all-reduce"
OFFLOAD = "offload"

LANES = (HOST, COMPUTE, COPY_IN, ALL_GATHER, REDUCE, ALL_REDUCE, OFFLOAD)
"""Lanes in the order in which they are shown. Other names are allowed, and follow these."""

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
"""Operations that communicate; all others are compute, copies, or the host's own work."""

BETWEEN = "between units"
"""Operation of compute outside units: the loss, data, clipping."""

VERSION = 1
"""Version of a file's ``args`` and ``otherData``; a later one raises an error."""

_NANOSECOND = 0.001

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Slice:
    """One operation on one lane: a stream, or the host.

    Slices of a lane do not overlap; on `HOST` they may nest.

    Attributes:
        lane: the lane, one of `LANES`.
        operation: its type: "forward", "backward", "optimizer", "all-gather", "copy-out" …
        start: in µs.
        end: in µs.
        unit: name of its unit, "(root)" for the root; "" for none.
        bytes: for a collective, the size of the full tensor: an all-gather's output, a
            reduce-scatter's input; for a copy, the bytes written. 0 if not counted.
        dtype: of the data, such as "bfloat16"; "" if unknown.
        group: the ranks that communicated, such as "ranks 0-7"; "" if none.
        iteration: number of the step, from 0.
    """

    lane: str
    operation: str
    start: float
    end: float
    unit: str = ""
    bytes: int = 0
    dtype: str = ""
    group: str = ""
    iteration: int = 0

    @property
    def duration(self) -> float:
        """How long it took, in µs."""
        return self.end - self.start

    @property
    def name(self) -> str:
        """Operation and unit."""
        return f"{self.operation} {self.unit}".rstrip()


@dataclass(frozen=True)
class Wait:
    """A lane's wait for an event of another lane, however short.

    Attributes:
        lane: the lane that waited.
        on: the lane on which the event was recorded.
        label: the order that this enforces, such as "compute after all-gather".
        start: when the lane reached the wait, in µs.
        end: when it continued: ``start`` if the event had happened earlier.
        unit: the unit of the operation before the event; "" if it has none.
        operation: the operation before the event, such as "all-gather"; "" if there was none.
        behind: index in `Timeline.slices` of that operation; -1 if it is not there.
        iteration: number of the step, from 0.
    """

    lane: str
    on: str
    label: str
    start: float
    end: float
    unit: str = ""
    operation: str = ""
    behind: int = -1
    iteration: int = 0

    @property
    def duration(self) -> float:
        """How long the lane waited, in µs."""
        return self.end - self.start


@dataclass(frozen=True)
class Memory:
    """The memory allocated from one moment to the next sample.

    Attributes:
        time: the moment, in µs.
        bytes: by category, see `CATEGORIES`; an absent one has 0 bytes.
    """

    time: float
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory was allocated.

    Attributes:
        time: the moment, in µs.
        total: bytes.
        bytes: by category.
        grown: bytes by category that were added since the sample before.
        running: names of the longest operations until the next sample, one on each lane except the
            host's; the host's, if no other lane ran anything.
    """

    time: float
    total: int
    bytes: Mapping[str, int]
    grown: Mapping[str, int]
    running: tuple[str, ...]


@dataclass
class Timeline:
    """The operations on each lane, their waits, and the allocated memory.

    Attributes:
        slices: in the order of their starts.
        waits: in the order of their starts.
        memory: samples in the order of time; each counts until the next.
        metadata: facts about the run. Known keys: "title"; "source" ("paper", "stand-in" or "run");
            "clock" ("paper", "host" or "events"); "rank"; "world_size"; "device"; "torch"; "note"
            (a sentence); "incomplete" (why it ends early).

    Example::

        timeline = Timeline.read("step.json")
        print(timeline.duration, [s.name for s in timeline.on("all-gather")])
    """

    slices: list[Slice] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    metadata: dict[str, Value] = field(default_factory=dict)

    @property
    def start(self) -> float:
        """The start of the first slice, in µs; 0 without any."""
        return min((s.start for s in self.slices), default=0.0)

    @property
    def end(self) -> float:
        """The end of the last slice, in µs; 0 without any."""
        return max((s.end for s in self.slices), default=0.0)

    @property
    def duration(self) -> float:
        """The time from the start of the first slice to the end of the last one, in µs."""
        return self.end - self.start

    @property
    def lanes(self) -> list[str]:
        """The lanes that have slices or waits: known ones in the order of `LANES`, then others."""
        return _ordered([s.lane for s in self.slices] + [w.lane for w in self.waits], LANES)

    @property
    def categories(self) -> list[str]:
        """The categories of memory that occur: known ones in the order of `CATEGORIES`."""
        return _ordered((name for sample in self.memory for name in sample.bytes), CATEGORIES)

    @property
    def steps(self) -> int:
        """How many steps slices belong to, at least 1."""
        return max(1, len(self.marks))

    @property
    def marks(self) -> list[tuple[int, float]]:
        """For each step its number, and the start of its first slice, in µs; in order."""
        begins: dict[int, float] = {}
        for each in self.slices:
            begins[each.iteration] = min(begins.get(each.iteration, each.start), each.start)
        return sorted(begins.items(), key=lambda mark: mark[1])

    @property
    def units(self) -> list[str]:
        """The units of the slices, in the order in which they first appear."""
        return list(dict.fromkeys(s.unit for s in self.slices if s.unit))

    def on(self, lane: str) -> list[Slice]:
        """The slices of a lane, in the order of their starts."""
        return [s for s in self.slices if s.lane == lane]

    @property
    def peak(self) -> Peak | None:
        """The first moment of most memory; ``None`` if memory was not counted."""
        if not self.memory:
            return None
        place = max(range(len(self.memory)), key=lambda i: self.memory[i].total)
        most, later = self.memory[place], self.memory[place + 1 :]
        until = max(later[0].time if later else self.end, most.time + _NANOSECOND)
        longest: dict[str, tuple[float, str]] = {}
        for each in self.slices:
            shared = min(each.end, until) - max(each.start, most.time)
            if shared > longest.get(each.lane, (0.0, ""))[0]:
                longest[each.lane] = shared, each.name
        if len(longest) > 1:
            longest.pop(HOST, None)
        running = tuple(longest[lane][1] for lane in self.lanes if lane in longest)
        before = self.memory[place - 1].bytes if place else most.bytes
        grown = {name: size - before.get(name, 0) for name, size in most.bytes.items()}
        grown = {name: size for name, size in grown.items() if size > 0}
        return Peak(most.time, most.total, dict(most.bytes), grown, running)

    def sorted(self) -> Timeline:
        """The same in the order of time, which `write` requires.

        `Wait.behind` is updated.
        """
        order = sorted(
            range(len(self.slices)), key=lambda i: (self.slices[i].start, -self.slices[i].end)
        )
        place = {old: new for new, old in enumerate(order)}
        waits = [replace(w, behind=place.get(w.behind, -1)) for w in self.waits]
        waits.sort(key=lambda w: (w.start, w.end))
        memory = sorted(self.memory, key=lambda sample: sample.time)
        return Timeline([self.slices[i] for i in order], waits, memory, dict(self.metadata))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON that Perfetto, Chrome and `read` open.

        Args:
            path: the file, which is replaced.
        """
        Path(path).write_text(_dumped(self.sorted()), encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Timeline:
        """Read a file of `write`.

        Args:
            path: the file.

        Raises:
            ValueError: it is not JSON, or not a file of fsdp2.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise coded(
                ValueError,
                "trace-no-json",
                f"'{os.fspath(path)}' is not JSON; pass a file that fsdp2.trace wrote: {error}",
            ) from error
        head = document.get("otherData") if isinstance(document, dict) else None
        if not isinstance(head, dict) or head.get("format") != _FORMAT:
            raise coded(
                ValueError,
                "trace-other-json",
                f"'{os.fspath(path)}' is JSON, but not a timeline of fsdp2; pass a file that "
                f"fsdp2.trace wrote",
            )
        if int(head.get("version", 0)) > VERSION:
            raise coded(
                ValueError,
                "trace-version",
                f"'{os.fspath(path)}' is a timeline of version {head['version']}, but this fsdp2 "
                f"reads versions up to {VERSION}; read it with the fsdp2 that wrote it, or a "
                f"later one",
            )
        return _timeline(document["traceEvents"], head)


def _ordered(names: Iterable[str], known: Sequence[str]) -> list[str]:
    used = dict.fromkeys(names)
    return [name for name in known if name in used] + [name for name in used if name not in known]


# ---- as a file

_FORMAT = "fsdp2 timeline"
_FORMATS = ("lane", "label", "start", "end")  # which an event has
_WAIT = "wait"
Event = dict[str, Any]


def _dumped(timeline: Timeline) -> str:
    """The file's text: one event per line."""
    head: dict[str, Value] = {"format": _FORMAT, "version": VERSION, **timeline.metadata}
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in _events(timeline))
    return (
        f'{{"displayTimeUnit":"ms","otherData":{json.dumps(head)},"traceEvents":[\n{lines}\n]}}\n'
    )


def _events(timeline: Timeline) -> list[Event]:
    rank = timeline.metadata.get("rank", 0)
    process = rank if isinstance(rank, int) else 0
    lanes = {lane: number for number, lane in enumerate(LANES, 1)}
    for lane in (*timeline.lanes, *(wait.on for wait in timeline.waits)):
        lanes.setdefault(lane, len(lanes) + 1)
    timed: list[tuple[float, int, Event]] = []

    def add(order: int, lane: str, phase: str, time: float, **fields: Any) -> None:
        event = {"ph": phase, "pid": process, "tid": lanes[lane], "ts": round(time, 3), **fields}
        timed.append((event["ts"], order, event))

    for wait in timeline.waits:
        about = {"name": wait.label, "cat": _WAIT, "args": _args(wait)}
        add(0, wait.lane, "X", wait.start, dur=_duration(wait), **about)
    for index, each in enumerate(timeline.slices):
        about = {"name": each.name, "cat": each.operation, "args": {"id": index, **_args(each)}}
        add(3, each.lane, "X", each.start, dur=_duration(each), **about)
    for number, wait in enumerate(timeline.waits):
        if wait.behind >= 0:
            _add_arrow(add, number, wait, timeline.slices[wait.behind])
    for sample in timeline.memory:
        add(4, LANES[0], "C", sample.time, name="memory", args=dict(sample.bytes))
    timed.sort(key=lambda each: each[:2])
    return [*_names(timeline, process, lanes), *(event for _, _, event in timed)]


def _duration(span: Slice | Wait) -> float:
    """As the difference of what is written, so that neighbors touch and do not overlap."""
    return round(round(span.end, 3) - round(span.start, 3), 3)


def _args(each: Slice | Wait) -> dict[str, Value]:
    """The fields that the format has none for."""
    return {name: value for name, value in vars(each).items() if name not in _FORMATS}


def _add_arrow(add: Any, number: int, wait: Wait, behind: Slice) -> None:
    """From the last nanosecond of an operation to the operation that starts when the wait ends."""
    leaves = max(behind.start, behind.end - _NANOSECOND)
    fields = {"id": number + 1, "name": "event", "cat": "event"}
    add(1, behind.lane, "s", min(leaves, wait.end), **fields)
    add(2, wait.lane, "f", wait.end, **fields)


def _names(timeline: Timeline, process: int, lanes: Mapping[str, int]) -> list[Event]:
    title = timeline.metadata.get("title") or f"rank {process}"
    found: list[Event] = [_name(process, 0, "process_name", name=str(title))]
    used = {*timeline.lanes, *(wait.on for wait in timeline.waits)}
    for lane, number in lanes.items():
        if lane in used:
            found.append(_name(process, number, "thread_name", name=lane))
            found.append(_name(process, number, "thread_sort_index", sort_index=number))
    return found


def _name(process: int, thread: int, kind: str, **args: Any) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "ts": 0, "name": kind, "args": args}


def _timeline(events: list[Event], head: Mapping[str, Value]) -> Timeline:
    lanes: dict[int, str] = {}
    slices: dict[int, Slice] = {}
    waits: list[Wait] = []
    memory: list[Memory] = []
    for event in events:
        args, phase = event.get("args", {}), event["ph"]
        if phase == "M" and event["name"] == "thread_name":
            lanes[event["tid"]] = args["name"]
        elif phase == "C":
            memory.append(Memory(event["ts"], args))
        elif phase == "X":
            start, end = event["ts"], round(event["ts"] + event["dur"], 3)
            given = {"lane": lanes[event["tid"]], "start": start, "end": end, **args}
            if event["cat"] == _WAIT:
                waits.append(Wait(label=event["name"], **given))
            else:
                index = given.pop("id")
                slices[index] = Slice(**given)
    metadata = {key: value for key, value in head.items() if key not in ("format", "version")}
    return Timeline([slices[index] for index in sorted(slices)], waits, memory, metadata)


# ---- intervals

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as few intervals that do not touch, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """How long intervals are that do not overlap."""
    return sum(end - start for start, end in intervals)


def covered(interval: Interval, by: list[Interval]) -> float:
    """How much of an interval is in those of ``by``, which are from `union`."""
    start, end = interval
    first = bisect_right(by, start, key=lambda each: each[1])
    last = bisect_left(by, end, key=lambda each: each[0])
    return sum(min(end, b) - max(start, a) for a, b in by[first:last])
