"""Races in the record of a step: accesses of memory that no event orders.

    notes ── races ──> ["…", …]      empty if the schedule is right; a sentence each

Each lane carries a vector clock: the position in each lane that it is known to run after. An access
happens before another if the second's clock covers it. For each buffer the checker requires that
  - a read comes after the last write, and there was one;
  - a write comes after the last write and after every read since;
  - any access comes after all accesses of all buffers that were freed, in the host's order,
    before this one was allocated on the same lane: a caching allocator may have reused their memory
        at once;
  - no access comes after the free.

Two more clocks exist besides the lanes' clocks:
  - HOST, for operations that access only CPU memory: an optimizer that steps on offloaded shards, a
    gradient that arrived. An operation on a lane runs after the host's calls before it; the host
    runs after a lane only where it waits (`synchronize`). CPU memory is reused late enough: torch
    keeps page-locked memory until its copies have ended, and a copy with other memory has ended
    when its call returns.
  - USER, a stream of the user's, which the lanes know only by its events.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from fsdp2.tracing.record.notes import (
    HOST,
    PLACES,
    Allocation,
    Await,
    Note,
    Operation,
    Place,
    Signal,
)

Clock = tuple[int, ...]
_ZERO: Clock = (0,) * len(PLACES)


def races(notes: Iterable[Note]) -> list[str]:
    """The races of a step, such as of `VirtualDevice.without` one of its waits."""
    checker = Checker()
    for note in notes:
        checker.take(note)
    return checker.races


class _Life:
    """The accesses of an allocation so far."""

    def __init__(self, note: Allocation, after: Clock) -> None:
        self.name, self.lane = note.name, note.lane
        self.after = after  # all accesses of buffers whose memory this one may have
        self.write: tuple[Place, int] | None = None
        self.reads: dict[Place, int] = {}
        self.last = list(_ZERO)  # the last access on each lane


class Checker:
    """Follows the notes of a step, and keeps the ``races`` so far."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.events: dict[int, Clock] = {}
        self._lives: dict[int, _Life] = {}
        self._clocks: dict[Place, Clock] = dict.fromkeys(PLACES, _ZERO)
        self._released: dict[Place, Clock] = dict.fromkeys(PLACES, _ZERO)

    def take(self, note: Note) -> None:
        """Follow one note."""
        if isinstance(note, Operation):
            self._run(note)
        elif isinstance(note, Signal):
            self.events[note.event] = self._clocks[note.lane]
        elif isinstance(note, Await):
            self._clocks[note.lane] = _join(self._clocks[note.lane], self.events[note.event])
        elif isinstance(note, Allocation):
            self._lives[note.number] = _Life(note, self._released[note.lane])
        else:
            life = self._lives.pop(note.number)
            if life.lane is not HOST:  # CPU memory is reused late enough
                released = self._released[life.lane]
                self._released[life.lane] = _join(released, tuple(life.last))

    def _run(self, op: Operation) -> None:
        clock = list(self._clocks[op.lane])
        if self._clocks[HOST] is not _ZERO:  # the host, which issues it, has waited for a lane
            clock = list(map(max, clock, self._clocks[HOST]))
        clock[op.lane] += 1
        self._clocks[op.lane] = now = tuple(clock)
        for buffer in op.reads:
            life = self._alive(op, buffer)
            if life is not None:
                self._check_read(op, now, life)
        for buffer in op.writes:
            life = self._alive(op, buffer)
            if life is not None:
                self._check_write(op, now, life)

    def _alive(self, op: Operation, buffer: Allocation) -> _Life | None:
        found = self._lives.get(buffer.number)
        if found is None:
            self.races.append(f"{op.kind} uses a buffer that is not allocated")
        return found

    def _check_read(self, op: Operation, now: Clock, life: _Life) -> None:
        self._check_reuse(op, now, life)
        if life.write is None:
            self.races.append(f"{op.kind} reads {life.name}, which nothing wrote")
        elif now[life.write[0]] < life.write[1]:
            self.races.append(f"{op.kind} reads {life.name} while {_name(life.write)} writes it")
        life.reads[op.lane] = life.last[op.lane] = now[op.lane]

    def _check_write(self, op: Operation, now: Clock, life: _Life) -> None:
        self._check_reuse(op, now, life)
        said = f"{op.kind} writes {life.name} while"
        if life.write is not None and now[life.write[0]] < life.write[1]:
            self.races.append(f"{said} {_name(life.write)} writes it")
        for access in life.reads.items():
            if now[access[0]] < access[1]:
                self.races.append(f"{said} {_name(access)} reads it")
        # Whatever comes after this write comes after the reads before it.
        life.write = (op.lane, now[op.lane])
        life.reads.clear()
        life.last[op.lane] = now[op.lane]

    def _check_reuse(self, op: Operation, now: Clock, life: _Life) -> None:
        if all(map(operator.ge, now, life.after)):
            return
        for access in zip(PLACES, life.after, strict=True):
            if now[access[0]] < access[1]:
                said = f"{op.kind} uses {life.name}, whose memory {_name(access)} still uses"
                self.races.append(said)


def _join(a: Clock, b: Clock) -> Clock:
    return tuple(map(max, a, b))


def _name(access: tuple[Place, int]) -> str:
    return f"{access[0].name.lower()}#{access[1]}"
