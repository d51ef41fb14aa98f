"""DTensors that were ``.grad`` and are nobody's any more: used again for the next gradients.

    rows of A   rows of B   rows of C       of this step; let go with the gradients, as ever
      └ lent      └ lent      └ the last    DTensors: what ``.grad`` of A, B and C is
         │           │            └─ dropped: who else holds the others?
         └─ spare    └─ spare  <─ nobody: they lose their rows, and wait for the next step's

To make a DTensor, and to free it, takes longer than all else that a parameter adds to a step. That
gradients are dropped tells nobody, but that an object dies does: the last DTensor that a reduction
delivers is new each time, and when its rows go, the others are looked at (invariant I14). What
somebody holds then, a ``.grad`` of its parameter, a variable, or an autograd graph, is his for
good. The rows are watched, not the DTensor: `.to()` swaps gradients with converted ones, which
torch refuses for tensors that are weakly referred to.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

FEWEST = 3
"""Members from which on it pays: looking at the others takes as long as making one of them."""

_refcount = sys.getrefcount
_ALONE = next(map(_refcount, [object()]))
"""References to an object in a list, as ``map`` counts them, if there are no others.

Of a tensor these are all, C++'s included: torch's C++ objects, such as autograd's graph, hold its
Python object by one more as long as there are any (torch 2.11 to 2.15).
"""


class Spares:
    """The DTensors of a reduction's gradients, between two steps."""

    __slots__ = ("_spare", "_watch")

    def __init__(self) -> None:
        self._spare: list[Any] = []
        self._watch: _Watch | None = None

    def take(self, count: int) -> list[Any]:
        """DTensors for ``count`` gradients, whose rows are to be set; ``None`` where to make one.

        The last is always ``None``.
        """
        if not self._spare:
            return [None] * count
        taken = [*self._spare, None]
        self._spare.clear()
        return taken

    def lend(self, gradients: list[Any]) -> None:
        """These are gradients now, of all members.

        Args:
            gradients: a list that nobody else needs.
        """
        last = gradients.pop()
        watch = _Watch(last._local_tensor, _look)
        self._spare = []  # without what an older watch left since `take`
        watch.lent, watch.spare = gradients, self._spare
        self._watch = watch


class _Watch(weakref.ref[Any]):
    """Of the last gradient's rows; it knows the others.

    Attributes:
        lent: the others.
        spare: where they go if nobody holds them.
    """

    __slots__ = ("lent", "spare")

    lent: list[Any]
    spare: list[Any]


def _look(watch: _Watch) -> None:
    """The last gradient's rows are gone: keep the others if all are nobody's, else none."""
    lent, watch.lent = watch.lent, []
    if set(map(_refcount, lent)) != {_ALONE}:
        return
    for gradient in lent:
        if gradient.__dict__ or gradient.requires_grad:
            return  # somebody made something of it
        gradient._local_tensor = None
    watch.spare += lent
