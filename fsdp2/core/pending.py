"""A group's reductions on their way: launched on their lanes, and what they keep alive meanwhile.

jobs ── launch ──> COMPUTE     allocate, stage
                   REDUCE      divide, reduce-scatter, cast, deliver          ──> scattered
                   ALL_REDUCE  all-reduce, hook, cast, deliver (with copies)  ──> done
                   PendingReduction: the jobs, and both events
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fsdp2.core.progress import communication_error
from fsdp2.core.reduction import COLLECTIVES, Job, Program, SegmentReduction, Step
from fsdp2.core.streams import Lane


@dataclass
class PendingReduction:
    """A group's reduction on its way.

    Attributes:
        group: whose gradients it reduces.
        jobs: what it works on: alive until COMPUTE is behind it (invariant I7).
        scattered: event behind the reduce-scatter: what it read may be freed.
        done: event behind everything; the same one where nothing follows the reduce-scatter.
        host: the steps by which the host delivers what was copied to it.
    """

    group: Any
    jobs: list[tuple[SegmentReduction, Job]]
    scattered: Any
    done: Any
    host: list[tuple[Step, SegmentReduction, Job]]

    def release_inputs(self) -> None:
        """Free what the reduce-scatters read, once COMPUTE is behind ``scattered``."""
        for reduction, job in self.jobs:
            reduction.release()
            job.grads = []

    def release_rest(self) -> None:
        """Free what else is not delivered, once COMPUTE is behind ``done``."""
        for _, job in self.jobs:
            job.flat = job.scattered = job.result = job.partial = None
        self.jobs = []

    def deliver(self) -> None:
        """Deliver what was copied to the host, once the host is behind ``done``."""
        with torch.no_grad():
            for step, reduction, job in self.host:
                step(reduction, job)


def launch(
    group: Any, jobs: list[tuple[SegmentReduction, Job]], all_reduce: bool
) -> PendingReduction | None:
    """Run the jobs' programs, each step on its lane.

    Args:
        group: whose gradients they reduce, on its lanes.
        jobs: what `SegmentReduction.collect` took.
        all_reduce: whether copies are summed too, not kept as partial sums for later.

    Returns:
        What is on its way, or ``None`` if nothing is: one rank has nothing to communicate.
    """
    streams = group.streams
    work: list[tuple[Program, SegmentReduction, Job]] = []
    reduces = all_reduces = delivers = False
    for reduction, job in jobs:
        program = reduction.full if all_reduce else reduction.partial
        work.append((program, reduction, job))
        reduces = reduces or bool(program.reduce)
        all_reduces = all_reduces or bool(program.all_reduce)
        delivers = delivers or bool(program.host)
        for step in program.compute:
            step(reduction, job)
    if not (reduces or all_reduces):
        return None
    event = streams.record(Lane.COMPUTE, "gradients staged")
    streams.wait(Lane.REDUCE, event, "reduction after compute")
    running: Step | None = None
    try:
        with streams.on(Lane.REDUCE):
            for program, reduction, job in work:
                for running in program.reduce:
                    running(reduction, job)
        scattered = done = streams.record(Lane.REDUCE, "reduction done")
        if all_reduces:
            streams.wait(Lane.ALL_REDUCE, scattered, "all-reduce after reduce-scatter")
            with streams.on(Lane.ALL_REDUCE):
                for program, reduction, job in work:
                    for running in program.all_reduce:
                        running(reduction, job)
            done = streams.record(Lane.ALL_REDUCE, "all-reduce done")
    except RuntimeError as error:
        operation = COLLECTIVES.get(running)
        if operation is None or isinstance(error, torch.OutOfMemoryError):
            raise
        raise communication_error(operation, group.name, error) from error
    host = [(s, r, job) for p, r, job in work for s in p.host] if delivers else []
    return PendingReduction(group, jobs, scattered, done, host)
