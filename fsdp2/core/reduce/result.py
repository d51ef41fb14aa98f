"""From the flat sums to ``.grad``: hook, division, average, cast, copy to the host, delivery.

flat   [ rows of A | rows of B | marks ]    reduce dtype
         ── hook ── divide ── average ──> the same
result [ rows of A | rows of B | marks ]    the gradient's dtype, where that is another one
         ── to host ──> the same in CPU memory, where gradients are offloaded
rows of A, of B  ──> ``.grad`` of A, of B

The average is over copies of the model that the mesh does not have (`fsdp2.elastic`): a step of its
own (decision 31). Marks are averaged too, so they say whether any copy had a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fsdp2.core.device.kernels import Kernels
from fsdp2.core.device.streams import COMPUTE
from fsdp2.core.params.gradients import Gradients
from fsdp2.core.reduce.presence_marks import PresenceMarks
from fsdp2.core.reduce.program import BEHIND, HOST, Job, KeptGradients, Op, Step
from fsdp2.core.reduce.reduction import (
    ReduceContext,
    allocation,
    deliver,
    deliver_missed,
    views_of,
)

Views = Callable[[torch.Tensor], list[torch.Tensor]]
"""Makes the rows of each member in a flat tensor."""


def ending(
    gradients: Gradients, context: ReduceContext, last: ReduceContext, lane: int
) -> tuple[KeptGradients | None, Op, list[Op]]:
    """The operations after the sums, on ``lane``; the host delivers what is copied to it.

    ``last`` is the context of the last collective. Returns the memory that is kept, the operation
    that gives sums their memory, and the operations.
    """
    spec, kernels, marks = context.spec, context.kernels, context.marks
    shape, dtype, after = last.flat.shape, spec.result_dtype, context.division.after
    views = functools.partial(views_of, last.flat.runs)
    ops: list[Op] = []

    def add(name: str, run: Step, lane: int = lane, seeks: bool = False) -> None:
        ops.append(Op(lane, name, run, seeks))

    # Memory: kept, if it is free, or new
    kept, hold = None, allocation(last)
    if spec.keep:
        make = kernels.bind_empty(shape, dtype, "kept gradient")
        if spec.to_host:
            make = functools.partial(kernels.host_empty, shape, dtype, spec.pin)
        kept = KeptGradients(gradients, make, views)
    # Offloaded gradients are kept in CPU memory; sums on the device come and go.
    on_device = None if spec.to_host else kept
    if spec.casts:
        new = functools.partial(_allocate, kernels.bind_empty(shape, dtype, "sharded gradient"))
        if on_device is None:
            add("allocate result", new, COMPUTE)
        else:
            add("hold result", functools.partial(on_device.hold, _cast_there, new), COMPUTE)
    elif on_device is not None:
        hold_sums = functools.partial(on_device.hold, _sum_there, hold.run)
        hold = Op(COMPUTE, "hold flat", hold_sums)

    if spec.hook is not None:
        if marks is not None:  # before a hook that may lose marks
            add("fetch", marks.fetch, seeks=True)
        add("hook", functools.partial(_call_hook, spec.hook))
    if after is not None:
        divide = _divide_rows if context.alone else _divide_flat
        add("divide", functools.partial(divide, kernels, after))
    if spec.average is not None and last.marks is not None:  # divided sums cannot overflow
        add("average", functools.partial(_average, spec.average, last.marks))
    if spec.casts:
        add("cast", functools.partial(_cast, kernels, views))
    give = functools.partial(deliver, gradients, kernels)
    if spec.to_host:
        bring = functools.partial(_to_host, kernels, shape, spec.pin, views)
        if kept is None:
            add("to host", bring)
        else:
            copy_there = functools.partial(_copy_there, kernels)
            add("hold on host", functools.partial(kept.hold, copy_there, bring))
    add("deliver", give, HOST if spec.to_host else lane)
    if marks is not None:
        add("fetch", marks.fetch, seeks=True)
        missed = functools.partial(deliver_missed, gradients, marks, kernels)
        add("deliver missed", missed, HOST, seeks=True)
    if kept is not None:  # where lanes are several, `PendingReduction` does it before the host
        add("give back", kept.give_back, HOST, seeks=not spec.to_host)
        add("give back", kept.give_back, BEHIND)
    return kept, hold, ops


def _call_hook(hook: Callable[[torch.Tensor], None], job: Job) -> None:
    """Call the user's, on ALL_REDUCE."""
    hook(job.flat)


def _divide_flat(kernels: Kernels, factor: float, job: Job) -> None:
    kernels.divide(job.flat, factor)


def _divide_rows(kernels: Kernels, factor: float, job: Job) -> None:
    """Divide each member's rows, which lie in no flat tensor."""
    for rows in job.outputs:
        kernels.divide(rows, factor)


def _average(average: Callable[[torch.Tensor], bool], marks: PresenceMarks, job: Job) -> None:
    """Average over copies of the model, on ALL_REDUCE.

    ``average`` does it in place and tells whether this copy's own gradient counts. A copy whose
    gradient does not count gets exactly those that the others have: where it had one and they had
    none, the average is zero, and an optimizer would step only here.
    """
    if not average(job.flat):
        job.present = marks.present(job)


def _allocate(new: Callable[[], torch.Tensor], job: Job) -> None:
    """Memory of the cast, on COMPUTE."""
    job.result = new()


def _cast(kernels: Kernels, views: Views, job: Job) -> None:
    assert job.result is not None
    kernels.copy(job.result, job.flat)
    job.outputs = views(job.result) if job.kept is None else job.kept.rows


def _sum_there(job: Job, kept: KeptGradients) -> None:
    job.flat, job.outputs = kept.flat, kept.rows


def _cast_there(job: Job, kept: KeptGradients) -> None:
    job.result = kept.flat


def _copy_there(kernels: Kernels, job: Job, kept: KeptGradients) -> None:
    kernels.to_host(kept.flat, job.to_deliver())


def _to_host(kernels: Kernels, shape: tuple[int, ...], pin: bool, views: Views, job: Job) -> None:
    """Copy out, on the last lane; the host delivers what arrives."""
    source = job.to_deliver()
    target = kernels.host_empty(shape, source.dtype, pin)
    kernels.to_host(target, source)
    job.outputs = views(target)
