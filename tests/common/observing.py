"""What parameter groups do, told as it happens: by an observer of them.

group.start_unshard ──> ParamGroup.start_unshard, then heard("all_gather", name)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import Observer
from fsdp2.core.schedule.unit import Unit, put_around


def observe(units: Iterable[Unit], heard: Callable[[str, str], object]) -> None:
    """Call ``heard`` behind each move of the groups of ``units``: what it was, the group's name."""

    def gather(group: ParamGroup, run: Callable[[], None]) -> None:
        run()
        taken = group._taken
        if taken is not None and taken.launches:
            heard("all_gather", group.name)

    def told(what: str) -> Callable[..., object]:
        def tell(group: ParamGroup, run: Callable[..., object], *args: Any, **given: Any) -> object:
            found = run(*args, **given)
            heard(what, group.name)
            return found

        return tell

    def free(group: ParamGroup, run: Callable[[], None]) -> None:
        before = group.state
        run()
        if not before.is_sharded and group.state is not before:  # a tied one may stay
            heard("reshard", group.name)

    sees = {"start_unshard": gather, "finish_unshard": told("finish"), "reduce": told("reduce")}
    sees |= dict.fromkeys(("shard_smaller", "reshard", "abandon"), free)
    put_around(units, Observer(4, sees), True)
