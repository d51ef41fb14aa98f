"""Chrome's trace events: what is wrong with a file, and the tables that Perfetto makes of it.

    problems_of(document)   a strict reading of "Trace Event Format" (2016), a sentence each
    tables(document)        slice, thread_track, thread in SQLite, as Perfetto imports JSON
                            (json_trace_parser_impl.cc, v49)
    arrows(document)        from which slice to which (flow_tracker.cc)

What both do was read in Perfetto's source. No Perfetto has run here.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

Event = Mapping[str, Any]

NEEDED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid"},
}
NAMES = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def problems_of(document: Any) -> list[str]:
    """What the format forbids, and what Perfetto would drop or misplace."""
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["there is no list 'traceEvents'"]
    return [*_wrong_fields(document["traceEvents"]), *_wrong_places(document["traceEvents"])]


def _wrong_fields(events: list[Event]) -> Iterator[str]:
    last = 0.0
    for event in events:
        phase = event.get("ph")
        if phase not in NEEDED:
            yield f"{event}: phase {phase!r}"
            continue
        if missing := NEEDED[phase] - event.keys():
            yield f"{event}: no {missing}"
        for key in ("ts", "dur"):
            value = event.get(key, 0)
            if not isinstance(value, int | float) or value < 0 or round(value, 3) != value:
                yield f"{event}: {key} is not a number of whole nanoseconds from 0"
        if any(not isinstance(event.get(key, 0), int) for key in ("pid", "tid")):
            yield f"{event}: pid and tid are numbers"
        if phase == "M" and NAMES.get(event["name"]) not in event["args"]:
            yield f"{event}: metadata of an unknown name"
        if phase == "C" and not all(isinstance(v, int | float) for v in event["args"].values()):
            yield f"{event}: a counter counts numbers"
        if phase != "M":
            if event["ts"] < last:
                yield f"{event}: behind {last}"
            last = event["ts"]


def _wrong_places(events: list[Event]) -> Iterator[str]:
    named = {e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    stacks: dict[int, list[float]] = defaultdict(list)  # ends of the slices around the moment
    starts: dict[int, float] = {}
    for event in events:
        if event["ph"] == "X":
            if event["tid"] not in named:
                yield f"{event}: on a thread without a name"
            stack, end = stacks[event["tid"]], round(event["ts"] + event["dur"], 3)
            while stack and stack[-1] <= event["ts"]:
                stack.pop()
            if stack and end > stack[-1]:
                yield f"{event}: ends behind the slice around it, at {stack[-1]}"
            stack.append(end)
        elif event["ph"] == "s":
            if event["id"] in starts:
                yield f"{event}: a second arrow of this id"
            starts[event["id"]] = event["ts"]
        elif event["ph"] == "f" and starts.get(event["id"], float("inf")) > event["ts"]:
            yield f"{event}: an arrow that ends before it begins"
    if sum(e["ph"] == "f" for e in events) != len(starts):
        yield "an arrow without an end"


# ---- tables


def tables(document: Mapping[str, Any]) -> sqlite3.Connection:
    """The tables of Perfetto's that queries of slices use, times in nanoseconds."""
    database = sqlite3.connect(":memory:")
    database.executescript(
        """
        CREATE TABLE thread (utid INTEGER, name TEXT);
        CREATE TABLE thread_track (id INTEGER, utid INTEGER);
        CREATE TABLE slice (id INTEGER, dur INTEGER, track_id INTEGER, category TEXT);
        """
    )
    for number, event in enumerate(document["traceEvents"]):
        if event["ph"] == "M" and event["name"] == "thread_name":
            lane = event["tid"]
            database.execute("INSERT INTO thread VALUES (?,?)", (lane, event["args"]["name"]))
            database.execute("INSERT INTO thread_track VALUES (?,?)", (lane, lane))
        elif event["ph"] == "X":
            row = (number, _ns(event["dur"]), event["tid"], event["cat"])
            database.execute("INSERT INTO slice VALUES (?,?,?,?)", row)
    database.create_function("extract", 2, lambda number, key: _argument(document, number, key))
    return database


def arrows(document: Mapping[str, Any]) -> Iterator[tuple[Event, Event]]:
    """From the innermost slice that is open on the thread to the next that begins on one.

    Events are in the order of time; of one moment, in the file's. A slice stays open until another
    event of its thread comes behind its end.
    """
    stacks: dict[int, list[tuple[int, Event]]] = defaultdict(list)  # ends and slices
    waiting: dict[int, list[Event]] = defaultdict(list)  # sources of arrows to the next slice
    sources: dict[int, Event] = {}
    for event in document["traceEvents"]:
        lane = event.get("tid", 0)
        if event["ph"] == "X":
            start = _ns(event["ts"])
            stack = stacks[lane]
            while stack and stack[-1][0] <= start:
                stack.pop()
            stack.append((start + _ns(event["dur"]), event))
            yield from ((source, event) for source in waiting.pop(lane, ()))
        elif event["ph"] == "s" and stacks[lane]:
            sources[event["id"]] = stacks[lane][-1][1]
        elif event["ph"] == "f" and event["id"] in sources:
            waiting[lane].append(sources[event["id"]])


def _argument(document: Mapping[str, Any], number: int, key: str) -> Any:
    return document["traceEvents"][number]["args"].get(key.removeprefix("args."))


def _ns(microseconds: float) -> int:
    """As Perfetto reads it since it rounds; v49 and before cut durations: up to 1 ns less each."""
    return round(microseconds * 1000)
