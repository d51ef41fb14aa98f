"""Moves of parameter groups, told as they happen by an observer; and the memory that is made.

group.start_unshard ──> ParamGroup.start_unshard, then heard("all_gather", name)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class LargestMade(TorchDispatchMode):
    """The bytes of the largest memory that an operator made inside."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            {
                leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
                for leaf in tree_leaves(each)
                if type(leaf) is torch.Tensor and not leaf.is_meta
            }
            for each in ((args, kwargs), result)
        )
        new = (nbytes for key, nbytes in made.items() if key not in given)
        self.nbytes = max(self.nbytes, *new, 0)
        return result
