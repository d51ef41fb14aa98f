"""What a group's layout and options ask for.

GroupLayout, GroupOptions   ──> the transport of each segment
ShardedParam, GroupOptions  ──> ReductionSpec: parameters of equal specs are reduced together
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp2.core.collectives import Collectives
from fsdp2.core.config import CPUOffloadPolicy, GroupOptions
from fsdp2.core.extension import ExtensionContext, ExtensionTransport
from fsdp2.core.kernels import Kernels
from fsdp2.core.layout import COLLECTIVE_ALIGN_BYTES, GroupLayout, Slot, Transport
from fsdp2.core.param import ShardedParam, compute_dtype
from fsdp2.core.reduction import ReductionSpec
from fsdp2.core.streams import OnStream
from fsdp2.core.transport import SegmentTransport, make_transport


def make_extension(
    layout: GroupLayout,
    params: Sequence[ShardedParam],
    collectives: Collectives,
    kernels: Kernels,
    context: ExtensionContext,
) -> ExtensionTransport | None:
    """The transport of the parameters with all-gather hooks; ``None`` where there are none.

    It makes them in its first gather and owns their memory, so it outlives changes of how to
    gather.
    """
    for segment in layout.segments:
        if segment.transport is Transport.EXTENSION:
            return ExtensionTransport(segment, params, collectives, kernels, context)
    return None


def make_transports(
    layout: GroupLayout,
    shard: Any,
    full: Any,
    collectives: Collectives,
    kernels: Kernels,
    options: GroupOptions,
    device: Any,
    extension: ExtensionTransport | None,
) -> list[SegmentTransport]:
    """A transport for each segment, in their order.

    Args:
        layout: the segments.
        shard: the flat shard, or the device's copy of it.
        full: the gathered buffer, allocated.
        collectives: of the shard axis.
        kernels: memory and copies.
        options: the user's all-gather is used where there is one.
        device: where the user's buffers are.
        extension: the transport of the parameters with all-gather hooks.
    """
    comm = options.all_gather
    found: list[SegmentTransport] = []
    for segment in layout.segments:
        if segment.transport is Transport.EXTENSION:
            assert extension is not None
            extension.comm = comm
            found.append(extension)
        else:
            transport = make_transport(segment, shard, full, collectives, kernels, comm, device)
            found.append(transport)
    return found


def reduction_spec(
    options: GroupOptions,
    param: Any,
    slot: Slot,
    transport: Transport,
    offload: CPUOffloadPolicy | None,
    device: Any,
) -> ReductionSpec:
    """What sets the steps of one parameter's reduction.

    Args:
        options: what the user chose.
        param: the parameter (`ShardedParam`, or a simulated one).
        slot: its place in the layout.
        transport: how it is gathered.
        offload: where shards and gradients live in CPU memory apart from the device.
        device: where gradients are reduced.
    """
    grad = compute_dtype(options, param)
    reduce = options.precision.reduce_dtype or param.grad_dtype
    comm = options.reduce_scatter
    hook = options.all_reduce_hook
    if hook is not None and options.all_reduce_hook_stream is not None:
        hook = OnStream(hook, options.all_reduce_hook_stream)
    return ReductionSpec(
        direct=comm is None
        and transport is Transport.COALESCED
        and _is_direct(slot, min(reduce.itemsize, grad.itemsize)),
        grad_dtype=grad,
        reduce_dtype=reduce,
        result_dtype=param.grad_dtype,
        factor=options.divide_factor,
        sum_only=options.sum_only,
        hook=hook,
        to_host=offload is not None,
        pin=offload is not None and offload.pin_memory,
        comm=comm,
        device=device,
    )


def _is_direct(slot: Slot, itemsize: int) -> bool:
    return slot.dim == 0 and slot.even and slot.shard_numel * itemsize % COLLECTIVE_ALIGN_BYTES == 0
