"""How gradients are reduced in fewer bytes: each rank sums the messages of all ranks itself.

    gradients ── pad, cast, interleave ──> [ranks, n] ── encode ──> a message for each rank
      ══ one all-to-all ══> a message of each rank ── decode, sum in fp32 ──> flat result

A collective cannot add encoded numbers. Each rank decodes and adds instead, in
fp32 and in the order of ranks, so that a sum does not depend on who sent first. Marks, whose sums
must be whole numbers, have a separate collective.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from fsdp2.core.codecs.blocks import Bytes, Nibbles
from fsdp2.core.codecs.codec import ALIGNMENT, NUMBERS, Codec
from fsdp2.core.codecs.rotated import BLOCK, Rotated
from fsdp2.core.codecs.rounded import Rounded, Whole
from fsdp2.core.device.buffers import TransientBuffer
from fsdp2.core.pieces import round_up
from fsdp2.core.reduce.feedback import Feedback, Units
from fsdp2.core.reduce.program import Job
from fsdp2.core.reduce.reduction import ReduceContext, ReduceTransport
from fsdp2.core.reduce.transport import PackingReduce

STAGING = "coded gradients"


class CodedReduce(PackingReduce):
    """Gradients are sent as messages of a codec.

        staging   [ [ranks, n] in the reduce dtype | a message for each rank | one of each rank ]

    Attributes:
        codec: encodes the messages.
    """

    codec: ClassVar[Codec]
    carries_marks = False
    unstages = True
    staging: TransientBuffer

    def _bind(self, context: ReduceContext) -> None:
        super()._bind(context)
        size, dtype = self.collectives.size, self.reduce_dtype
        assert dtype in NUMBERS
        codec = self.codec
        if context.spec.rotate:
            codec = Rotated(codec, context.spec.device or torch.device("cpu"))
        self._encode, self._total = codec.encode, codec.total
        nbytes = codec.nbytes(self.width)
        start = round_up(size * self.width * dtype.itemsize, ALIGNMENT)
        self.staging = staging = self.kernels.transient(start + 2 * size * nbytes, STAGING)
        self._rows = staging.view(dtype, 0, (size, self.width))
        self._sent = staging.view(torch.uint8, start, (size, nbytes))
        self._received = staging.view(torch.uint8, start + size * nbytes, (size, nbytes))
        staging.release()
        self._exchange = self.collectives.bind_all_to_all(self._received, self._sent)
        if context.spec.feedback:
            starts, slots = context.flat.starts, context.slots
            places = [(start, s.shard_numel) for start, s in zip(starts, slots, strict=True)]
            units = Units(size, self.before)
            self.feedback = Feedback(codec, units, self.width, places, self.kernels)

    @classmethod
    def row_bytes(cls, numel: int, itemsize: int, rotate: bool = False) -> int:
        return cls.codec.nbytes(round_up(numel, BLOCK) if rotate else numel)

    def stage(self, job: Job) -> None:
        if self.feedback is not None:
            self.feedback.hold()
        self.staging.acquire()
        self.pack(job, self._rows)

    def divide(self, job: Job) -> None:
        assert self.before is not None
        self.kernels.divide(self._rows, self.before)

    def reduce(self, job: Job) -> None:
        if self.feedback is None:
            self.kernels.transform(self._encode, self._sent, self._rows)
        else:
            self.feedback.encode(self._sent, self._rows)
        work = self._exchange()
        if work is not None:
            work.wait()

    def unstage(self, job: Job) -> None:
        assert job.flat is not None
        sums = job.flat.narrow(0, 0, self.width)
        self.kernels.transform(self._total, sums, self._received)


class RoundedReduce(CodedReduce):
    """Messages of bfloat16."""

    codec = Rounded()


class WholeReduce(CodedReduce):
    """Messages of fp32."""

    codec = Whole()


class BytesReduce(CodedReduce):
    """Messages of 8-bit integers, and a scale per block."""

    codec = Bytes()


class NibblesReduce(CodedReduce):
    """Messages of 4-bit integers, and a scale per block."""

    codec = Nibbles()


CODED: dict[str, type[ReduceTransport]] = {
    kind.codec.name: kind for kind in (WholeReduce, RoundedReduce, BytesReduce, NibblesReduce)
}
"""The transports of gradients in fewer bytes, by the name that `Wire.reduce` gives."""
