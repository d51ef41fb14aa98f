"""What a group's layout and options ask for.

ShardedParam, GroupOptions  ──> what the layout is built from
GroupLayout                 ──> the transport of parameters with all-gather hooks
ShardedParam, GroupOptions  ──> ReductionSpec: parameters of equal specs are reduced together
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp2.core.collectives import Collectives, Replicas
from fsdp2.core.config import CPUOffloadPolicy, GroupOptions
from fsdp2.core.extension import ExtensionContext, ExtensionTransport
from fsdp2.core.kernels import Kernels
from fsdp2.core.layout import GroupLayout, ParamShape, Slot, Transport
from fsdp2.core.param import ShardedParam, compute_dtype
from fsdp2.core.program import ReductionSpec
from fsdp2.core.reduction import SegmentReduction
from fsdp2.core.streams import OnStream


def shapes_of(params: Sequence[ShardedParam], options: GroupOptions) -> list[ParamShape]:
    """What the layout needs of the parameters, from their present dtypes."""
    shapes = []
    for param in params:
        shard, full = param.dtype, compute_dtype(options, param)
        dtypes = (shard, shard.itemsize, full, full.itemsize)
        shape = ParamShape(param.name, param.shape, param.cut, *dtypes, param.is_extended)
        shapes.append(shape)
    return shapes


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


def make_reductions(
    members: Sequence[tuple[ReductionSpec, Any, Slot]],
    collectives: Collectives,
    replicas: Replicas | None,
    kernels: Kernels,
) -> list[SegmentReduction]:
    """A reduction for all parameters of equal specs, in the order of their first."""
    families: dict[ReductionSpec, list[tuple[Any, Slot]]] = {}
    for spec, param, slot in members:
        families.setdefault(spec, []).append((param, slot))
    return [
        SegmentReduction(
            [param for param, _ in family],
            [slot for _, slot in family],
            spec,
            collectives,
            replicas,
            kernels,
        )
        for spec, family in families.items()
    ]


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
    reduce = param.grad_dtype
    if reduce.is_floating_point:  # a complex gradient cast to a real dtype would lose half of it
        reduce = options.precision.reduce_dtype or reduce
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
        keep=options.keep_gradients,
    )


def _is_direct(slot: Slot, itemsize: int) -> bool:
    return slot.in_order and slot.even and slot.aligned(itemsize)
