"""A second opinion on a trace: plain reachability, nothing shared with the vector clocks.

Operations on one lane run in order; a wait, also one of the host, comes after the record of its
event; and whatever is issued comes after what the host has run by then. Whatever follows from these
three rules is ordered, nothing else is. Two accesses conflict where
  - they use the same buffer and at least one writes it, or
  - they use different buffers, of which one was freed before the other was allocated on the same
    lane, so that both may have the same memory. Not of CPU memory, which comes back late enough.

Sets of operations are integers: bit i stands for operation i of the trace.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.testing.virtual import HOST, PLACES, Allocation, Op, Place


def ancestors(trace: Sequence[Op]) -> list[int]:
    """For each operation the set of those that have run when it starts."""
    before: list[int] = []
    previous: dict[Place, int] = {}
    records: dict[int, int] = {}
    for position, op in enumerate(trace):
        parents = [previous[lane] for lane in {op.lane, HOST} if lane in previous]
        if op.kind == "record":
            records[op.event] = position
        elif op.kind in ("wait", "synchronize"):
            parents.append(records[op.event])
        known = 0
        for parent in parents:
            known |= before[parent] | 1 << parent
        before.append(known)
        if op.kind not in ("alloc", "free"):  # the host's, they order nothing on a lane
            previous[op.lane] = position
    return before


def unordered_conflicts(trace: Sequence[Op]) -> list[str]:
    """Operations that conflict with an earlier one of the host's order and may overtake it."""
    before = ancestors(trace)
    accesses: dict[Allocation, int] = {}
    writes: dict[Allocation, int] = {}
    freed: dict[Place, int] = dict.fromkeys(PLACES, 0)  # accesses of buffers that were freed
    inherited: dict[Allocation, int] = {}
    home: dict[Allocation, Place] = {}
    found = []
    for position, op in enumerate(trace):
        if op.kind == "alloc":
            home[op.writes[0]] = op.lane
            inherited[op.writes[0]] = freed[op.lane]
            continue
        if op.kind == "free":
            if home[op.writes[0]] is HOST:
                continue
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
