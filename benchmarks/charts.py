"""Charts: bars with their range, planned against measured, and what is allocated over time.

    Bars ── bars ──> SVG text        [Panel] ── scatter, areas ──> SVG text

A bar is a median; the line on it goes from the smallest to the largest round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.svg import SERIES, Drawing, width_of

Bar = tuple[float, float, float]
Bars = dict[str, dict[str, Bar]]
"""A series each: {label of a group: median, smallest, largest}."""

LOOKS = {
    "not sharded": "e",
    "plain tensors": "e",
    "torch FSDP2": "b",
    "fsdp2": "a",
    "fsdp2, coalesced": "a",
    "fsdp2, packed": "f",
    "fsdp2, step_shards": "d",
    "fsdp2, FlatOptimizer": "c",
    "fsdp2, two dims allowed": "c",
}
"""One color for each variant in all charts; others take those that are left in turn."""

WIDTH = 760


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers from ``low`` to at least ``high``."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 10) for place in range(first, last + 1)]


def shown(value: float) -> str:
    """A value in a chart: three digits at most."""
    if 0 < value < 0.005:
        return "< 0.01"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return _signed(f"{value:.{digits}f}")


def _tick(value: float) -> str:
    return _signed(f"{value:,.10g}")


def _signed(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")


@dataclass(frozen=True)
class Axis:
    """Values to places on the x axis.

    Attributes:
        left, right: of the axis, in pixels.
        low, high: its values.
        log: whether it is logarithmic above 1.
    """

    left: float
    right: float
    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        part = (self._scaled(value) - low) / (high - low)
        return self.left + part * (self.right - self.left)

    def _scaled(self, value: float) -> float:
        return value if not self.log or value <= 1 else 1 + math.log10(value)

    def marks(self) -> list[float]:
        """Values with a label."""
        if not self.log:
            return ticks(self.low, self.high)
        return [0, *(m for m in (1, 10, 100, 1000) if m <= self.high)]


def _looks(series: Sequence[str]) -> dict[str, str]:
    rest = iter(look for look in SERIES * 3 if look not in {LOOKS.get(s) for s in series})
    return {name: LOOKS[name] if name in LOOKS else next(rest) for name in series}


def bars(title: str, unit: str, found: Bars, *, log: bool = False, dots: bool = False) -> str:
    """Horizontal bars, a group for each label; ``dots``: medians as dots, for ratios around 0."""
    groups = list(dict.fromkeys(label for each in found.values() for label in each))
    looks = _looks(list(found))
    rows = {group: [name for name in found if group in found[name]] for group in groups}
    left = 30 + max(width_of(group) for group in groups)
    thick, gap = (13, 12) if len(groups) > 1 else (18, 8)
    drawing = Drawing(WIDTH, 0, title)
    drawing.text(16, 26, title, "ink title bold")
    below = 46.0
    if len(found) > 1:
        below = drawing.legend(16, below + 4, [(looks[name], name) for name in found])
    top = below + 4
    bottom = top + sum(len(each) * thick + gap for each in rows.values())
    axis = _axis([bar for each in found.values() for bar in each.values()], left, log)
    _grid(drawing, axis, top, bottom, unit)
    y = top + gap / 2
    for group in groups:
        middle = y + len(rows[group]) * thick / 2
        drawing.text(left - 10, middle + 4, group, "ink end")
        for name in rows[group]:
            _bar(drawing, axis, y, thick, found[name][group], looks[name], dots)
            y += thick
        y += gap
    drawing.resize(bottom + 50)
    return str(drawing)


def _axis(found: Sequence[Bar], left: float, log: bool) -> Axis:
    low = min(0.0, *(bar[1] for bar in found))
    high = max(bar[2] for bar in found)
    marks = ticks(low, high)
    return Axis(left, WIDTH - 62, marks[0] if low < 0 else 0.0, high if log else marks[-1], log)


def _grid(drawing: Drawing, axis: Axis, top: float, bottom: float, unit: str) -> None:
    for value in axis.marks():
        x = axis(value)
        drawing.line([(x, top), (x, bottom)], f"thin s-{'grid' if value else 'line'}")
        drawing.text(x, bottom + 16, _tick(value), "quiet small middle")
    drawing.text((axis.left + axis.right) / 2, bottom + 36, unit, "quiet middle")


def _bar(
    drawing: Drawing, axis: Axis, y: float, thick: float, bar: Bar, look: str, dots: bool
) -> None:
    median, low, high = bar
    middle, zero = y + thick / 2, axis(0)
    if dots:
        drawing.line([(axis(low), middle), (axis(high), middle)], f"stroke s-{look}")
        drawing.dot(axis(median), middle, 4, look)
    else:
        drawing.rect(min(zero, axis(median)), y + 1, abs(axis(median) - zero), thick - 2, look)
        if high > low:
            ends = [axis(low), axis(high)]
            drawing.line([(ends[0], middle), (ends[1], middle)], "thin s-ink")
            for end in ends:
                drawing.line([(end, middle - 2.5), (end, middle + 2.5)], "thin s-ink")
    drawing.text(max(axis(high), zero) + 6, middle + 4, shown(median), "quiet small")


# ---- planned against measured


@dataclass(frozen=True)
class Panel:
    """Points of one kind.

    Attributes:
        title: what they are.
        unit: of both axes.
        points: {series: [(measured, planned, label or "")]}.
        band: how far from the diagonal a plan counts as right, as a part of it.
    """

    title: str
    unit: str
    points: Mapping[str, Sequence[tuple[float, float, str]]]
    band: float


def scatter(title: str, panels: Sequence[Panel]) -> str:
    """Planned over measured, on logarithmic axes; the diagonal is a plan without error."""
    side, apart = 280.0, 376.0
    drawing = Drawing(16 + apart * len(panels), side + 140, title)
    drawing.text(16, 26, title, "ink title bold")
    for place, panel in enumerate(panels):
        _scatter(drawing, panel, 66 + apart * place, 76, side)
    return str(drawing)


def _scatter(drawing: Drawing, panel: Panel, left: float, top: float, side: float) -> None:
    values = [value for each in panel.points.values() for point in each for value in point[:2]]
    low, high = _decades(min(values), max(values))

    def at(value: float) -> float:
        return (math.log10(value) - math.log10(low)) / (math.log10(high) - math.log10(low)) * side

    drawing.text(left, top - 26, panel.title, "ink bold")
    shift = at(low * (1 + panel.band))
    right, bottom = left + side, top + side
    band = [(left, bottom), (left, bottom - shift), (right - shift, top), (right, top)]
    drawing.area([*band, (right, top + shift), (left + shift, bottom)], "a faint")
    for value in _round_numbers(low, high):
        x, y = left + at(value), bottom - at(value)
        drawing.line([(x, top), (x, bottom)], "thin s-grid")
        drawing.line([(left, y), (right, y)], "thin s-grid")
        drawing.text(x, bottom + 16, _tick(value), "quiet small middle")
        drawing.text(left - 6, y + 4, _tick(value), "quiet small end")
    drawing.line([(left, bottom), (right, top)], "thin s-line")
    drawing.text(left + side / 2, bottom + 36, f"measured, {panel.unit}", "quiet middle")
    drawing.text(left - 40, top - 8, f"planned, {panel.unit}", "quiet")
    for place, points in enumerate(panel.points.values()):
        for measured, planned, label in points:
            x, y = left + at(measured), bottom - at(planned)
            drawing.dot(x, y, 4, SERIES[place])
            if label:
                drawing.text(x + 8, y + 12, label, "quiet small")
    if len(panel.points) > 1:
        entries = [(SERIES[place], name) for place, name in enumerate(panel.points)]
        for place, entry in enumerate(entries):
            drawing.dot(left + 14, top + 16 + 18 * place, 4, entry[0])
            drawing.text(left + 24, top + 20 + 18 * place, entry[1], "quiet small")


def _decades(low: float, high: float) -> tuple[float, float]:
    return low / 1.3, high * 1.3


def _round_numbers(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]


# ---- allocated over time


@dataclass(frozen=True)
class Course:
    """What is allocated in the course of one step.

    Attributes:
        title: above it.
        note: below the title.
        end: of the step.
        marks: [(time, what begins then)].
        moments: [(time, {category: amount})], each until the next.
    """

    title: str
    note: str
    end: float
    marks: Sequence[tuple[float, str]]
    moments: Sequence[tuple[float, Mapping[str, float]]]

    @property
    def most(self) -> float:
        """The largest amount."""
        return max(sum(each.values()) for _, each in self.moments)


Point = tuple[float, float]


def areas(
    title: str,
    notes: Sequence[str],
    units: tuple[str, str],
    looks: Mapping[str, str],
    found: Sequence[Course],
) -> str:
    """Stacked areas of the same scale: the first course to the left, the others to the right.

    ``notes``: lines below the title; ``units``: of amounts and of times;
    ``looks``: the color of each category, the lowest first.
    """
    scale, apart = 15.0, 98.0
    tops = [max(ticks(0, course.most, max(round(course.most / 5), 1))) for course in found]
    drawing = Drawing(WIDTH, 0, title)
    drawing.text(16, 26, title, "ink title bold")
    start = drawing.legend(16, 50, [(look, name) for name, look in looks.items()]) + 44
    for place, note in enumerate(notes):
        drawing.text(16, start - 30 + 18 * place, note, "quiet")
    bottom = start + sum(tops[1:]) * scale + (len(tops) - 2) * apart
    above = start
    for place, (course, top) in enumerate(zip(found, tops, strict=True)):
        left, right = (50, 372) if place == 0 else (428, WIDTH - 18)
        frame = Frame(left, right, bottom - top * scale if place == 0 else above, scale, top)
        _course(drawing, course, frame, units, looks)
        above += top * scale + apart if place else 0
    drawing.resize(bottom + 50)
    return str(drawing)


@dataclass(frozen=True)
class Frame:
    """Where a course is drawn.

    Attributes:
        left, right, above: of the frame.
        scale: pixels per unit of amounts.
        top: the amount at its upper edge.
    """

    left: float
    right: float
    above: float
    scale: float
    top: float

    @property
    def bottom(self) -> float:
        return self.above + self.top * self.scale

    def at(self, part: float, amount: float) -> Point:
        """A place: part of the step, and amount."""
        return self.left + part * (self.right - self.left), self.bottom - amount * self.scale


def _course(
    drawing: Drawing,
    course: Course,
    frame: Frame,
    units: tuple[str, str],
    looks: Mapping[str, str],
) -> None:
    left, right, bottom = frame.left, frame.right, frame.bottom
    drawing.text(left, frame.above - 32, course.title, "ink bold")
    drawing.text(left + width_of(course.title) + 14, frame.above - 32, course.note, "quiet small")
    for level in ticks(0, frame.top, max(round(frame.top / 5), 1)):
        _, y = frame.at(0, level)
        drawing.line([(left, y), (right, y)], "thin s-grid")
        drawing.text(left - 6, y + 4, _tick(level), "quiet small end")
    for when in ticks(0, course.end, 4):
        if when <= course.end:
            x, _ = frame.at(when / course.end, 0)
            drawing.text(x, bottom + 16, _tick(when), "quiet small middle")
    drawing.text((left + right) / 2, bottom + 34, units[1], "quiet small middle")
    drawing.text(left - 34, frame.above - 8, units[0], "quiet small")
    base = [0.0] * len(course.moments)
    for category, look in looks.items():
        found = [each.get(category, 0.0) for _, each in course.moments]
        upper = [b + amount for b, amount in zip(base, found, strict=True)]
        if upper != base:
            under = list(reversed(_stairs(course, base, frame)))
            drawing.area([*_stairs(course, upper, frame), *under], look)
        base = upper
    free = left
    for when, what in course.marks:
        x, _ = frame.at(when / course.end, 0)
        y = frame.above - (5 if x >= free else 17)
        drawing.line([(x, y), (x, bottom)], "thin dashed s-quiet")
        drawing.text(x + 4, y, what, "quiet small")
        free = x + width_of(what, 11) + 8
    drawing.line([(left, bottom), (right, bottom)], "thin s-line")


def _stairs(course: Course, amounts: Sequence[float], frame: Frame) -> list[Point]:
    """An outline that keeps each amount until the next moment."""
    points: list[Point] = []
    ends = [*(when for when, _ in course.moments[1:]), course.end]
    for (when, _), end, amount in zip(course.moments, ends, amounts, strict=True):
        points += [frame.at(when / course.end, amount), frame.at(end / course.end, amount)]
    return points
