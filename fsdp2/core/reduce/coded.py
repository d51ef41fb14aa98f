"""How gradients are reduced in fewer bytes: each rank sums the messages of all ranks itself.

    gradients ── pad, cast, interleave ──> [ranks, n] ── encode ──> a message for each rank
      ══ one all-to-all ══> a message of each rank ── decode, sum in fp32 ──> flat result

    staging   [ [ranks, n] in the reduce dtype | a message for each rank | one of each rank ]

A collective cannot add encoded numbers: each rank decodes and adds in fp32 and in the order of
ranks. Marks, whose sums must be whole numbers, have a separate collective.
"""

from __future__ import annotations

import torch

from fsdp2.core.codecs.codec import (
    ALIGNMENT,
    NUMBERS,
    Bytes,
    Codec,
    Nibbles,
    Rotated,
    Rounded,
    Whole,
)
from fsdp2.core.device.collectives import Work
from fsdp2.core.pieces import round_up
from fsdp2.core.reduce.feedback import Feedback
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import ReduceContext, Way, operations, unify
from fsdp2.core.reduce.transport import packing

STAGING = "coded gradients"

CODED: dict[str, Codec] = {codec.name: codec for codec in (Whole(), Rounded(), Bytes(), Nibbles())}
"""The codecs of gradients, by the name that `Wire.reduce` gives."""


def codec_of(name: str, rotate: bool = False, device: torch.device | None = None) -> Codec:
    """The codec of gradients' messages, by the name of its format."""
    codec = CODED[name]
    return Rotated(codec, device or torch.device("cpu")) if rotate else codec


def reduce_coded(context: ReduceContext) -> Way:
    spec, kernels, size = context.spec, context.kernels, context.collectives.size
    dtype, before = spec.reduce_dtype, context.division.before
    assert spec.codec is not None
    assert dtype in NUMBERS
    codec = codec_of(spec.codec, spec.rotate, spec.device)
    encode, total = codec.encode, codec.total
    width, pack = packing(context)
    nbytes = codec.nbytes(width)
    # One buffer for all three: it is acquired and released once
    start = round_up(size * width * dtype.itemsize, ALIGNMENT)
    staging = kernels.transient(start + 2 * size * nbytes, STAGING)
    rows = staging.view(dtype, 0, (size, width))
    sent = staging.view(torch.uint8, start, (size, nbytes))
    received = staging.view(torch.uint8, start + size * nbytes, (size, nbytes))
    staging.release()
    exchange = context.collectives.bind_all_to_all(received, sent)
    feedback: Feedback | None = None
    if spec.feedback:
        numels = (slot.shard_numel for slot in context.slots)
        places = [*zip(context.flat.starts, numels, strict=True)]
        feedback = Feedback(codec, (size, before), width, places, kernels)

    def stage(job: Job) -> None:
        if feedback is not None:  # no memory is made on the other lane (invariant I2)
            feedback.hold()
        staging.acquire()
        pack(job, rows, unify(job, spec))

    def reduce(job: Job) -> Work | None:
        if feedback is None:
            kernels.transform(encode, sent, rows)
        else:
            feedback.encode(sent, rows)
        return exchange()

    def unstage(job: Job) -> None:
        kernels.transform(total, job.flat.narrow(0, 0, width), received)

    ops = operations(context, "coded", stage, reduce, unstage, [rows])
    return Way(ops, staging, feedback)
