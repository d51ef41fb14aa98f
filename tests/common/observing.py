"""What parameter groups do, told as it happens: a layer around them.

group.start_unshard ──> ParamGroup.start_unshard, then heard("all_gather", name)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fsdp2.core.reduce.reduction import PendingReduction
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.layers import Layer, put_around
from fsdp2.core.schedule.states import GroupState


def observe(groups: Iterable[ParamGroup], heard: Callable[[str, str], object]) -> None:
    """Call ``heard`` behind each move of ``groups``, with what it was and the group's name.

    Args:
        groups: the groups.
        heard: is told "all_gather" (where there is anything to gather), "finish", "reshard" (where
            anything was gathered) and "reduce".
    """

    class ObservedGroup(Layer):  # a class for each listener, which goes when both are garbage
        __slots__ = ()

        height = 3

        def start_unshard(self) -> None:
            super().start_unshard()
            if self._taken.launches:
                heard("all_gather", self.name)

        def finish_unshard(self) -> None:
            super().finish_unshard()
            heard("finish", self.name)

        def shard_smaller(self) -> None:
            copies = self.state is GroupState.UNSHARDED and self._smaller is not None
            super().shard_smaller()  # which may call `reshard`
            if copies and self.state is not GroupState.UNSHARDED:
                heard("reshard", self.name)

        def reshard(self) -> None:
            gathered = self.state is not GroupState.SHARDED
            super().reshard()
            if gathered and self.state is GroupState.SHARDED:  # a tied one may stay
                heard("reshard", self.name)

        def reduce(self, *args: Any, **kwargs: Any) -> PendingReduction | None:
            pending = super().reduce(*args, **kwargs)
            heard("reduce", self.name)
            return pending

    put_around(groups, ObservedGroup, True)
