"""Replacements of lanes and memory while a step is rehearsed on the ``meta`` device.

    fully_shard(…, mesh=<of "meta">)  ──  Stage(streams, kernels), while one is set

A rehearsal runs a whole step, including autograd, on tensors that have no memory. The planned
device has lanes and transient memory: the caller provides objects that record both
(`fsdp2.tracing.paper`). Groups created in a rehearsal keep its stage.
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
    """The objects on which groups on ``meta`` run: lanes and memory of the planned device."""

    streams: Streams
    kernels: Kernels


stage: Stage | None = None
"""The stage of the running rehearsal."""


@contextmanager
def rehearsing(on: Stage) -> Iterator[None]:
    """Let groups that are made inside run on a stage; a process makes one plan at a time."""
    global stage
    if stage is not None:
        raise coded(
            RuntimeError,
            "plan-rehearsal",
            "another plan is being made in this process; wait until it has ended",
        )
    stage = on
    try:
        yield
    finally:
        stage = None
