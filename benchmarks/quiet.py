"""How busy other processes kept the machine while a benchmark ran: what its figures are worth.

    watch = Watch()          when the benchmark starts
    watch.found()            when it has measured, and has waited for its children

Linux counts the time that all processors were busy (`/proc/stat`, proc(5)), and the time that each
process and the children for which it has waited used (`os.times`). The difference is what others
used. Time that a hypervisor gave to another machine is "steal". A load average says less: for a
minute it still holds the process that ran before, and it does not know a hypervisor.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

LIMIT = 0.1  # processors
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Found:
    """What others took, in processors, as a mean over the run.

    Attributes:
        others: used by processes that are neither the benchmark nor its children.
        stolen: given to other machines by the hypervisor.
    """

    others: float
    stolen: float

    @property
    def quiet(self) -> bool:
        """Whether figures of the run count."""
        return self.others + self.stolen <= LIMIT

    def __str__(self) -> str:
        used = (
            f"other processes used {self.others:.2f} processors, other machines {self.stolen:.2f}"
        )
        return f"quiet: {used}" if self.quiet else f"busy, repeat this run: {used}"


@dataclass(frozen=True)
class Times:
    """Seconds since some moment in the past.

    Attributes:
        busy: of all processors together, not idle.
        stolen: of all processors together.
        own: of this process and the children for which it has waited.
        wall: on the clock.
    """

    busy: float
    stolen: float
    own: float
    wall: float


class Watch:
    """What others take from now on."""

    def __init__(self) -> None:
        self._start = now()

    def found(self) -> Found | None:
        """What they took; ``None`` where the system does not tell."""
        end = now()
        return None if self._start is None or end is None else between(self._start, end)


def between(start: Times, end: Times) -> Found:
    """What others took from one moment to another."""
    wall = max(end.wall - start.wall, 1e-9)
    others = (end.busy - start.busy) - (end.own - start.own)
    return Found(max(others, 0.0) / wall, (end.stolen - start.stolen) / wall)


def now() -> Times | None:
    """Times up to now; ``None`` where the system does not tell them."""
    try:
        text = _STAT.read_text()
    except OSError:
        return None
    busy, stolen = processors(text, os.sysconf("SC_CLK_TCK"))
    return Times(busy, stolen, sum(os.times()[:4]), time.monotonic())


def processors(text: str, ticks: int) -> tuple[float, float]:
    """Busy and stolen seconds of all processors: the first line of /proc/stat.

    Its numbers: user, nice, system, idle, iowait, irq, softirq, steal, and guests, which user has.
    """
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.split()[1:9])
    return (user + nice + system + irq + softirq) / ticks, steal / ticks
