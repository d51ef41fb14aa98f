"""The settings of a reduction's steps: dtypes, factors, collectives, the destination; and where to
divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from fsdp2.core.config import CPUOffloadPolicy, GroupOptions
from fsdp2.core.custom_collectives import ReduceScatter
from fsdp2.core.device.collectives import ReduceKind
from fsdp2.core.device.streams import OnStream
from fsdp2.core.layout.layout import Slot, Transport
from fsdp2.core.params.param import ShardedParam, compute_dtype


@dataclass(frozen=True)
class ReductionSpec:
    """The settings of a reduction's steps.

    Attributes:
        grad_dtype: dtype of autograd's gradients; ``result_dtype`` of the sharded ``.grad``.
        factor: the user's divide factor; collectives only sum if ``sum_only``.
        hook: called with the flat reduced gradient; so is ``average``, over copies of the model.
        comm: the user's reduce-scatter.
        keep: whether gradients' memory is kept for the next step.
        codec: name of the format of encoded gradients; ``between_codec`` for sums between nodes.
        feedback: whether the rounding errors of a message are added to the next one.
        kin: if the codec rounds neighbors together, what its gradients' neighbors have in common
            (`ShardedParam.differs_over`).
    """

    grad_dtype: torch.dtype
    reduce_dtype: torch.dtype
    result_dtype: torch.dtype
    factor: float | None = None
    sum_only: bool = False
    hook: Callable[[torch.Tensor], None] | None = None
    to_host: bool = False
    pin: bool = False
    comm: ReduceScatter | None = field(default=None, hash=False)  # it need not be hashable
    device: torch.device | None = None
    keep: bool = False
    codec: str | None = None
    between_codec: str | None = None
    rotate: bool = False
    feedback: bool = False
    average: Callable[[torch.Tensor], bool] | None = None
    kin: Hashable = ()

    @property
    def casts(self) -> bool:
        """Whether gradients are of another dtype than the sums."""
        return self.reduce_dtype != self.result_dtype


def reduction_spec(
    options: GroupOptions,
    param: ShardedParam,
    offload: CPUOffloadPolicy | None,
    device: torch.device,
) -> ReductionSpec:
    grad = compute_dtype(options, param)
    reduce = param.grad_dtype
    if reduce.is_floating_point:  # a complex gradient cast to a real dtype would lose half of it
        reduce = options.precision.reduce_dtype or reduce
    codec, rotate = None if param.exact else options.wire.reduce, options.wire.rotate
    kin: Hashable = ()
    if codec is not None:
        from fsdp2.core.codecs.codec import (
            ALONE,
            check_coded,  # who needs none loads none
        )

        check_coded(param.name, (grad, reduce), codec)
        if rotate or codec not in ALONE:
            # Model-parallel ranks must round equal gradients alike: no neighbor in a message may
            # differ.
            kin = param.differs_over
    between = None if param.exact else options.wire.between_reduce
    comm = options.reduce_scatter
    hook = options.all_reduce_hook
    if hook is not None and options.all_reduce_hook_stream is not None:
        hook = OnStream(hook, options.all_reduce_hook_stream)
    return ReductionSpec(
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
        codec=codec,
        between_codec=between,
        rotate=codec is not None and rotate,
        feedback=codec is not None and options.wire.feedback,
        average=options.average,
        kin=kin,
    )


def is_direct(spec: ReductionSpec, slot: Slot, transport: Transport) -> bool:
    """Whether a gradient is reduced from where it is, one of several in a launch."""
    # Whether it is cast first or not, the collective's pieces are multiples of 16 bytes.
    itemsize = min(spec.reduce_dtype.itemsize, spec.grad_dtype.itemsize)
    built_in = spec.comm is None and spec.codec is None
    gathered_so = built_in and transport is Transport.COALESCED
    return gathered_so and slot.in_order and slot.even and slot.aligned(itemsize)


# ---- where to divide


@dataclass(frozen=True)
class Division:
    """The point at which a reduction divides: before the collectives, inside them, after them."""

    before: float | None
    kind: ReduceKind
    replicas: ReduceKind
    after: float | None


_AVERAGE = (torch.float32, torch.bfloat16)
_SUM = ReduceKind(average=False)


def plan_division(
    dtype: torch.dtype,
    size: int,
    factor: float | None,
    premultiplies: bool,
    copies: int = 1,
    sum_only: bool = False,
    alone: bool = False,
    empty: bool = False,
) -> Division:
    """Choose where to divide: fp32 and bf16 have range to spare, and divide inside the collective
    where the backend can. Others (fp16) split the factor about evenly before and after the sum, so
    that neither the sum overflows nor the addends vanish.

    Args:
        factor: the user's divide factor; ``None`` averages over both axes.
        premultiplies: whether the backend has a premultiplied sum (NCCL has).
        copies: ranks of the replicate axis.
        sum_only: whether the collectives must only sum.
        alone: whether this rank has nothing to communicate: gradients are divided once, if at all.
        empty: whether no rank has any element: nothing is divided.
    """
    whole = float(size * copies) if factor is None else factor
    if alone or empty:
        return Division(None, _SUM, _SUM, None if empty or whole == 1 else whole)
    if dtype in _AVERAGE:
        if sum_only:
            return Division(None, _SUM, _SUM, whole if whole != 1 else None)
        # Averages of averages: the mean over both axes, because all shard groups are of one size.
        if factor is None:
            return Division(None, ReduceKind(average=True), ReduceKind(average=True), None)
        # As an average, which needs no premultiplied sum.
        if factor == size:
            return Division(None, ReduceKind(average=True), _SUM, None)
        if premultiplies and size > 1:
            return Division(None, ReduceKind(average=False, factor=factor), _SUM, None)
        return Division(None, _SUM, _SUM, factor)
    # A power of two is exact in any floating-point dtype
    before = 2.0 ** math.ceil(math.log2(whole) / 2) if whole > 1 else 1.0
    after = whole / before
    return Division(before if before != 1.0 else None, _SUM, _SUM, after if after != 1.0 else None)
