"""Notifications to rooms above core: each adds its functions when the package is imported.

Core reports events; it knows neither the listeners nor their purpose:

    device.process_groups  first_use        a unit is about to use a process group
    modules.hooks       forward_raised      a forward raised
    modules.engine      backward_raised     a backward raised
    modules.registry    started             a module is the root of the units below it
    modules.optimizers  changed             an optimizer steps, whose parameters may have changed
                        steps               an optimizer steps; empty unless requested
    modules.registrations  gained           modules newly register parameters of a group
                        unexpected          a forward begins, and a module registers something else

A step that repeats the previous one calls nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Notice(Generic[P]):
    """An event in core: calls functions of rooms above, in order; they may raise to prevent it."""

    def __init__(self) -> None:
        self.functions: list[Callable[P, object]] = []

    def add(self, function: Callable[P, object], first: bool = False) -> None:
        """Call ``function`` from now on, after the others, or ``first``."""
        self.functions.insert(0 if first else len(self.functions), function)

    def remove(self, function: Callable[P, object]) -> None:
        self.functions.remove(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for function in self.functions:
            function(*args, **kwargs)
