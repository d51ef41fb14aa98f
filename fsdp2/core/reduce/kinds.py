"""Which transport a reduction has: the table of all, and what chooses.

Formats of fewer bytes have a separate table, `fsdp2.core.reduce.coded.CODED`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.core.custom_collectives import OwnMemory
from fsdp2.core.layout.layout import Slot
from fsdp2.core.reduce.reduction import ReduceTransport
from fsdp2.core.reduce.spec import ReductionSpec
from fsdp2.core.reduce.transport import (
    AdoptedReduce,
    CastReduce,
    CustomReduce,
    DirectReduce,
    EmptyReduce,
    JoinedReduce,
    LocalReduce,
    OwnMemoryReduce,
    PackedReduce,
)

TRANSPORTS: dict[str, type[ReduceTransport]] = {
    "direct": DirectReduce,
    "cast": CastReduce,
    "packed": PackedReduce,
    "joined": JoinedReduce,
    "custom": CustomReduce,
    "own memory": OwnMemoryReduce,
    "local": LocalReduce,
    "adopted": AdoptedReduce,
    "empty": EmptyReduce,
}
"""Transports of gradients that are sent without a codec."""


def transport_of(
    spec: ReductionSpec, slots: Sequence[Slot], direct: int, size: int, alone: bool
) -> type[ReduceTransport]:
    """The transport of a reduction's gradients.

    Args:
        spec: the settings of its steps.
        slots: of the members.
        direct: how many of the first need no packing.
        size: ranks of the shard axis.
        alone: whether gradients are only divided.
    """
    if alone and spec.grad_dtype == spec.result_dtype:
        name = "adopted"
    elif size == 1:
        name = "local"
    elif not any(slot.shard_numel for slot in slots):
        name = "empty"
    elif spec.codec is not None:
        from fsdp2.core.reduce.coded import CODED  # who does not use it does not load it

        return CODED[spec.codec]
    elif spec.comm is not None:
        name = "own memory" if isinstance(spec.comm, OwnMemory) else "custom"
    elif direct < len(slots):
        name = "joined" if direct else "packed"
    else:
        name = "direct" if spec.grad_dtype == spec.reduce_dtype else "cast"
    return TRANSPORTS[name]
