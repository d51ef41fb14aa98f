"""How a segment is gathered in fewer bytes: a packed one, whose rows are messages of a codec.

    shard ── encode ──> own message ══ one all-gather ══> messages ── decode ──> [ranks, n]
                                                         ── copy, as packed ──> slots

A rank decodes its own message, too: all ranks compute with the same bits.
"""

from __future__ import annotations

from typing import ClassVar

from fsdp2.core.codecs.blocks import Bytes, Nibbles
from fsdp2.core.codecs.codec import NUMBERS, Codec
from fsdp2.core.device.collectives import Work
from fsdp2.core.gather.messages import Messages
from fsdp2.core.gather.transport import PackedTransport, SegmentTransport

MESSAGES = "coded shards"


class CodedGather(PackedTransport):
    """Shards are sent as messages of a codec.

    Attributes:
        codec: encodes the messages.
    """

    codec: ClassVar[Codec]

    def _bind(self) -> None:
        super()._bind()
        segment, ranks = self.segment, self.collectives.size
        assert {segment.shard_dtype, segment.full_dtype} <= {*NUMBERS}
        self.casts = True  # it encodes in front of the collective
        width = segment.shard_numel
        nbytes = self.codec.nbytes(width)
        self._messages = Messages(nbytes, self.collectives, self.kernels, MESSAGES)
        self._packed.acquire()
        self._numbers = self._packed.view(segment.full_dtype, 0, (ranks, width))
        shard = (segment.shard_dtype, segment.shard_byte_offset, (1, width))
        self._shards = self._shard.view(*shard)
        self._packed.release()
        self._messages.memory.release()

    @classmethod
    def row_bytes(cls, numel: int, itemsize: int) -> int:
        return cls.codec.nbytes(numel)

    def acquire(self) -> None:
        super().acquire()
        self._messages.memory.acquire()

    def copy_in(self) -> None:
        self.kernels.transform(self.codec.encode, self._messages.own, self._shards)

    def gather(self) -> Work | None:
        return self._messages.gather()

    def copy_out(self) -> None:
        self.kernels.transform(self.codec.decode, self._numbers, self._messages.every)
        super().copy_out()

    def release(self) -> None:
        super().release()
        self._messages.memory.release()


class BytesGather(CodedGather):
    """Messages of 8-bit integers, and a scale per block."""

    codec = Bytes()


class NibblesGather(CodedGather):
    """Messages of 4-bit integers, and a scale per block: much is lost of weights."""

    codec = Nibbles()


CODED: dict[str, type[SegmentTransport]] = {
    kind.codec.name: kind for kind in (BytesGather, NibblesGather)
}
"""The transports of encoded segments, by the name in `Wire.gather`."""
