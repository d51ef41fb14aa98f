"""Parameters that no unit has: averaged together, where a backward that reaches them ends.

    gradient arrives ── the first of a backward ──> engine: at the end ──> average
    flat   [ grad of A | grad of B | marks ]    one per dtype and device

A unit's gradients are averaged when they are reduced. These are not reduced: each rank has
its own, as with one replica group, and a rank's counterparts in the other groups average theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import nn

from fsdp2.core.facts import after_backward, local_of

Average = Callable[[torch.Tensor], bool]
"""Averages a flat tensor in place; says whether this group's numbers are in it."""


class LooseParams:
    """Averages gradients of `params` where a backward ends, if it `syncs`."""

    def __init__(
        self, params: Sequence[nn.Parameter], syncs: Callable[[], bool], average: Average
    ) -> None:
        self._families = [list(f) for _, f in groupby(sorted(params, key=_kind), key=_kind)]
        self._syncs, self._average_flat = syncs, average
        self._ending: weakref.ref[Callable[[], None]] | None = None
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in params]

    def detach(self) -> None:
        """Average no longer."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, _: torch.Tensor) -> None:
        """A gradient is there: the first one in a backward asks for its end."""
        if self._ending is None or self._ending() is None:
            ending = self._end
            # Autograd alone holds it: an exception that ends the backward drops it uncalled.
            self._ending = weakref.ref(ending)
            after_backward(ending)

    @torch.no_grad()
    def _end(self) -> None:
        self._ending = None
        if self._syncs():
            for family in self._families:
                self._average(family)

    def _average(self, family: Sequence[nn.Parameter]) -> None:
        """Average the gradients that are there, and give one to whom another group has one for.

        The average of sums of averages is the same: so it is right after each of several backwards.
        """
        local = [local_of(param) for param in family]
        rows = [
            torch.zeros_like(own) if param.grad is None else local_of(param.grad)
            for param, own in zip(family, local, strict=True)
        ]
        there = [param.grad is not None for param in family]
        marks = rows[0].new_tensor(there)
        flat = torch.cat([*(row.reshape(-1) for row in rows), marks])
        counted = self._average_flat(flat)
        *averages, found = flat.split([*(row.numel() for row in rows), len(rows)])
        if not (counted and all(there)):
            there = [number != 0 for number in found.tolist()]
        for param, average, wanted in zip(family, averages, there, strict=True):
            if not wanted:
                param.grad = None
                continue
            if param.grad is None:
                param.grad = torch.empty_like(param)
            grad = local_of(param.grad)
            grad.copy_(average.view(grad.shape))


def _kind(param: torch.Tensor) -> tuple[str, str]:
    """The kind of tensor that shares a flat one: the same order on all ranks."""
    return str(param.device), str(param.dtype)
