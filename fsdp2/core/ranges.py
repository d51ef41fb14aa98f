"""Ranges by unit name in a profiler's trace, while one is active.

    no profiler     group.start_unshard ──> ParamGroup.start_unshard
    a profiler      group.start_unshard ──> "fsdp2::all_gather (blocks.3)" around the same

A group's bound methods are shadowed by attributes of the object, so that nothing is asked or called
in a step without a profiler. `Scheduler` looks once a forward and once a backward of the root.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.profiler import record_function

from fsdp2.core.group import ParamGroup

RANGES = {
    "start_unshard": "fsdp2::all_gather",
    "finish_unshard": "fsdp2::wait",
    "reduce": "fsdp2::reduce",
}
"""Methods of `ParamGroup`, and what their ranges are called."""


def record_ranges(groups: Sequence[ParamGroup], enabled: bool) -> None:
    """Let ``groups`` mark their operations in a profiler's trace, or stop it."""
    for group in groups:
        for method, label in RANGES.items():
            marks = method in group.__dict__
            if enabled and not marks:
                setattr(group, method, _ranged(method, group, label))
            elif marks and not enabled:
                delattr(group, method)


def _ranged(method: str, group: ParamGroup, label: str) -> Callable[..., Any]:
    # Of the class that the group has when it is called (`fsdp2.core.checks.follow`); and no cycle.
    alive = weakref.ref(group)

    @functools.wraps(getattr(ParamGroup, method))
    def run(*args: Any) -> Any:
        group = alive()
        assert group is not None
        name = group.name.replace("(root)", "root")
        with record_function(f"{label} ({name})"):
            return getattr(type(group), method)(group, *args)

    return run
