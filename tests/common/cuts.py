"""Cuts of parameters: given for short, or random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fsdp2.core.layout.layout import ROWS, Cut


def as_cut(cut: int | Cut) -> Cut:
    """A dim alone, or what it is."""
    return Cut(cut) if isinstance(cut, int) else cut


def random_cut(rng: random.Random, shape: Sequence[int], ranks: int) -> Cut:
    """Any that ``shape`` allows on so many ranks; half of them by rows."""
    cuts = [Cut(dim) for dim in range(len(shape))]
    for bands in range(2, ranks):
        if ranks % bands == shape[0] % bands == 0:
            cuts += [Cut(dim, bands) for dim in range(1, len(shape))]
    return rng.choice((ROWS, rng.choice(cuts)))
