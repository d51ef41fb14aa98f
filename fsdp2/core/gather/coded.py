"""How a segment is gathered in fewer bytes: in rows that are messages of a codec.

    shard ── encode ──> own message ══ one all-gather ══> messages ── decode ──> [ranks, n]
                                                         ── copy, as packed ──> slots

A rank decodes its own message, too: all ranks compute with the same bits.
"""

from __future__ import annotations

from functools import partial

import torch

from fsdp2.core.codecs.blocks import Bytes, Nibbles
from fsdp2.core.codecs.codec import ALIGNMENT, NUMBERS, Codec
from fsdp2.core.device.collectives import Collectives, Launch
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.gather.program import Gather
from fsdp2.core.gather.segments import SegmentViews, packed_rows
from fsdp2.core.pieces import round_up

MESSAGES = "coded shards"

CODED: dict[str, Codec] = {codec.name: codec for codec in (Bytes(), Nibbles())}
"""The codecs of parameters, by the name in `Wire.gather`. Much is lost of weights in 4 bits."""


def encoded(place: SegmentViews, codec: Codec) -> Gather:
    segment, kernels = place.segment, place.kernels
    assert {segment.shard_dtype, segment.full_dtype} <= {*NUMBERS}
    ranks, width = place.collectives.size, segment.shard_numel
    rows = packed_rows(place)
    messages = Messages(codec.nbytes(width), place.collectives, kernels, MESSAGES)
    numbers = rows.memory.view(segment.full_dtype, 0, (ranks, width))
    free = [rows.memory.release, messages.memory.release]
    found = Gather(
        place.parameters(),
        [rows.memory.acquire, messages.memory.acquire],
        [partial(kernels.transform, codec.encode, messages.own, place.shards((1, width)))],
        [messages.gather],
        [partial(kernels.transform, codec.decode, numbers, messages.every), *rows.put],
        free,
    )
    # Views exist now. Each gather allocates again, on COMPUTE (I2).
    for release in free:
        release()
    return found


class Messages:
    """The messages of a segment's all-gathers: ``every`` [ranks, nbytes] of uint8, this rank's
    ``own``, and room after them for ``numbers``, [1, scratch] of fp32.

    ``memory`` is allocated until it is released once, when its users are bound.
    """

    def __init__(
        self, nbytes: int, collectives: Collectives, kernels: Kernels, name: str, scratch: int = 0
    ) -> None:
        ranks, start = collectives.size, collectives.rank * nbytes
        behind = round_up(ranks * nbytes, ALIGNMENT)
        self.memory = memory = kernels.transient(behind + 4 * scratch, name)
        self.every = memory.view(torch.uint8, 0, (ranks, nbytes))
        self.own = memory.view(torch.uint8, start, (1, nbytes))
        self.numbers = memory.view(torch.float32, behind, (1, scratch))
        self.gather: Launch = collectives.bind_all_gather(
            memory.view(torch.uint8, 0, (ranks * nbytes,)),
            memory.view(torch.uint8, start, (nbytes,)),
        )
