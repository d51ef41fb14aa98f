"""When each operation of a schedule on paper would run, if it took a given time.

    device.trace ── replay(duration) ──> [Span(operation, start, end), …] ── idle ──> exposed time
                 ── timeline_of(duration) ──> a `Timeline`, as real runs leave one

The host itself takes no time, but it launches nothing before a `synchronize` is over. So the result
is what the schedule allows where the host is far ahead of the device: what is left is communication
that no compute hides. See `fsdp2.record.replay`.

    device = VirtualDevice()
    simulation = Simulation(model, device)
    simulation.iteration()  # learns the order of units
    start = len(device.trace)
    simulation.forward()
    spans = replay(device.trace[start:], lambda op: 3.0 if op.kind == "all_gather" else 1.0)
    print(idle(spans, Lane.COMPUTE))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from fsdp2.record import replay as record
from fsdp2.record.notes import Allocation, Free, Note, Operation, operations
from fsdp2.record.replay import Cost, Replay, Span, idle
from fsdp2.tracing.drawing import Named, draw
from fsdp2.tracing.timeline import Memory, Timeline, Value

__all__ = ["idle", "replay", "timeline_of"]


def replay(
    trace: Sequence[Note],
    duration: Callable[[Operation], float],
    one_at_a_time: Collection[str] = (),
) -> list[Span]:
    """When each operation of ``trace`` runs."""
    return _replayed(trace, duration, one_at_a_time).spans


def _replayed(
    trace: Sequence[Note], duration: Callable[[Operation], float], one_at_a_time: Collection[str]
) -> Replay:
    def cost(op: Operation) -> Cost:
        return Cost(duration(op), channel=True if op.kind in one_at_a_time else None)

    return record.replay(trace, cost)


# ---- as a timeline


OPERATIONS = {"step": "optimizer", "load": "load from host"}
"""Kinds of operations on paper that timelines call something else than their words."""


def _names_in(trace: Sequence[Note]) -> Named:
    """The unit and kind of operations, from the names that `fsdp2.testing.simulation` gives to
    buffers.

    The names "gathered u" and "gradient u.0" contain the unit. Other buffers belong to the unit
    whose buffers an operation also accesses.
    """
    known = operations(trace)
    owners: dict[Allocation, str] = {}
    for op in known:
        for buffer in (*op.reads, *op.writes):
            kind, _, name = buffer.name.partition(" ")
            if kind == "gathered" and name:
                owners[buffer] = name
            elif kind == "gradient" and name:
                owners[buffer] = name.rpartition(".")[0]
    for op in (*known, *reversed(known)):
        found = _owner(op, owners)
        if found is not None:
            for buffer in (*op.reads, *op.writes):
                owners.setdefault(buffer, found)

    def named(op: Operation) -> tuple[str, str]:
        kind, _, unit = op.kind.partition(" ")
        if kind in ("forward", "backward"):
            return kind, unit
        return OPERATIONS.get(kind, kind.replace("_", "-")), _owner(op, owners) or ""

    return named


def _owner(op: Operation, owners: Mapping[Allocation, str]) -> str | None:
    found = (owners.get(buffer) for buffer in (*op.writes, *op.reads))
    return next((name for name in found if name is not None), None)


def timeline_of(
    trace: Sequence[Note],
    duration: Callable[[Operation], float],
    *,
    size: Callable[[Allocation], tuple[str, int]] | None = None,
    one_at_a_time: Collection[str] = (),
    metadata: Mapping[str, Value] | None = None,
) -> Timeline:
    """A schedule on paper as a timeline, of the format of real runs."""
    step = _replayed(trace, duration, one_at_a_time)
    facts = {"source": "paper", "clock": "paper", **(metadata or {})}
    memory = [] if size is None else _memory(trace, step.times, size)
    return draw(step, _names_in(trace), memory, metadata=facts)


def _memory(
    trace: Sequence[Note], times: Sequence[float], size: Callable[[Allocation], tuple[str, int]]
) -> list[Memory]:
    """Samples of what is there after each change; one for changes of one moment and direction.

    A free and an allocation of one moment stay apart, so that no peak is lost.
    """
    sizes: dict[int, tuple[str, int]] = {}
    now: dict[str, int] = {}
    found: list[Memory] = []
    grows = False
    for note, time in zip(trace, times, strict=True):
        if isinstance(note, Allocation):
            category, change = sizes[note.number] = size(note)
        elif isinstance(note, Free) and note.number in sizes:
            category, nbytes = sizes[note.number]
            change = -nbytes
        else:
            continue
        now[category] = now.get(category, 0) + change
        if found and found[-1].time == time and grows is (change > 0):
            found.pop()
        grows = change > 0
        found.append(Memory(time, dict(now)))
    return found
