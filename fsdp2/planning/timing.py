"""When each operation of a rehearsed step runs on a machine, and what waits meanwhile.

    Recording + Hardware ── schedule ──> Timing(spans, stalls, times), by `record.replay`

Collectives of one process group run one at a time. If lanes are one, as on a CPU, all operations
run one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2.planning.hardware import Hardware
from fsdp2.tracing.paper.recording import Recording
from fsdp2.tracing.record.notes import COLLECTIVE, HOST, VIEW, Operation
from fsdp2.tracing.record.replay import Cost, Replay, replay

HOST_BANDWIDTH = 2.0e10
"""Bytes a second of what the host computes on its own memory, such as an offloaded optimizer."""


@dataclass
class Timing(Replay):
    """A step in time, in seconds."""

    stragglers: float = 0.0

    @property
    def step(self) -> float:
        """When all lanes and the host are done, and the slowest rank."""
        return self.end + self.stragglers


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


@dataclass(frozen=True)
class UnitTimes:
    """The times of a unit per step, in seconds, over all micro-batches.

    Attributes:
        name: the unit's name.
        compute: its operators.
        gathers: the number of its all-gathers.
        gather: its all-gathers.
        gather_exposed: the time for which compute waits for them.
        reduction: its reduce-scatters and all-reduces.
        reduction_exposed: the time for which compute waits for them.
        nbytes: the bytes of its collectives, counted as full tensors.
    """

    name: str
    compute: float
    gathers: int
    gather: float
    gather_exposed: float
    reduction: float
    reduction_exposed: float
    nbytes: int


def schedule(recording: Recording, hardware: Hardware, world: int) -> Timing:
    """When everything runs."""

    def cost(note: Operation) -> Cost:
        launch = hardware.host_collective if note.kind == COLLECTIVE else hardware.host_op
        if note.lane is HOST:
            return Cost(None, launch + note.nbytes / HOST_BANDWIDTH)
        if note.kind == VIEW:
            return Cost(None, launch)
        if note.kind == COLLECTIVE:
            ranks = recording.groups[note.group]
            return Cost(
                hardware.collective(note.name, note.nbytes, ranks, world), launch, note.group
            )
        return Cost(hardware.compute(note, world), launch)

    found = replay(recording.notes, cost, recording.asynchronous)
    return Timing(**vars(found), stragglers=found.end * hardware.waits_for_slowest(world))
