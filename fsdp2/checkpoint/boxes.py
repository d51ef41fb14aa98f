"""Boxes that cover a tensor: each element once, none left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The first element in each dim, and the extents."""


def cover(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes lie in a tensor, do not overlap, and leave no element out.

    The time grows with their number, except for those that begin at the same index of dim 0.

    Args:
        shape: of the tensor.
        boxes: empty ones count for nothing.
    """
    full = [(first, sizes) for first, sizes in boxes if math.prod(sizes)]
    if sum(math.prod(sizes) for _, sizes in full) != math.prod(shape):
        return False
    if not all(_inside(shape, *box) for box in full):
        return False
    if len(full) <= 1:
        return True
    open_: list[Box] = []  # that reach to the index of dim 0 that is looked at
    for first, sizes in sorted(full):
        open_ = [box for box in open_ if box[0][0] + box[1][0] > first[0]]
        if any(_overlap((first, sizes), other) for other in open_):
            return False
        open_.append((first, sizes))
    return True


def _inside(shape: Sequence[int], first: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    return len(first) == len(sizes) == len(shape) and all(
        min(at, length) >= 0 and at + length <= whole
        for at, length, whole in zip(first, sizes, shape, strict=True)
    )


def _overlap(one: Box, other: Box) -> bool:
    pairs = zip(*one, *other, strict=True)
    return all(at < place + size and place < at + length for at, length, place, size in pairs)
