"""The dim that a parameter is cut on where several will do (decision 14)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdp2.core.layout.layout import Cut

SMALL_PADDING = 0.03
"""Padding of the first dim, as a share of a parameter, up to which no other is looked at."""

SMALL_PADDING_BYTES = 1 << 20
"""The same in bytes, over all ranks."""


def default_cut(
    shape: Sequence[int],
    ranks: int,
    itemsize: int,
    dims: Sequence[int] | None = None,
    in_bands: bool = True,
) -> Cut:
    """The cut that is taken where several will do (decision 14).

    On the first dim, unless equal pieces of it pad more than 3 % of the parameter and more than
    1 MiB over all ranks. Then, of all dims and, where dim 0 and others were named, of dim 0 in as
    many bands as can be with another: one that pads no more than 3 %, rather one that needs no
    copies, rather on one dim, rather one that pads less; if there is none, the one that pads least.

    Args:
        shape: shape of the parameter, at least one dim.
        ranks: how many ranks it is sharded over.
        itemsize: bytes of an element.
        dims: those that it may be cut on; ``None`` (default) for any one.
        in_bands: whether it may be cut on two of them.

    Example::

        >>> default_cut((128, 5760, 2880), 256, 4)  # on dim 0, half of all ranks would be empty
        Cut(dim=1, bands=1)
        >>> default_cut((128, 5760, 2880), 256, 4, dims=(0, 1))
        Cut(dim=1, bands=128)
    """
    numel = math.prod(shape)
    cuts = [Cut(dim) for dim in (range(len(shape)) if dims is None else dims)]
    small = SMALL_PADDING * numel
    padding = cuts[0].padded(shape, ranks) - numel
    if padding <= small or padding * itemsize <= SMALL_PADDING_BYTES:
        return cuts[0]
    bands = math.gcd(shape[0], ranks)
    if in_bands and dims is not None and 0 in dims and 1 < bands < ranks:
        cuts += [Cut(dim, bands) for dim in dims if dim]

    def cost(cut: Cut) -> tuple[float, bool, int, int]:
        padding = cut.padded(shape, ranks) - numel
        return max(padding - small, 0), not cut.in_order(shape, ranks), cut.bands, padding

    return min(cuts, key=cost)
