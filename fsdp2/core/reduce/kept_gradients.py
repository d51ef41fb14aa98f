"""Gradients in memory that stays: what a reduction fills and hands out in every step.

    flat     [ rows of A | rows of B | pad ]   where the reduction leaves its result
    rows       └ view      └ view
    objects    └ DTensor   └ DTensor           what becomes ``.grad`` of A, of B

All are made once. They are filled again only while no member has a ``.grad`` (invariant I13), so
``zero_grad()`` decides, as always, between a new gradient and a sum; it just does not free memory.
"""

from __future__ import annotations

import torch

from fsdp2.core.params.gradients import Gradients


class KeptGradients:
    """The gradients of the members of a reduction, which stay in place on request (decision 15).

    Args:
        gradients: the members'.

    Attributes:
        flat: the rows of all of them, in the gradients' dtype; ``None`` until they are needed.
        rows: views of it, one a member.
        objects: what becomes ``.grad``, over the rows.
        taken: whether a reduction is on its way that fills them and hands them out.
    """

    __slots__ = ("_gradients", "flat", "objects", "rows", "taken")

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self.flat: torch.Tensor | None = None
        self.rows: list[torch.Tensor] = []
        self.objects: list[torch.Tensor] = []
        self.taken = False

    def is_free(self) -> bool:
        """Whether what they hold is nobody's gradient."""
        return not (self.taken or self._gradients.delivered())

    def allocate(self, flat: torch.Tensor, rows: list[torch.Tensor]) -> None:
        """Take the memory that is to be kept."""
        self.flat, self.rows = flat, rows
        self.objects = self._gradients.objects_over(rows)
