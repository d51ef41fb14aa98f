"""When each operation of a schedule on paper would run, if it took a given time.

    device.trace ── replay(duration) ──> [Span(op, start, end), …] ── idle ──> exposed time
                 ── timeline_of(duration) ──> a `Timeline`, as real runs leave one

A lane runs its operations in the order of the host's calls. A wait holds it up until the event's
lane has come to where the event was recorded. The host itself takes no time, but it launches
nothing before a `synchronize` is over. So the result is what the schedule allows where the host is
far ahead of the device: what is left is communication that no compute hides.

    device = VirtualDevice()
    simulation = Simulation(model, device)
    simulation.iteration()  # learns the order of units
    start = len(device.trace)
    simulation.forward()
    spans = replay(device.trace[start:], lambda op: 3.0 if op.kind == "all_gather" else 1.0)
    print(idle(spans, Lane.COMPUTE))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp2.core.device.streams import Lane
from fsdp2.testing.virtual import HOST, PLACES, USER, Allocation, Op, Place
from fsdp2.tracing.timeline import (
    ALL_GATHER,
    ALL_REDUCE,
    COMPUTE,
    COPY_IN,
    REDUCE,
    Memory,
    Slice,
    Timeline,
    Value,
    Wait,
)

BOOKKEEPING = ("alloc", "free", "record", "wait", "synchronize")
"""Kinds of operations that take no time."""

LANE_OF: Mapping[Place, str] = {
    Lane.COMPUTE: COMPUTE,
    Lane.COPY_IN: COPY_IN,
    Lane.ALL_GATHER: ALL_GATHER,
    Lane.REDUCE: REDUCE,
    Lane.ALL_REDUCE: ALL_REDUCE,
    HOST: "host",
    USER: "user",
}
"""What a timeline calls each place."""


@dataclass(frozen=True)
class Span:
    """One operation, and when it runs.

    Attributes:
        op: of the trace; of `replay` none of `BOOKKEEPING`.
        start: when it begins, in the unit of the durations; the trace begins at 0.
        end: when it is over.
    """

    op: Op
    start: float
    end: float


def replay(
    trace: Sequence[Op], duration: Callable[[Op], float], one_at_a_time: Collection[str] = ()
) -> list[Span]:
    """When each operation of ``trace`` runs.

    Args:
        trace: of a `VirtualDevice`, or a part of it; what was recorded before is over when it
            begins.
        duration: how long an operation takes, in any unit.
        one_at_a_time: kinds of operations that never overlap, whatever their lanes: they run in the
            order of the host's calls. Collectives of one NCCL communicator do, so pass
            ``("all_gather", "reduce_scatter")``, unless reduce-scatters have a group of their own.

    Returns:
        A span for each operation that takes time, in the order of the host's calls.
    """
    spans = _walk(trace, duration, one_at_a_time)
    return [span for span in spans if span.op.kind not in BOOKKEEPING]


def _walk(
    trace: Sequence[Op], duration: Callable[[Op], float], one_at_a_time: Collection[str]
) -> Iterator[Span]:
    """A span for each entry of the trace: of a wait from when its lane comes to when it goes on."""
    now: dict[Place, float] = dict.fromkeys(PLACES, 0.0)
    events: dict[int, float] = {}
    channel = 0.0
    for op in trace:
        start = end = max(now[op.lane], now[HOST])
        if op.kind == "record":
            events[op.event] = start
        elif op.kind in ("wait", "synchronize"):
            now[op.lane] = end = max(start, events.get(op.event, 0.0))
        elif op.kind not in BOOKKEEPING:
            if op.kind in one_at_a_time:
                start = max(start, channel)
                channel = start + duration(op)
            now[op.lane] = end = start + duration(op)
        yield Span(op, start, end)


def idle(spans: Iterable[Span], lane: Place) -> float:
    """How long ``lane`` has nothing to run, from the start to the end of all lanes."""
    spans = list(spans)
    busy = sum(span.end - span.start for span in spans if span.op.lane is lane)
    return max((span.end for span in spans), default=0.0) - busy


# ---- as a timeline


@dataclass(frozen=True)
class Told:
    """What a timeline says of an operation; see `fsdp2.tracing.timeline.Slice`."""

    operation: str
    unit: str = ""
    bytes: int = 0
    dtype: str = ""
    group: str = ""
    iteration: int = 0


OPERATIONS = {"step": "optimizer", "load": "load from host"}
"""Kinds of operations on paper that timelines call something else than their words."""


def tell_by_names(trace: Sequence[Op]) -> Callable[[Op], Told]:
    """What operations are, by the names that `fsdp2.testing.simulation` gives to buffers.

    Of "gathered u" and "gradient u.0" the name says the unit. Other buffers are of the unit whose
    buffers an operation touches besides them.
    """
    owners: dict[Allocation, str] = {}
    for op in trace:
        for buffer in (*op.reads, *op.writes):
            kind, _, name = buffer.name.partition(" ")
            if kind == "gathered" and name:
                owners[buffer] = name
            elif kind == "gradient" and name:
                owners[buffer] = name.rpartition(".")[0]
    for op in (*trace, *reversed(trace)):
        if op.kind not in BOOKKEEPING:
            found = _owner(op, owners)
            if found is not None:
                for buffer in (*op.reads, *op.writes):
                    owners.setdefault(buffer, found)

    def tell(op: Op) -> Told:
        kind, _, unit = op.kind.partition(" ")
        if kind in ("forward", "backward"):
            return Told(kind, unit)
        return Told(OPERATIONS.get(kind, kind.replace("_", "-")), _owner(op, owners) or "")

    return tell


def _owner(op: Op, owners: Mapping[Allocation, str]) -> str | None:
    found = (owners.get(buffer) for buffer in (*op.writes, *op.reads))
    return next((name for name in found if name is not None), None)


def timeline_of(
    trace: Sequence[Op],
    duration: Callable[[Op], float],
    *,
    tell: Callable[[Op], Told] | None = None,
    size: Callable[[Allocation], tuple[str, int]] | None = None,
    one_at_a_time: Collection[str] = (),
    metadata: Mapping[str, Value] | None = None,
) -> Timeline:
    """A schedule on paper as a timeline, of the format of real runs.

    Args:
        trace: as for `replay`.
        duration: how long an operation takes, in microseconds; one of 0 leaves no slice.
        tell: what a timeline says of an operation. Default: `tell_by_names`.
        size: category and bytes of a buffer, for the memory by category; buffers that were there
            when the trace began are not known to it. Default: no memory.
        one_at_a_time: as for `replay`.
        metadata: facts for `Timeline.metadata`.

    Example::

        times = {"all_gather": 120.0, "reduce_scatter": 150.0}
        timeline_of(device.trace, lambda op: times.get(op.kind, 40.0)).write("paper.json")
    """
    tell = tell or tell_by_names(trace)
    made = Timeline(metadata={"source": "paper", "clock": "paper", **(metadata or {})})
    last: dict[Place, tuple[int, Told]] = {}  # of each place: index of its slice, and what ran
    events: dict[int, tuple[Place, int, Told]] = {}
    changes: list[tuple[float, str, int]] = []
    nothing = (-1, Told(""))
    for span in _walk(trace, duration, one_at_a_time):
        op, lane = span.op, LANE_OF[span.op.lane]
        if op.kind == "record":
            events[op.event] = (op.lane, *last.get(op.lane, nothing))
        elif op.kind in ("wait", "synchronize"):
            if op.event in events:  # else of before: over, and not here
                place, index, told = events[op.event]
                label = op.label or "a copy that blocks the host"
                wait = Wait(lane, LANE_OF[place], label, span.start, span.end)
                wait = replace(wait, unit=told.unit, operation=told.operation)
                made.waits.append(replace(wait, behind=index, iteration=told.iteration))
        elif op.kind in BOOKKEEPING:
            if size is not None:
                category, nbytes = size(op.writes[0])
                changes.append((span.start, category, nbytes if op.kind == "alloc" else -nbytes))
        else:
            if span.end > span.start:
                told = tell(op)
                last[op.lane] = (len(made.slices), told)
                made.slices.append(_slice(lane, span, told))
    made.memory = _memory(changes)
    return made.sorted()


def _slice(lane: str, span: Span, told: Told) -> Slice:
    return Slice(
        lane,
        told.operation,
        span.start,
        span.end,
        told.unit,
        told.bytes,
        told.dtype,
        told.group,
        told.iteration,
    )


def _memory(changes: list[tuple[float, str, int]]) -> list[Memory]:
    """Samples of what is there after each change; one for changes of one moment and direction.

    A free and an allocation of one moment stay apart, so that no peak is lost.
    """
    now: dict[str, int] = {}
    found: list[Memory] = []
    grows = False
    for time, category, change in sorted(changes, key=lambda each: each[0]):
        now[category] = now.get(category, 0) + change
        if found and found[-1].time == time and grows is (change > 0):
            found.pop()
        grows = change > 0
        found.append(Memory(time, dict(now)))
    return found
