"""When each operation of a schedule on paper would run, if it took a given time.

    device.trace ── replay(duration) ──> [Span(op, start, end), …] ── idle ──> exposed time

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

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from fsdp2.testing.virtual import HOST, PLACES, Op, Place

BOOKKEEPING = ("alloc", "free", "record", "wait", "synchronize")
"""Kinds of operations that take no time."""


@dataclass(frozen=True)
class Span:
    """One operation, and when it runs.

    Attributes:
        op: of the trace; none of `BOOKKEEPING`.
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
    now: dict[Place, float] = dict.fromkeys(PLACES, 0.0)
    events: dict[int, float] = {}
    channel = 0.0
    spans = []
    for op in trace:
        if op.kind == "record":
            events[op.event] = max(now[op.lane], now[HOST])
        elif op.kind in ("wait", "synchronize"):
            now[op.lane] = max(now[op.lane], events.get(op.event, 0.0))
        if op.kind in BOOKKEEPING:
            continue
        start = max(now[op.lane], now[HOST])
        if op.kind in one_at_a_time:
            start = max(start, channel)
            channel = start + duration(op)
        now[op.lane] = end = start + duration(op)
        spans.append(Span(op, start, end))
    return spans


def idle(spans: Iterable[Span], lane: Place) -> float:
    """How long ``lane`` has nothing to run, from the start to the end of all lanes."""
    spans = list(spans)
    busy = sum(span.end - span.start for span in spans if span.op.lane is lane)
    return max((span.end for span in spans), default=0.0) - busy
