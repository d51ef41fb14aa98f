"""A second opinion on a trace: plain reachability, nothing shared with the vector clocks.

Operations on one lane run in order, a wait comes after the record of its event, and what the host
issues once it has waited for an event comes after that event's record; whatever follows from these
three rules is ordered, nothing else is. Two accesses conflict where
  - they use the same buffer and at least one writes it, or
  - they use different buffers, of which one was freed before the other was allocated on the same
    lane, so that both may have the same memory.

Sets of operations are integers: bit i stands for operation i of the trace.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.core.streams import Lane
from fsdp2.core.virtual import Allocation, Op


def ancestors(trace: Sequence[Op]) -> list[int]:
    """For each operation the set of those that have run when it starts."""
    before: list[int] = []
    previous: dict[Lane, int] = {}
    records: dict[int, int] = {}
    synchronized: list[int] = []  # records of events that the host has waited for
    for position, op in enumerate(trace):
        parents = [*synchronized, previous[op.lane]] if op.lane in previous else [*synchronized]
        if op.kind == "record":
            records[op.event] = position
        elif op.kind == "wait":
            parents.append(records[op.event])
        elif op.kind == "synchronize":
            synchronized.append(records[op.event])
        known = 0
        for parent in parents:
            known |= before[parent] | 1 << parent
        before.append(known)
        if op.kind not in (
            "alloc",
            "free",
            "synchronize",
        ):  # the host's, they order nothing on a lane
            previous[op.lane] = position
    return before


def unordered_conflicts(trace: Sequence[Op]) -> list[str]:
    """Operations that conflict with an earlier one of the host's order and may overtake it."""
    before = ancestors(trace)
    accesses: dict[Allocation, int] = {}
    writes: dict[Allocation, int] = {}
    freed: dict[Lane, int] = dict.fromkeys(Lane, 0)  # accesses of buffers that were freed
    inherited: dict[Allocation, int] = {}
    home: dict[Allocation, Lane] = {}
    found = []
    for position, op in enumerate(trace):
        if op.kind == "alloc":
            home[op.writes[0]] = op.lane
            inherited[op.writes[0]] = freed[op.lane]
            continue
        if op.kind == "free":
            freed[home[op.writes[0]]] |= accesses.get(op.writes[0], 0)
            continue
        needed = 0
        for buffer in op.reads:
            needed |= writes.get(buffer, 0) | inherited[buffer]
        for buffer in op.writes:
            needed |= accesses.get(buffer, 0) | inherited[buffer]
        if needed & ~before[position]:
            found.append(f"{position}: {op}")
        for buffer in (*op.reads, *op.writes):
            accesses[buffer] = accesses.get(buffer, 0) | 1 << position
        for buffer in op.writes:
            writes[buffer] = writes.get(buffer, 0) | 1 << position
    return found
