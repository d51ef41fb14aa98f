"""One HTML file: lanes over time, memory below them, a table of units.

timelines ──> page.html that contains their data; it needs neither network nor server

The numbers of the table and of the peak are `fsdp2.tracing.summary`'s: the page only draws.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import resources
from pathlib import Path

from fsdp2.core.errors import coded
from fsdp2.tracing.summaries import (
    COLUMNS,
    Source,
    Summary,
    amount,
    cells,
    compared,
    idle_told,
    milliseconds,
    peak_told,
    steps_told,
    summary,
)
from fsdp2.tracing.timeline import Timeline

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Short labels of the runs of a page, if names do not fit."""

_MARK = "/*DATA*/"


def show(
    *files: Source, to: str | os.PathLike[str] | None = None, title: str | None = None
) -> Path:
    """Write a page that shows one timeline, or several on one axis.

    Args:
        files: files that `fsdp2.trace` wrote, or `Timeline` objects.
        to: the HTML file, which is replaced. Default: the first file with the suffix ".html".
        title: the title of the first timeline, instead of its own.

    Returns:
        The page's path.

    Raises:
        ValueError: there is no timeline, or no path to write to; or as `Timeline.read`.

    Example::

        fsdp2.tracing.show("plan.json", "step.json", to="both.html")
    """
    if not files:
        raise coded(
            ValueError,
            "trace-show-nothing",
            "show takes at least one timeline, but got none; pass the file of at least one",
        )
    first = files[0]
    if to is None and isinstance(first, Timeline):
        raise coded(
            ValueError,
            "trace-show-where",
            "show needs to= because the first timeline is not a file; pass the path of the page "
            "as to=",
        )
    path = Path(to) if to is not None else Path(os.fspath(_path(first))).with_suffix(".html")
    timelines = [each if isinstance(each, Timeline) else Timeline.read(each) for each in files]
    if title is not None:
        metadata = {**timelines[0].metadata, "title": title}
        timelines[0] = replace(timelines[0], metadata=metadata)
    path.write_text(_html(timelines), encoding="utf-8")
    return path


def _path(source: Source) -> str | os.PathLike[str]:
    assert not isinstance(source, Timeline)
    return source


def _html(timelines: list[Timeline]) -> str:
    template = resources.files("fsdp2.tracing").joinpath("page.html").read_text(encoding="utf-8")
    several = len(timelines) > 1
    runs = [_run(each.sorted(), n, several) for n, each in enumerate(timelines, 1)]
    numbers = [summary(each) for each in timelines]
    for letter, run, found in zip(LETTERS, runs, numbers, strict=False):
        run["letter"] = letter
        run["compared"] = "" if run is runs[0] else _compared(letter, numbers[0], found)
    data = json.dumps(runs)
    return template.replace(_MARK, data.replace("<", "\\u003c"))


def _compared(letter: str, first: Summary, second: Summary) -> str:
    """The times per step of another run relative to the first one's."""
    told = []
    for name, key in (("in all", "duration"), ("of exposed communication", "exposed")):
        a, b = getattr(first, key) / first.steps, getattr(second, key) / second.steps
        ratio = f" ({b / a:.2f} x)" if a else ""
        told.append(f"{milliseconds(b)} {name} for {milliseconds(a)}{ratio}")
    for name, one, other in compared(first, second):
        if name == "peak memory" and one:
            told.append(f"a peak of {amount(other)} for {amount(one)} ({other / one:.2f} x)")
    return f"{letter} against {LETTERS[0]}, per step: {', '.join(told)}."


def _run(timeline: Timeline, number: int, compares: bool) -> dict[str, object]:
    """The data that the page draws for a timeline; if it compares, the table is per step."""
    found = summary(timeline)
    steps = found.steps if compares else 1
    head = timeline.metadata
    about = [str(head[key]) for key in ("source", "device", "world_size") if head.get(key)]
    times = {"paper": "times from paper", "host": "the host's times", "events": "events' times"}
    if head.get("world_size"):
        about[-1] += " ranks"
    about.append(times.get(str(head.get("clock")), ""))
    if found.steps > 1:
        about.append(f"{found.steps} steps")
    if head.get("incomplete"):
        about.append(f"it ends early: {head['incomplete']}")
    note = str(head.get("note") or "")
    categories = timeline.categories
    marks = [
        [number, begin, f"step {number}, {milliseconds(found.step_times[number])}"]
        for number, begin in timeline.marks
    ]
    return {
        "title": found.title or f"timeline {number}",
        "about": ", ".join(part for part in about if part)
        + (note and f". {note[0].upper()}{note[1:]}."),
        "facts": _facts(found),
        "steps": steps_told(found.step_times) if len(marks) > 1 else "",
        "marks": marks if len(marks) > 1 else [],
        "idle": idle_told(found.idle) if found.idle else "",
        "lanes": timeline.lanes,
        "start": timeline.start,
        "end": timeline.end,
        "slices": [
            [s.lane, s.operation, s.unit, s.start, s.end, s.bytes, s.dtype, s.group, s.iteration]
            for s in timeline.slices
        ],
        "waits": [
            [w.lane, w.on, w.label, w.start, w.end, w.unit, w.operation, w.behind, w.iteration]
            for w in timeline.waits
        ],
        "memory": {
            "names": categories,
            "times": [sample.time for sample in timeline.memory],
            "totals": [sample.total for sample in timeline.memory],
            "series": [[m.bytes.get(name, 0) for m in timeline.memory] for name in categories],
            "most": found.peak.total if found.peak else 0,
        },
        "peak": found.peak and {"time": found.peak.time, "total": found.peak.total},
        "peakShort": f"peak {amount(found.peak.total)}" if found.peak else "",
        "peakTold": peak_told(found.peak, timeline.start) if found.peak else "",
        "columns": COLUMNS,
        "units": [
            {"unit": row.unit, "exposed": row.exposed / steps, "cells": cells(row, steps)}
            for row in found.units
        ],
    }


def _facts(found: Summary) -> list[tuple[str, str]]:
    share = 100 / found.duration if found.duration else 0.0
    facts = [
        ("in all", milliseconds(found.duration)),
        ("compute", f"{found.compute * share:.1f} %"),
        ("exposed communication", f"{found.exposed * share:.1f} %"),
        (f"of {milliseconds(found.communication)} communication hidden", f"{found.overlap:.0%}"),
    ]
    if found.peak is not None:
        facts.append(("peak memory", amount(found.peak.total)))
    return facts
