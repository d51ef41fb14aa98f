"""What parameter groups do, told as it happens: a layer around them.

group.start_unshard ──> ParamGroup.start_unshard, then heard("all_gather", name)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fsdp2.core.reduce.reduction import PendingReduction
from fsdp2.core.schedule.layers import Layer
from fsdp2.core.schedule.states import GroupState
from fsdp2.core.schedule.unit import Unit, put_around


def observe(units: Iterable[Unit], heard: Callable[[str, str], object]) -> None:
    """Call ``heard`` behind each move of the groups of ``units``: what it was, the group's name.

    Args:
        units: the units.
        heard: is told "all_gather" (where there is anything to gather), "finish", "reshard" (where
            anything was gathered) and "reduce".
    """

    class ObservedGroup(Layer):  # a class for each listener, which goes when both are garbage
        __slots__ = ()

        height = 4

        def start_unshard(self) -> None:
            self.below.start_unshard()
            taken = self.base._taken
            if taken is not None and taken.launches:
                heard("all_gather", self.base.name)

        def finish_unshard(self) -> None:
            self.below.finish_unshard()
            heard("finish", self.base.name)

        def shard_smaller(self) -> None:
            self._freed(self.below.shard_smaller, self.state is GroupState.UNSHARDED)

        def reshard(self) -> None:
            self._freed(self.below.reshard, not self.state.is_sharded)

        def abandon(self) -> None:
            self._freed(self.below.abandon, not self.state.is_sharded)

        def _freed(self, free: Callable[[], None], gathered: bool) -> None:
            before = self.state
            free()
            if gathered and self.state is not before:  # a tied one may stay
                heard("reshard", self.base.name)

        def reduce(self, *args: Any, **kwargs: Any) -> PendingReduction | None:
            pending = self.below.reduce(*args, **kwargs)
            heard("reduce", self.base.name)
            return pending

    put_around(units, ObservedGroup, True)
