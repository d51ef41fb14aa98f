"""A group's reductions on their way: launched on their lanes, and what they keep alive meanwhile.

jobs ── launch ──> COMPUTE     allocate, stage
                   REDUCE      divide, reduce-scatter, cast, deliver          ──> scattered
                   ALL_REDUCE  all-reduce, hook, cast, deliver (with copies)  ──> done
                   PendingReduction: the jobs, and both events

Where all lanes are one, as on a CPU, all is over when the launch returns: nothing is pending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2.core.program import Job, Program, Step
from fsdp2.core.progress import communication_error
from fsdp2.core.reduction import COLLECTIVES, SegmentReduction
from fsdp2.core.streams import ALL_REDUCE, COMPUTE, REDUCE


@dataclass(slots=True)
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


def launch_on_lanes(
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
    reduces = all_reduces = False
    for reduction, job in jobs:
        program = reduction.full if all_reduce else reduction.partial
        work.append((program, reduction, job))
        reduces = reduces or bool(program.reduce)
        all_reduces = all_reduces or bool(program.all_reduce)
        _run(program.compute, reduction, job, group.name)
    if not (reduces or all_reduces):
        return None
    event = streams.record(COMPUTE, "gradients staged")
    streams.wait(REDUCE, event, "reduction after compute")
    with streams.on(REDUCE):
        for program, reduction, job in work:
            _run(program.reduce, reduction, job, group.name)
    scattered = done = streams.record(REDUCE, "reduction done")
    if all_reduces:
        streams.wait(ALL_REDUCE, scattered, "all-reduce after reduce-scatter")
        with streams.on(ALL_REDUCE):
            for program, reduction, job in work:
                _run(program.all_reduce, reduction, job, group.name)
        done = streams.record(ALL_REDUCE, "all-reduce done")
    return PendingReduction(group, jobs, scattered, done, _host_steps(work))


def launch_inline(group: Any, jobs: list[tuple[SegmentReduction, Job]], all_reduce: bool) -> None:
    """As `launch_on_lanes` where all lanes are one, as on a CPU: on return, all is delivered."""
    for reduction, job in jobs:
        program = reduction.full if all_reduce else reduction.partial
        _run(program.inline, reduction, job, group.name)
        reduction.release()


def _run(steps: Sequence[Step], reduction: SegmentReduction, job: Job, name: str) -> None:
    """Run a lane's steps; an exception names the group, or a sparse gradient."""
    running: Step | None = None
    try:
        for running in steps:
            running(reduction, job)
    except RuntimeError as error:
        _refuse_sparse(reduction, job, error)
        operation = COLLECTIVES.get(running)
        if operation is None or isinstance(error, torch.OutOfMemoryError):
            raise
        raise communication_error(operation, name, error) from error


def _refuse_sparse(reduction: SegmentReduction, job: Job, error: RuntimeError) -> None:
    """Looked for where staging has raised: before, it would be a look at each gradient."""
    for member, grad in zip(reduction.members, job.grads, strict=False):  # none once staged
        if isinstance(grad, torch.Tensor) and grad.layout != torch.strided:
            raise ValueError(
                f"the gradient of parameter '{member.name}' is sparse, and only dense ones are "
                f"reduced; make its module with sparse=False, or pass it in ignored_params"
            ) from error


def _host_steps(
    work: list[tuple[Program, SegmentReduction, Job]],
) -> list[tuple[Step, SegmentReduction, Job]]:
    return [(step, reduction, job) for program, reduction, job in work for step in program.host]
