"""A plan as a timeline: the same data, file and page as of a real run (`fsdp2.trace`)."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp2.planning.memory import samples
from fsdp2.planning.timing import Timing
from fsdp2.tracing import Memory, Timeline
from fsdp2.tracing.drawing import draw
from fsdp2.tracing.paper.recording import Recording
from fsdp2.tracing.record.notes import COLLECTIVE, COPY, Operation

MICRO = 1e6


def drawn(recording: Recording, timing: Timing, facts: Mapping[str, str | int]) -> Timeline:
    """A planned step."""

    def named(note: Operation) -> tuple[str, str]:
        name = note.name if note.kind == COLLECTIVE else COPY if note.kind == COPY else note.phase
        return name, note.unit

    memory: dict[float, dict[str, int]] = {}
    for index, totals in samples(recording):
        time = timing.times[index] * MICRO if index >= 0 else 0.0
        # Of one moment the fullest state counts, so that the picture has the peak.
        if time not in memory or sum(memory[time].values()) <= sum(totals.values()):
            memory[time] = {name: max(total, 0) for name, total in totals.items()}
    found = [Memory(time, totals) for time, totals in memory.items()]
    return draw(
        timing,
        named,
        found,
        metadata=facts,
        groups=recording.groups,
        scale=MICRO,
        asynchronous=recording.asynchronous,
    )
