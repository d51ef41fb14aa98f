"""Runs a recorded trace again, perhaps with something changed in it, through the race checker."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from fsdp2.testing.virtual import VirtualDevice, VirtualTensor
from fsdp2.tracing.record.notes import (
    HOST,
    PLACES,
    Allocation,
    Await,
    Free,
    Note,
    Operation,
    Place,
    Signal,
)


def replay(trace: Sequence[Note]) -> VirtualDevice:
    """A new device that has done what the trace says."""
    device = VirtualDevice()
    twins: dict[int, VirtualTensor] = {}
    events = {}
    for op in trace:
        if isinstance(op, Signal):
            events[op.event] = device.record(op.lane, op.label)
        elif isinstance(op, Await) and op.lane is HOST:
            device.synchronize(events[op.event], op.label)
        elif isinstance(op, Await):
            device.follow(op.lane, events[op.event], op.label)
        elif isinstance(op, Free):
            device.free(twins[op.number].owner.allocation)
        elif isinstance(op, Allocation):
            with device.on(op.lane):
                owner = SimpleNamespace(allocation=device.allocate(op.name))
            twins[op.number] = VirtualTensor(owner, (1,), torch.float32)
        else:
            reads, writes = ([twins[b.number] for b in some] for some in (op.reads, op.writes))
            with device.on(op.lane):
                device.run(op.kind, reads, writes)
    return device


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
