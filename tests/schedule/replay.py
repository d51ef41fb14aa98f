"""Recorded traces with something changed in them, for the race checker."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.tracing.record.notes import (
    PLACES,
    Allocation,
    Await,
    Free,
    Note,
    Operation,
    Place,
    Signal,
)


def with_early_frees(trace: Sequence[Note]) -> list[list[Note]]:
    """For each free, the trace with that free right behind the last call that uses the buffer.

    The call, not what it launches: a side lane may still be at it.
    """
    last: dict[int, int] = {}
    variants = []
    for position, op in enumerate(trace):
        if isinstance(op, Allocation):
            last[op.number] = position
        elif isinstance(op, Operation):
            last.update((buffer.number, position) for buffer in (*op.reads, *op.writes))
        elif isinstance(op, Free) and last[op.number] + 1 < position:
            start = last[op.number] + 1
            rest = [*trace[start:position], *trace[position + 1 :]]
            variants.append([*trace[:start], op, *rest])
    return variants


def with_stale_events(trace: Sequence[Note]) -> list[list[Note]]:
    """For each wait, the trace with a wait for the event recorded before on the same lane."""
    history: dict[Place, list[int]] = {lane: [] for lane in PLACES}
    earlier: dict[int, int] = {}
    variants = []
    for position, op in enumerate(trace):
        if isinstance(op, Signal):
            if history[op.lane]:
                earlier[op.event] = history[op.lane][-1]
            history[op.lane].append(op.event)
        elif isinstance(op, Await) and op.event in earlier:
            stale = op._replace(event=earlier[op.event])
            variants.append([*trace[:position], stale, *trace[position + 1 :]])
    return variants
