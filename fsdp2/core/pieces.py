"""Lengths that are cut into equal pieces, and lengths that are rounded up, in integers.

ceil_div(7, 4)      2        7 rows over 4 ranks: pieces of 2, 2, 2 and 1, as DTensor cuts
piece_of(7, 4, 3)   (6, 1)   where the last one begins, and how long it is
round_up(7, 4)      8
"""

from __future__ import annotations


def ceil_div(length: int, count: int) -> int:
    """The length of a whole piece, where ``length`` is cut into ``count``."""
    return -(-length // count)


def piece_of(length: int, count: int, index: int) -> tuple[int, int]:
    """Start and length of one piece of ``count``: the last ones are short, or empty."""
    piece = ceil_div(length, count)
    start = min(index * piece, length)
    return start, min(piece, length - start)


def round_up(value: int, multiple: int) -> int:
    """The first multiple that is not below ``value``."""
    return ceil_div(value, multiple) * multiple
