"""What a parameter group does, told as it happens.

    group.start_unshard ──> ParamGroup.start_unshard, then heard("all_gather", name)

The object's methods are shadowed, so that the group itself knows of nobody who listens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp2.core.group import ParamGroup
from fsdp2.core.pending import PendingReduction
from fsdp2.core.states import State


def observe(group: ParamGroup, heard: Callable[[str, str], object]) -> None:
    """Call ``heard`` behind each move of ``group``, with what it was and the group's name.

    Args:
        group: the group.
        heard: is told "all_gather" (where there is anything to gather), "finish", "reshard" (where
            anything was gathered) and "reduce".
    """
    kind = type(group)

    def start_unshard() -> None:
        kind.start_unshard(group)
        if group._taken.issues:
            heard("all_gather", group.name)

    def finish_unshard() -> None:
        kind.finish_unshard(group)
        heard("finish", group.name)

    def shard_smaller() -> None:
        copies = group.state is State.UNSHARDED and group._smaller is not None
        kind.shard_smaller(group)  # which may call `reshard`
        if copies:
            heard("reshard", group.name)

    def reshard() -> None:
        gathered = group.state is not State.SHARDED
        kind.reshard(group)
        if gathered:
            heard("reshard", group.name)

    def reduce(*args: Any, **kwargs: Any) -> PendingReduction | None:
        pending = kind.reduce(group, *args, **kwargs)
        heard("reduce", group.name)
        return pending

    for method in (start_unshard, finish_unshard, shard_smaller, reshard, reduce):
        setattr(group, method.__name__, method)
