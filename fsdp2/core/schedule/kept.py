"""Units that a forward has left unsharded, while users can access their parameters.

    forward that autograd records   unsharded parameters are registered until backward has freed
                                    them, or a root's next forward gathers them again: a write to
                                    them raises, because it would be lost
    forward without gradients       sharded parameters are registered when it returns: code that
                                    evaluates may write them next, and the next use gathers again
    unshard() by the user           unsharded parameters are registered until reshard()

Version counters do not show all writes: not those through ``.data``, ``numpy()``, a collective, or
``torch._foreach_*`` on DTensors. After a forward without gradients, there is therefore nothing to
check (decision 25).
"""

from __future__ import annotations

from fsdp2.core.params.param import FlagChanges
from fsdp2.core.progress import OptimizerSteps
from fsdp2.core.schedule.unit import IDLE, Unit


class Kept:
    """The units below one root that a forward has left unsharded, and no backward has freed.

    Attributes:
        flags: `FlagChanges.count` when an iteration began last.
        steps: `OptimizerSteps.count` when a forward began last.
        units: whether the unit's last forward returned parameters.
        hides: whether units may be hidden for others than graphs.
    """

    __slots__ = ("flags", "hides", "steps", "units")

    def __init__(self) -> None:
        self.flags = FlagChanges.count
        self.steps = -1
        self.units: dict[Unit, bool] = {}
        self.hides = False

    def begin_iteration(self, pending: bool) -> None:
        """A forward begins after an optimizer's step.

        Args:
            pending: whether backwards of earlier forwards are to come.
        """
        self.steps = OptimizerSteps.count
        if not pending:
            self.flags = FlagChanges.count

    def add(self, unit: Unit, returned: bool) -> None:
        """The forward of ``unit`` ends, and leaves it unsharded.

        Args:
            unit: the unit.
            returned: whether its forward returned parameters.
        """
        self.units[unit] = returned

    def free_stale(self, anew: bool) -> None:
        """A forward begins: free roots that an earlier one has left unsharded.

        Their shards may have been written, so they are gathered again. Other units stay unsharded
        on request: to free them would take a gather for each forward of a pipeline's micro-batches,
        whose backwards are to come.

        Args:
            anew: whether all are freed that the user has not unsharded himself.
        """
        for unit in self.units:
            asked_for = unit.reshard_after_forward is not None and not anew
            stays = asked_for or unit.claimed or unit.phase is not IDLE
            for group in unit.groups:
                group.take_back(stays)
            if not stays:
                unit.reshard()

    def show_shards(self, held: bool) -> None:
        """A forward without gradients ends: register sharded parameters.

        Memory that a graph, a backward without its own all-gather or a caller can still read is
        kept.

        Args:
            held: whether graphs of backwards can.
        """
        units, self.units = self.units, {}
        for unit, returned in units.items():
            reads = bool(unit.visits) and not unit.unshard_in_backward
            if unit.claimed:
                self.units[unit] = returned
            elif held or returned or reads:
                unit.hide()
                self.hides = True
            else:
                unit.reshard()

    def end_iteration(self) -> None:
        """Its last backward is over: what is gathered now a flag has asked for, or the user."""
        for unit in tuple(self.units):
            if not unit.is_gathered:
                del self.units[unit]
                unit.claimed = False
        self.hides = False

    def succeed(self, former: Kept) -> None:
        """Take over from a root that is part of a larger model now."""
        self.units.update(former.units)
        self.hides = self.hides or former.hides
