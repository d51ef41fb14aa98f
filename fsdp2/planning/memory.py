"""The memory allocated at each moment of a rehearsed step, and its peak.

    Recording ── follow ──> Memory(peak, before, host)

Live bytes are those of tensors. An allocator rounds sizes up to multiples: that is counted
separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsdp2.core.facts import round_up
from fsdp2.tracing.paper.recording import Recording
from fsdp2.tracing.record.notes import Allocation, Free, Operation


@dataclass(frozen=True)
class Moment:
    """The memory allocated at one moment.

    Attributes:
        live: bytes of tensors on the device.
        rounded: bytes that the allocator reserves for them.
        categories: live bytes by category.
        unit: the unit whose operation ran last; "" for none.
        phase: "forward", "backward" or "optimizer".
        operation: the name of that operation.
        note: index in `Recording.notes`.
    """

    live: int
    rounded: int
    categories: Mapping[str, int]
    unit: str
    phase: str
    operation: str
    note: int

    @property
    def where(self) -> str:
        """A description of the moment."""
        if self.phase == "optimizer":
            return "the optimizer's step"
        if not self.phase:
            return "the beginning of the step"
        of = f"{self.unit}'s " if self.unit else "the "
        return of + (self.phase if self.unit else "loss" if self.phase == "forward" else self.phase)


@dataclass(frozen=True)
class Memory:
    """A step's memory.

    Attributes:
        peak: the moment with the most live bytes.
        before: the memory allocated between steps.
        host: the peak in CPU memory: offloaded shards and their gradients and states.
    """

    peak: Moment
    before: Moment
    host: int


class Ledger:
    """The memory allocated now, by category."""

    def __init__(self, recording: Recording, rounding: int = 512) -> None:
        self.totals: Counter[str] = Counter()
        self.live = self.rounded = self.host = 0
        self._categories, self._rounding = recording.categories, rounding
        self._sizes: dict[int, tuple[int, bool]] = {}
        for note in recording.before:
            self.take(note)

    def take(self, note: object) -> None:
        """Follow one note; no-op for those that are not about memory."""
        if isinstance(note, Allocation):
            self._sizes[note.number] = (note.nbytes, note.host)
            self._add(note.number, note.nbytes, note.host, 1)
        elif isinstance(note, Free):
            nbytes, host = self._sizes.pop(note.number)
            self._add(note.number, nbytes, host, -1)

    def _add(self, number: int, nbytes: int, host: bool, sign: int) -> None:
        if host:
            self.host += sign * nbytes
            return
        self.live += sign * nbytes
        self.rounded += sign * round_up(nbytes, self._rounding)
        self.totals[self._categories[number]] += sign * nbytes

    def moment(self, last: Operation | None, note: int) -> Moment:
        """Now."""
        found = {name: total for name, total in self.totals.items() if total}
        unit, phase, name = (last.unit, last.phase, last.name) if last else ("", "", "")
        return Moment(self.live, self.rounded, found, unit, phase, name, note)


def follow(recording: Recording, rounding: int = 512) -> Memory:
    """The peak of a step, and what is there without one."""
    ledger = Ledger(recording, rounding)
    before = peak = ledger.moment(None, -1)
    host, last = ledger.host, None
    for index, note in enumerate(recording.notes):
        if isinstance(note, Operation):
            last = note
            continue
        ledger.take(note)
        host = max(host, ledger.host)
        if ledger.live > peak.live:
            peak = ledger.moment(last, index)
    # The operation that needs an allocation is recorded after it.
    rest = (note for note in recording.notes[peak.note + 1 :] if isinstance(note, Operation))
    needs = next(rest, None) if peak is not before else None
    if needs is not None:
        peak = replace(peak, unit=needs.unit, phase=needs.phase, operation=needs.name)
    return Memory(peak, before, host)
