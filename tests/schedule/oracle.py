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

from fsdp2.tracing.record import notes


def ancestors(trace: Sequence[notes.Note]) -> list[int]:
    """For each operation the set of those that have run when it starts."""
    before: list[int] = []
    previous: dict[notes.Place, int] = {}
    records: dict[int, int] = {}
    for position, op in enumerate(trace):
        parents = [previous[lane] for lane in {op.lane, notes.HOST} if lane in previous]
        if isinstance(op, notes.Signal):
            records[op.event] = position
        elif isinstance(op, notes.Await):
            parents.append(records[op.event])
        known = 0
        for parent in parents:
            known |= before[parent] | 1 << parent
        before.append(known)
        if not isinstance(op, notes.Allocation | notes.Free):  # the host's: no order
            previous[op.lane] = position
    return before


def unordered_conflicts(trace: Sequence[notes.Note]) -> list[str]:
    """Operations that conflict with an earlier one of the host's order and may overtake it."""
    before = ancestors(trace)
    accesses: dict[int, int] = {}
    writes: dict[int, int] = {}
    freed: dict[notes.Place, int] = dict.fromkeys(notes.PLACES, 0)  # accesses of freed buffers
    inherited: dict[int, int] = {}
    home: dict[int, notes.Place] = {}
    found = []
    for position, op in enumerate(trace):
        if isinstance(op, notes.Allocation):
            home[op.number] = op.lane
            inherited[op.number] = freed[op.lane]
        if isinstance(op, notes.Free) and home[op.number] is not notes.HOST:
            freed[home[op.number]] |= accesses.get(op.number, 0)
        if not isinstance(op, notes.Operation):
            continue
        read, written = ([buffer.number for buffer in some] for some in (op.reads, op.writes))
        needed = 0
        for buffer in read:
            needed |= writes.get(buffer, 0) | inherited[buffer]
        for buffer in written:
            needed |= accesses.get(buffer, 0) | inherited[buffer]
        if needed & ~before[position]:
            found.append(f"{position}: {op}")
        for buffer in (*read, *written):
            accesses[buffer] = accesses.get(buffer, 0) | 1 << position
        for buffer in written:
            writes[buffer] = writes.get(buffer, 0) | 1 << position
    return found
