"""When groups that keep gathered rows gather again: as soon as their shards may have changed.

    a forward begins     an optimizer has stepped, or gradients are gone, since another began,
                         or there are hooks on gradients, which may step
                         a parameter's version shows a write
                         it is a forward without gradients, which begins and ends so
    by the user          zero_grad(), reshard(), unshard() on the unit
    of a group           it is bound again; an exception has ended an iteration

Otherwise the rows equal the result of an all-gather (invariant I17). All of these are facts that
ranks share (I1): none of them is seen on only one rank, and none requires waiting for a device. A
write by the user that no version counter shows (``.data``, ``numpy()``, a collective), without any
of these events, would be lost; ``fsdp2.debug(check_writes=True)`` raises for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.core.progress import OptimizerSteps
from fsdp2.core.schedule.group import ParamGroup


class Reuse:
    """The groups below one root that keep rows, and what was seen of their shards.

    Args:
        groups: those.
        everyones: all groups below the root, whose gradients tell of a step, too.

    Attributes:
        groups: those.
        zeroed: whether the user has dropped gradients since a forward began.
    """

    __slots__ = ("_everyones", "_steps", "_versions", "groups", "zeroed")

    def __init__(self, groups: Sequence[ParamGroup], everyones: Sequence[ParamGroup]) -> None:
        self.groups = groups
        self.zeroed = False
        self._everyones = everyones
        self._steps = -1
        self._versions: list[int] = []

    def begin_forward(self, records: bool, pending: bool, reducing: bool) -> None:
        """A root's forward begins: forget rows if shards may have changed.

        Args:
            records: whether autograd records it.
            pending: whether forwards have run whose backward is to come.
            reducing: whether reductions are running, because the last backward is to come.
        """
        stepped, zeroed = self._steps != OptimizerSteps.count, self.zeroed
        versions = [param.sharded._version for group in self.groups for param in group.params]
        written = versions != self._versions
        self._steps, self._versions, self.zeroed = OptimizerSteps.count, versions, False
        changed = stepped or zeroed or written or not records
        if changed or not (pending or self._has_gradients(reducing)):
            self.forget()

    def _has_gradients(self, reducing: bool) -> bool:
        """Whether the gradients of the last backward still exist: no step has used them.

        A parameter has a gradient on all ranks or on none (I15). Hooks on gradients may have
        stepped some.
        """
        if any(group.has_grad_hooks for group in self.groups):
            return False
        for group in () if reducing else self._everyones:
            reductions = () if group.bound is None else group.bound.reductions
            if group.accumulates or any(r.gradients.delivered() for r in reductions):
                return True
        return reducing

    def forget(self) -> None:
        """Make all of them gather again."""
        for group in self.groups:
            group.forget_rows()
