"""Gradients in memory that stays: what a reduction fills and hands out in every step.

    flat     [ rows of A | rows of B | pad ]   where the reduction leaves its result
    rows       └ view      └ view
    objects    └ DTensor   └ DTensor           what becomes ``.grad`` of A, of B

All are made once. They are filled again only while no member has a ``.grad`` (invariant I13), so
``zero_grad()`` decides, as always, between a new gradient and a sum; it just does not free memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class KeptGradients:
    """The gradients of the members of a reduction.

    Args:
        members: the parameters (`ShardedParam`, or simulated ones).

    Attributes:
        flat: the rows of all of them, in the gradients' dtype; ``None`` until they are needed.
        rows: views of it, one a member.
        objects: what becomes ``.grad``, over the rows.
        taken: whether a reduction is on its way that will hand them out.
    """

    __slots__ = ("_members", "_param_class", "flat", "objects", "rows", "taken")

    def __init__(self, members: Sequence[Any]) -> None:
        self._members = members
        self._param_class: Any = type(members[0])
        self.flat: Any = None
        self.rows: list[Any] = []
        self.objects: list[Any] = []
        self.taken = False

    def is_free(self) -> bool:
        """Whether what they hold is nobody's gradient."""
        return not self.taken and bool(self._param_class.without_gradient(self._members))

    def allocate(self, flat: Any, rows: list[Any]) -> None:
        """Take the memory that is to be kept."""
        self.flat, self.rows = flat, rows
        self.objects = [m.gradient_over(r) for m, r in zip(self._members, rows, strict=True)]
