"""Prints a trace of `VirtualDevice` lane by lane, for tests that assert whole schedules.

    compute:
      forward a                 after all_gather a
      free a
    all_gather:
      all_gather a              after compute forward root

"after" names the operation that the lane waits for: the last one on the other lane when the event
was recorded. Records get no line, nor does an operation that repeats the one above it. "alloc" and
"free" are those of gathered parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.core.device.streams import Lane
from fsdp2.tracing.record.notes import PLACES, Allocation, Await, Free, Note, Place, Signal

_COLUMN = 28


def render(trace: Sequence[Note], start: int = 0) -> str:
    """The operations from position ``start`` on, grouped by lane."""
    names = _Names()
    lines: dict[Place, list[str]] = {lane: [] for lane in PLACES}
    waits: dict[Place, list[str]] = {lane: [] for lane in PLACES}
    last: dict[Place, str] = dict.fromkeys(PLACES, "")
    events: dict[int, str] = {}
    for position, op in enumerate(trace):
        name = names.of(op)
        if isinstance(op, Signal):
            events[op.event] = _waited_for(op.lane, last[op.lane])
        elif isinstance(op, Await):
            waits[op.lane] += [event for event in (events[op.event],) if event]
        elif name and isinstance(op, Allocation):
            _add(lines[op.lane], name, [])
        elif name:
            last[op.lane] = last[op.lane] if isinstance(op, Free) else name
            _add(lines[op.lane], name, waits[op.lane])
        if position < start:
            lines[op.lane].clear()
            waits[op.lane].clear()
    for lane, left in waits.items():
        if lines[lane] and left:
            _add(lines[lane], "end", left)
    return "\n".join(
        f"{lane.name.lower()}:\n" + "\n".join(f"  {line}" for line in lines[lane])
        for lane in PLACES
        if lines[lane]
    )


def _add(lines: list[str], name: str, waits: list[str]) -> None:
    if waits:
        lines.append(f"{name:<{_COLUMN}}after {', '.join(waits)}")
        waits.clear()
    elif not lines or lines[-1].partition("  ")[0] != name:
        lines.append(name)


def _waited_for(lane: Place, name: str) -> str:
    """What an event stands for; "" where nothing ran on its lane, so that it orders nothing."""
    return f"compute {name}" if name and lane is Lane.COMPUTE else name


class _Names:
    """Finds the unit that an operation is about: buffers inherit it from what is read."""

    def __init__(self) -> None:
        self._units: dict[Allocation, str] = {}

    def of(self, op: Note) -> str:
        """What to print for an operation; "" for nothing."""
        if isinstance(op, Allocation | Free):
            kind, _, operand = op.name.partition(" ")
            what = "alloc" if isinstance(op, Allocation) else "free"
            return f"{what} {operand.partition('.')[0]}" if kind == "gathered" else ""
        if isinstance(op, Signal | Await):
            return ""
        known = [unit for buffer in (*op.reads, *op.writes) if (unit := self._named(buffer))]
        kind, _, operand = op.kind.partition(" ")
        unit = operand.partition(".")[0] or (known[0] if known else "")
        for buffer in (*op.reads, *op.writes):
            if unit and not self._named(buffer):
                self._units[buffer] = unit
        return f"{kind} {unit}".rstrip()

    def _named(self, buffer: Allocation) -> str:
        kind, _, operand = buffer.name.partition(" ")
        if kind in ("gathered", "gradient", "accumulated"):
            return operand.partition(".")[0]
        return self._units.get(buffer, "")
