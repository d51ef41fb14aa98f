"""Runs a recorded trace again, perhaps with something changed in it, through the race checker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch

from fsdp2.testing.virtual import PLACES, Allocation, Op, Place, VirtualDevice, VirtualTensor


def replay(trace: Sequence[Op]) -> VirtualDevice:
    """A new device that has done what the trace says."""
    device = VirtualDevice()
    twins: dict[Allocation, VirtualTensor] = {}
    events = {}
    for op in trace:
        if op.kind == "record":
            events[op.event] = device.record(op.lane, op.label)
        elif op.kind == "wait":
            device.follow(op.lane, events[op.event], op.label)
        elif op.kind == "synchronize":
            device.synchronize(events[op.event], op.label)
        elif op.kind == "free":
            device.free(twins[op.writes[0]].owner.allocation)
        elif op.kind == "alloc":
            with device.on(op.lane):
                owner = SimpleNamespace(allocation=device.allocate(op.label))
            twins[op.writes[0]] = VirtualTensor(owner, (1,), torch.float32)
        else:
            with device.on(op.lane):
                device.run(op.kind, [twins[b] for b in op.reads], [twins[b] for b in op.writes])
    return device


def with_early_frees(trace: Sequence[Op]) -> list[list[Op]]:
    """For each free, the trace with that free right behind the last call that uses the buffer.

    The call, not what it launches: a side lane may still be at it.
    """
    last: dict[Allocation, int] = {}
    variants = []
    for position, op in enumerate(trace):
        if op.kind != "free":
            last.update(dict.fromkeys((*op.reads, *op.writes), position))
        elif last[op.writes[0]] + 1 < position:
            start = last[op.writes[0]] + 1
            rest = [*trace[start:position], *trace[position + 1 :]]
            variants.append([*trace[:start], op, *rest])
    return variants


def with_stale_events(trace: Sequence[Op]) -> list[list[Op]]:
    """For each wait, the trace with a wait for the event recorded before on the same lane."""
    history: dict[Place, list[int]] = {lane: [] for lane in PLACES}
    earlier: dict[int, int] = {}
    variants = []
    for position, op in enumerate(trace):
        if op.kind == "record":
            if history[op.lane]:
                earlier[op.event] = history[op.lane][-1]
            history[op.lane].append(op.event)
        elif op.kind in ("wait", "synchronize") and op.event in earlier:
            stale = replace(op, event=earlier[op.event])
            variants.append([*trace[:position], stale, *trace[position + 1 :]])
    return variants
