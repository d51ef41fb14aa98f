"""When each operation of a rehearsed step runs on a machine, and what waits meanwhile.

    Recording + Hardware ── schedule ──> Replay, Times      Replay ── drawn ──> Timeline

Collectives of one process group run one at a time. If lanes are one, as on a CPU, all operations
run one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp2.core.facts import Lane
from fsdp2.planning.hardware import Hardware
from fsdp2.planning.memory import Ledger
from fsdp2.tracing import Memory, Timeline
from fsdp2.tracing.paper.recording import Recording
from fsdp2.tracing.record.notes import COLLECTIVE, COPY, HOST, VIEW, Allocation, Free, Operation
from fsdp2.tracing.record.replay import Cost, Replay
from fsdp2.tracing.timeline import COMPUTE

MICRO = 1e6
"""µs of a second."""

HOST_BANDWIDTH = 2.0e10
"""Bytes a second of what the host computes on its own memory, such as an offloaded optimizer."""


@dataclass(frozen=True)
class Times:
    """The times of a step on one rank, in seconds.

    Attributes:
        step: the whole step.
        compute: the user's operators, on the device.
        copies: the engine's casts and copies, on the compute stream.
        communication: all collectives, hidden or not.
        exposed: the communication for which compute waits.
        host: the time for which compute is idle because of the host.
        stragglers: the time for which it waits for slower ranks, on average.
        forward: the user's operators in forward.
        backward: the user's operators in backward.
        optimizer: the user's operators in the optimizer's step.
    """

    step: float
    compute: float
    copies: float
    communication: float
    exposed: float
    host: float
    stragglers: float
    forward: float
    backward: float
    optimizer: float


def schedule(recording: Recording, hardware: Hardware, world: int) -> tuple[Replay, Times]:
    """When everything runs, and the sums of it."""
    by_phase = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    copies = communication = 0.0

    def cost(note: Operation) -> Cost:
        nonlocal copies, communication
        launch = hardware.host_collective if note.kind == COLLECTIVE else hardware.host_op
        if note.lane is HOST:
            return Cost(None, (launch + note.nbytes / HOST_BANDWIDTH) * MICRO)
        if note.kind == VIEW:
            return Cost(None, launch * MICRO)
        if note.kind == COLLECTIVE:
            ranks = recording.groups[note.group]
            seconds = hardware.collective(note.name, note.nbytes, ranks, world)
            communication += seconds
            return Cost(seconds * MICRO, launch * MICRO, note.group)
        seconds = hardware.compute(note, world)
        if note.kind != COPY:
            by_phase[note.phase] += seconds
        elif note.lane is Lane.COMPUTE:
            copies += seconds
        return Cost(seconds * MICRO, launch * MICRO)

    found = Replay(recording.notes, cost, _named, recording.groups, recording.asynchronous)
    compute, end = sum(by_phase.values()), found.end / MICRO
    exposed = sum(wait.duration for wait in found.waits if wait.lane == COMPUTE) / MICRO
    stragglers = end * hardware.waits_for_slowest(world)
    host = max(end - compute - copies - exposed, 0.0)
    step = end + stragglers
    times = (step, compute, copies, communication, exposed, host, stragglers)
    return found, Times(*times, **by_phase)


def _named(note: Operation) -> tuple[str, str]:
    name = note.name if note.kind == COLLECTIVE else COPY if note.kind == COPY else note.phase
    return name, note.unit


def drawn(recording: Recording, step: Replay, facts: Mapping[str, str | int]) -> Timeline:
    """A planned step as a timeline: the same data, file and page as of a real one."""
    ledger = Ledger(recording)
    memory: dict[float, dict[str, int]] = {}
    for note, time in zip((None, *recording.notes), (0.0, *step.times), strict=True):
        if not isinstance(note, Allocation | Free | None):
            continue
        ledger.take(note)
        # The fullest state of a moment counts, so that the picture has the peak.
        if sum(memory.get(time, {}).values()) <= ledger.live:
            memory[time] = {name: max(total, 0) for name, total in ledger.totals.items()}
    return step.timeline([Memory(time, totals) for time, totals in memory.items()], facts)
