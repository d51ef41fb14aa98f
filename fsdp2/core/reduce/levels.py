"""The reduce-scatter between nodes, where masters are sharded over all ranks of two levels.

    sums inside a node    [ rows of A | rows of B | marks ]          job.flat
      + partial sums ── pad, interleave ──> [nodes, n + marks]       on ALL_REDUCE
      ══ one reduce-scatter ══> [ piece of A | piece of B | marks ]  job.flat from then on

It stands where HSDP all-reduces. Earlier micro-batches leave partial sums inside the node; their
gradients cross nodes once, with those of the last.

In fewer bytes, each rank sums messages, as inside a node; marks have a collective then:

    [nodes, n] ── encode ──> a message for each node ══ one all-to-all ══> one of each node
      ── decode, sum in fp32 ──> pieces      marks ══ a separate reduce-scatter ══> marks

Two reductions of a group may be between nodes at the same time, as two all-reduces may: each has
its own memory for all that it sends and receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fsdp2.core.device.collectives import Collectives, ReduceKind, Work, collectives_of
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.device.streams import ALL_REDUCE, COMPUTE
from fsdp2.core.layout.layout import Slot
from fsdp2.core.reduce.program import BETWEEN_NODES, Crossing, Job, Op, PresenceMarks, Step
from fsdp2.core.reduce.reduction import ReduceContext
from fsdp2.core.reduce.spec import Division, ReductionSpec, lay_flat
from fsdp2.core.reduce.transport import RANK_MAJOR, fill_rows, packing

STAGING = "reduce-scatter input between nodes"


def context_between(
    between: Collectives,
    slots: Sequence[Slot],
    spec: ReductionSpec,
    kind: ReduceKind,
    kernels: Kernels,
) -> ReduceContext:
    """That of the ``slots`` of pieces, scattered over ranks that share rows."""
    dtype, collectives = spec.reduce_dtype, collectives_of(spec.reduce_dtype, between)
    # Marks follow pieces even if these are empty: nothing is encoded then.
    codec = spec.between_codec if any(slot.shard_numel for slot in slots) else None
    flat = lay_flat(slots, collectives.rank, dtype, True, True, False, codec is None, between=True)
    marks = PresenceMarks(collectives.size, flat, (dtype,), spec.hook is not None, kernels)
    # Sums of a node are packed, which are in the reduce dtype already.
    own = replace(spec, grad_dtype=dtype, codec=codec)
    # The division before the sums is done inside the node, the one after them at the end.
    division = Division(None, kind, kind, None)
    return ReduceContext(
        slots, 0, own, division, flat, marks, codec is None, False, collectives, kernels
    )


def cross_nodes(context: ReduceContext, inside: PresenceMarks, hold: Step) -> list[Op]:
    """The operations that replace HSDP's all-reduce; the marks ``inside`` are always present."""
    slots, spec, kernels, marks = context.slots, context.spec, context.kernels, context.marks
    size, dtype = context.collectives.size, spec.reduce_dtype
    assert marks is not None
    width, pack = packing(context, lambda slot, grad: grad.reshape(size, slot.shard_numel))
    new_rows = kernels.bind_empty((size, width), dtype, STAGING)
    new_messages, send = _sending(context, marks, width)

    def allocate(job: Job) -> None:
        """No memory is made on the other lane (invariant I2)."""
        crossing = Job([], job.present)
        hold(crossing)
        job.kept = crossing.kept
        rows = new_rows()
        made = [
            None
            if slot.dim == 0 or slot.in_order or not slot.shard_numel
            else kernels.zeros((size, slot.shard_numel), dtype, RANK_MAJOR)
            for slot in slots
        ]
        if job.seeks:  # instead of the marks of a rank that lacks nothing
            sent = kernels.zeros((size * marks.width,), dtype, "marks of a node")
            crossing.marks = sent, sent
        job.between = Crossing(crossing, rows, made, [new() for new in new_messages])

    def scatter_between(job: Job) -> Work | None:
        assert job.between is not None
        crossing, rows, made, _ = job.between
        if crossing.marks is not None:
            sent, found = crossing.marks[0], inside.within(job.flat).narrow(0, 0, len(slots))
            places = [sent.narrow(0, n * marks.width, len(slots)) for n in range(size)]
            kernels.copy_many(places, [found] * size)
        crossing.grads = [
            own if buffer is None else fill_rows(kernels, slot, own, buffer)
            for slot, own, buffer in zip(slots, job.outputs, made, strict=True)
        ]
        pack(crossing, rows, dtype)
        # From here on, the job's are pieces; its sums, which the collective reads, live on
        job.partial = (job.partial, job.flat, job.between)
        work = send(job.between)
        job.flat, job.outputs, job.between = crossing.flat, crossing.outputs, None
        if job.seeks:
            job.found = marks.within(job.flat)
        return work

    return [
        Op(COMPUTE, "allocate pieces", allocate),
        Op(ALL_REDUCE, BETWEEN_NODES, scatter_between),
    ]


def _sending(
    context: ReduceContext, marks: PresenceMarks, width: int
) -> tuple[list[Callable[[], torch.Tensor]], Callable[[Crossing], Work | None]]:
    """How packed rows are sent: what makes memory for messages, and what uses all."""
    kernels, collectives, codec = context.kernels, context.collectives, None
    scatter = collectives.bind_reduce_scatter(context.division.kind)
    if context.spec.codec is not None:
        from fsdp2.core.codecs.codec import NUMBERS, REDUCED  # who uses none loads none

        assert context.spec.reduce_dtype in NUMBERS
        codec = REDUCED[context.spec.codec]

    def send(crossing: Crossing) -> Work | None:
        return scatter(crossing.job.flat, crossing.rows.view(-1))

    def send_coded(crossing: Crossing) -> Work | None:
        job, (sent, received) = crossing.job, crossing.messages
        assert codec is not None
        kernels.transform(codec.encode, sent, crossing.rows)
        work = collectives.bind_all_to_all(received, sent)()
        # Decoding follows at once: `_run` waits only for what the operation returns.
        if work is not None:
            work.wait()
        kernels.transform(codec.total, job.flat.narrow(0, 0, width), received)
        return scatter(marks.within(job.flat), marks.of(job)[0])

    if codec is None:
        return [], send
    shape = (collectives.size, codec.nbytes(width))
    new = kernels.bind_empty(shape, torch.uint8, "messages between nodes")
    return [new, new], send_coded
