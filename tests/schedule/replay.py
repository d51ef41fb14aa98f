"""Recorded traces with something changed in them, for the race checker."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.tracing.record import notes


def with_early_frees(trace: Sequence[notes.Note]) -> list[list[notes.Note]]:
    """For each free, the trace with that free right behind the last call that uses the buffer.

    The call, not what it launches: a side lane may still be at it.
    """
    last: dict[int, int] = {}
    variants = []
    for position, op in enumerate(trace):
        if isinstance(op, notes.Allocation):
            last[op.number] = position
        elif isinstance(op, notes.Operation):
            last.update((buffer.number, position) for buffer in (*op.reads, *op.writes))
        elif isinstance(op, notes.Free) and last[op.number] + 1 < position:
            start = last[op.number] + 1
            rest = [*trace[start:position], *trace[position + 1 :]]
            variants.append([*trace[:start], op, *rest])
    return variants


def with_stale_events(trace: Sequence[notes.Note]) -> list[list[notes.Note]]:
    """For each wait, the trace with a wait for the event recorded before on the same lane."""
    history: dict[notes.Place, list[int]] = {lane: [] for lane in notes.PLACES}
    earlier: dict[int, int] = {}
    variants = []
    for position, op in enumerate(trace):
        if isinstance(op, notes.Signal):
            if history[op.lane]:
                earlier[op.event] = history[op.lane][-1]
            history[op.lane].append(op.event)
        elif isinstance(op, notes.Await) and op.event in earlier:
            stale = op._replace(event=earlier[op.event])
            variants.append([*trace[:position], stale, *trace[position + 1 :]])
    return variants
