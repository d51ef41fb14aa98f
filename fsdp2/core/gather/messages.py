"""Messages of a codec, one of each rank, and the collective that brings them.

own [1, nbytes] ══ one all-gather ══> every [ranks, nbytes]      in memory that comes and goes
"""

from __future__ import annotations

import torch

from fsdp2.core.codecs.codec import ALIGNMENT
from fsdp2.core.device.collectives import Collectives, Launch
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.pieces import round_up


class Messages:
    """The messages of a segment's all-gathers.

    Args:
        nbytes: of each.
        collectives: of the ranks that gather.
        kernels: memory.
        name: of the memory.
        scratch: numbers of fp32 that have room after the messages. Default 0.

    Attributes:
        memory: of all; allocated until it is released once, when its users are bound.
        every: all ranks' messages, [ranks, nbytes] of uint8.
        own: this rank's, [1, nbytes].
        numbers: the room after them, [1, scratch] of fp32.
        gather: runs the collective.
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
