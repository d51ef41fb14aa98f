"""What stands for lanes and memory while a step is rehearsed on the ``meta`` device.

    fully_shard(…, mesh=<of "meta">)  ──  Stage(streams, kernels), while one is set

A rehearsal runs a whole step, autograd included, on tensors that have no memory. The device that
is planned for has lanes, and memory that comes and goes: who rehearses brings what notes both
(`fsdp2.paper`). Groups that were made in a rehearsal keep its stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fsdp2.core.device.kernels import Kernels
from fsdp2.core.device.streams import Streams
from fsdp2.core.errors import coded

META = torch.device("meta")


@dataclass(frozen=True)
class Stage:
    """What groups on ``meta`` run on.

    Attributes:
        streams: lanes of the device that is planned for.
        kernels: its memory and copies.
    """

    streams: Streams
    kernels: Kernels


stage: Stage | None = None
"""Of the rehearsal under way."""


@contextmanager
def rehearsing(on: Stage) -> Iterator[None]:
    """Let groups that are made inside run on a stage.

    Raises:
        RuntimeError: another rehearsal is under way in this process.
    """
    global stage
    if stage is not None:
        raise coded(
            RuntimeError,
            "plan-rehearsal",
            "a rehearsal is under way in this process; wait for its end",
        )
    stage = on
    try:
        yield
    finally:
        stage = None
