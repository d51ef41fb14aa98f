"""The point at which a reduction divides: before its collectives, inside them, after them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fsdp2.core.device.collectives import ReduceKind


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
