"""A timeline in numbers: exposed communication, idle time, overlap, bandwidth.

    summary(file)   ──> Summary: totals, and a row for each unit; print it
    diff(a, b)      ──> Difference: the same rows of two timelines side by side

All numbers are sums over slices and waits, so that a query of the file in Perfetto gives the same.
"Exposed" is the time for which the compute lane waits for a collective.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdp2.tracing.timeline import (
    BETWEEN,
    COLLECTIVES,
    COMPUTE,
    Peak,
    Slice,
    Timeline,
    covered,
    length,
    union,
)

COPIES = (
    "copy",
    "copy-in",
    "copy-out",
    "chunk-cat",
    "cast",
    "stage",
    "to-host",
    "load from host",
)
"""Operations that move bytes within a rank."""

OTHER_IDLE = "nothing was launched"
"""The cause of idle time without a wait: the host was late, or did other things."""

Source = Timeline | str | os.PathLike[str]


@dataclass(frozen=True)
class UnitTimes:
    """The times of a unit, in µs.

    Attributes:
        unit: its name.
        compute: on the compute stream, without copies.
        copies: copies, on all streams.
        gather: its all-gathers.
        reduce: its reduce-scatters and all-reduces.
        exposed: for how long compute waited for its collectives.
        gathered_bytes: of its all-gathers' outputs.
        reduced_bytes: of its reductions' inputs.
    """

    unit: str
    compute: float
    copies: float
    gather: float
    reduce: float
    exposed: float
    gathered_bytes: int
    reduced_bytes: int

    @property
    def gather_bandwidth(self) -> float:
        """GB/s: bytes of outputs over time; 0 if not counted."""
        return self.gathered_bytes / self.gather / 1e3 if self.gather else 0.0

    @property
    def reduce_bandwidth(self) -> float:
        """GB/s: bytes of inputs over time; 0 if not counted."""
        return self.reduced_bytes / self.reduce / 1e3 if self.reduce else 0.0


@dataclass(frozen=True)
class Summary:
    """A timeline in numbers; ``print(summary)`` shows tables. Times are µs.

    Attributes:
        title: of the timeline.
        steps: number of steps; all other fields cover all of them.
        duration: from the first slice to the last.
        step_times: for each step its number, and the time from its first slice to that of the next,
            or to the last slice's end.
        compute: for how long the compute stream was busy.
        communication: sum of all collectives.
        hidden: the part of communication that overlapped with the compute stream.
        exposed: for how long the compute stream waited for collectives.
        idle: for how long it was idle, by cause: the order that a wait enforces, or `OTHER_IDLE`.
        units: one row per unit, in the order in which they first appear.
        peak: the moment of most memory.
        most: bytes of each category of memory at its own peak.
    """

    title: str
    steps: int
    duration: float
    step_times: dict[int, float]
    compute: float
    communication: float
    hidden: float
    exposed: float
    idle: dict[str, float]
    units: tuple[UnitTimes, ...]
    peak: Peak | None
    most: dict[str, int]

    @property
    def overlap(self) -> float:
        """The fraction of communication that overlapped with compute; 1 without communication."""
        return self.hidden / self.communication if self.communication else 1.0

    def __str__(self) -> str:
        share = 100 / self.duration if self.duration else 0.0
        lines = [self.title] if self.title else []
        lines += [
            f"{milliseconds(self.duration)} in all: compute {self.compute * share:.1f} %, exposed "
            f"communication {self.exposed * share:.1f} %, overlap {100 * self.overlap:.1f} % of "
            f"{milliseconds(self.communication)} of communication"
        ]
        if self.steps > 1:
            lines.append(steps_told(self.step_times))
        if self.peak is not None:
            lines.append(peak_told(self.peak))
        rows = [[row.unit, *cells(row)] for row in self.units]
        lines += ["", *table(["unit", *COLUMNS], rows)]
        if self.idle:
            causes = [[cause, milliseconds(time)] for cause, time in self.idle.items()]
            lines += ["", *table(["compute idle, by cause", "time"], causes)]
        return "\n".join(lines)


COLUMNS = ["compute", "copies", "gather", "GB/s", "reduce", "GB/s", "exposed"]
"""The columns of a unit."""


def cells(row: UnitTimes, steps: int = 1) -> list[str]:
    """A unit's `COLUMNS`, of one of so many steps."""
    return [
        milliseconds(row.compute / steps),
        milliseconds(row.copies / steps),
        milliseconds(row.gather / steps),
        f"{row.gather_bandwidth:.2f}" if row.gathered_bytes else "-",
        milliseconds(row.reduce / steps),
        f"{row.reduce_bandwidth:.2f}" if row.reduced_bytes else "-",
        milliseconds(row.exposed / steps),
    ]


def summary(file: Source) -> Summary:
    """Return a timeline in numbers.

    Args:
        file: a file that `fsdp2.trace` wrote, or a `Timeline`.

    Raises:
        ValueError: as `Timeline.read`.

    Example::

        print(fsdp2.tracing.summary("step.json"))
    """
    timeline = _read(file)
    busy = union((s.start, s.end) for s in timeline.slices if s.lane == COMPUTE)
    collectives = [s for s in timeline.slices if s.operation in COLLECTIVES]
    waits = [w for w in timeline.waits if w.lane == COMPUTE]
    idle: dict[str, float] = {}
    for wait in waits:
        if wait.duration:
            idle[wait.label] = idle.get(wait.label, 0.0) + wait.duration
    rest = timeline.duration - length(busy) - sum(idle.values())
    if rest > 0.0005:  # µs: less is rounding
        idle[OTHER_IDLE] = rest
    exposed: dict[str, float] = {}
    for wait in waits:
        if wait.operation in COLLECTIVES:
            exposed[wait.unit] = exposed.get(wait.unit, 0.0) + wait.duration
    by_unit: dict[str, list[Slice]] = {}
    for each in timeline.slices:
        by_unit.setdefault(each.unit, []).append(each)
    return Summary(
        title=str(timeline.metadata.get("title") or ""),
        steps=timeline.steps,
        duration=timeline.duration,
        step_times=_step_times(timeline),
        compute=length(busy),
        communication=sum(s.duration for s in collectives),
        hidden=sum(covered((s.start, s.end), busy) for s in collectives),
        exposed=sum(exposed.values()),
        idle=dict(sorted(idle.items(), key=lambda each: -each[1])),
        units=tuple(_unit(u, by_unit[u], exposed.get(u, 0.0)) for u in timeline.units),
        peak=timeline.peak,
        most={n: max(m.bytes.get(n, 0) for m in timeline.memory) for n in timeline.categories},
    )


def _step_times(timeline: Timeline) -> dict[int, float]:
    marks = timeline.marks
    ends = [*(begin for _, begin in marks[1:]), timeline.end]
    return {number: end - begin for (number, begin), end in zip(marks, ends, strict=False)}


def _unit(name: str, slices: Sequence[Slice], exposed: float) -> UnitTimes:
    gathers = [s for s in slices if s.operation == "all-gather"]
    reductions = [s for s in slices if s.operation in COLLECTIVES and s not in gathers]
    copies = [s for s in slices if s.operation in COPIES]
    compute = [s for s in slices if s.lane == COMPUTE and s.operation not in COPIES]
    compute = [s for s in compute if s.operation not in COLLECTIVES]
    return UnitTimes(
        name,
        compute=_sum(compute),
        copies=_sum(copies),
        gather=_sum(gathers),
        reduce=_sum(reductions),
        exposed=exposed,
        gathered_bytes=sum(s.bytes for s in gathers),
        reduced_bytes=sum(s.bytes for s in reductions),
    )


def _sum(slices: Iterable[Slice]) -> float:
    return sum(s.duration for s in slices)


def _read(file: Source) -> Timeline:
    return file if isinstance(file, Timeline) else Timeline.read(file)


# ---- two of them


@dataclass(frozen=True)
class Difference:
    """Two timelines unit by unit; ``print(difference)`` shows tables with times per step.

    Attributes:
        first: one timeline, such as a plan.
        second: the other, such as a measurement.
        units: for each unit its row in either; ``None`` if it has none.
    """

    first: Summary
    second: Summary
    units: tuple[tuple[UnitTimes | None, UnitTimes | None], ...]

    def __str__(self) -> str:
        steps = (self.first.steps, self.second.steps)
        totals = [
            [name, *_pair(getattr(self.first, key), getattr(self.second, key), steps)]
            for name, key in (
                ("whole", "duration"),
                ("compute", "compute"),
                ("communication", "communication"),
                ("exposed", "exposed"),
            )
        ]
        for name, a, b in compared(self.first, self.second):
            totals.append([name, amount(a), amount(b), f"{b / a:.2f}" if a else "-"])
        rows = []
        for first, second in self.units:
            known = first or second
            assert known is not None
            for key in ("compute", "copies", "gather", "reduce", "exposed"):
                values = [0.0 if row is None else getattr(row, key) for row in (first, second)]
                if any(values):
                    rows.append([f"{known.unit} {key}", *_pair(values[0], values[1], steps)])
        titles = [self.first.title or "first", self.second.title or "second"]
        if titles[0] == titles[1]:
            titles = [f"{titles[0]} ({which})" for which in ("first", "second")]
        head = [*titles, "second / first"]
        return "\n".join([*table(["per step", *head], totals), "", *table(["unit", *head], rows)])


def diff(a: Source, b: Source) -> Difference:
    """Compare two timelines unit by unit: planned and measured, or before and after.

    Args:
        a: the first, a file or a `Timeline`.
        b: the second.

    Raises:
        ValueError: as `Timeline.read`.

    Example::

        print(fsdp2.tracing.diff("plan.json", "step.json"))
    """
    first, second = summary(a), summary(b)
    rows = [{row.unit: row for row in each.units} for each in (first, second)]
    names = dict.fromkeys([*rows[0], *rows[1]])
    return Difference(first, second, tuple((rows[0].get(n), rows[1].get(n)) for n in names))


def compared(first: Summary, second: Summary) -> list[tuple[str, int, int]]:
    """Memory that both timelines have counted: (category, bytes of the first, of the second).

    On the CPU, activations are not counted, so a peak there does not cover all memory.
    """
    rows = [
        (f"most {n}", most, second.most[n]) for n, most in first.most.items() if n in second.most
    ]
    if first.peak and second.peak and first.most.keys() == second.most.keys():
        rows.append(("peak memory", first.peak.total, second.peak.total))
    return rows


def _pair(first: float, second: float, steps: tuple[int, int]) -> list[str]:
    first, second = first / steps[0], second / steps[1]
    ratio = f"{second / first:.2f}" if first else "-"
    return [milliseconds(first), milliseconds(second), ratio]


# ---- words


def milliseconds(time: float) -> str:
    """A time in µs, formatted."""
    if abs(time) < 1e6:
        return f"{time:.0f} µs" if abs(time) < 1000 else f"{time / 1e3:.2f} ms"
    return f"{time / 1e6:.3f} s"


def amount(nbytes: float) -> str:
    """Bytes, formatted: in powers of ten, with one to three digits before the point."""
    for size, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {name}"
    return f"{nbytes:.0f} B"


def steps_told(times: Mapping[int, float]) -> str:
    """How long steps take: the median, and those that differ most from it."""
    least, most = (choose(times, key=lambda n: times[n]) for choose in (min, max))
    return (
        f"{len(times)} steps: median {milliseconds(statistics.median(times.values()))}, least "
        f"{milliseconds(times[least])} (step {least}), most {milliseconds(times[most])} "
        f"(step {most})"
    )


def idle_told(idle: Mapping[str, float]) -> str:
    """The causes of idle compute, longest first."""
    causes = [f"{milliseconds(time)} {cause}" for cause, time in idle.items()]
    return f"Compute is idle for {milliseconds(sum(idle.values()))}: {', '.join(causes)}."


def peak_told(peak: Peak, origin: float = 0.0) -> str:
    """Why the peak is there: running operations, contents, and last additions."""
    running = ["compute between units" if name == BETWEEN else name for name in peak.running]
    told = f"Peak of {amount(peak.total)} at {milliseconds(peak.time - origin)}"
    if running:
        told += f", with {' and '.join(running)} running"
    largest = sorted(peak.bytes.items(), key=lambda each: -each[1])
    parts = [f"{name} {amount(n)} ({n / peak.total:.0%})" for name, n in largest]
    parts = parts[: sum(n >= 0.005 * peak.total for _, n in largest if n)]
    told += f": {', '.join(parts)}."
    if peak.grown:
        came = sorted(peak.grown.items(), key=lambda each: -each[1])
        told += f" Last came {' and '.join(f'{amount(n)} of {name}' for name, n in came)}."
    return told


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, right: int = 0
) -> list[str]:
    """Lines of columns: the first ``left`` and the last ``right`` are words, others are numbers."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    words = {*range(left), *range(len(head) - right, len(head))}
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if place in words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines
