"""What the first step of fsdp2 does, part by part: how often, and how long without what is inside.

    watch()                       before a model is sharded: functions of fsdp2 are wrapped
    taken_apart(step, clock)      runs it; rows of part, calls and milliseconds

The time of a part is what passes in its functions less what passes in those of other parts that
they call. The last row is the rest: the model's own operators, autograd, `zero_grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fsdp2.core.modules import hooks
from fsdp2.core.params import gradients
from fsdp2.core.schedule import bound, group, scheduler

Rows = list[tuple[str, int, float]]
"""Parts, how often their functions were called, and milliseconds."""

REST = "the model, autograd, zero_grad"
PARTS: dict[str, list[tuple[Any, str]]] = {
    "root found, order of units": [(hooks, "start"), (hooks.UnitHooks, "_check_registrations")],
    "ranks meet, notes in stores": [(group, "meet")],
    "communicators": [(scheduler, "connect_groups")],
    "parameters checked, laid out": [(group.ParamGroup, "_follow_params")],
    "rows moved to flat shards": [(group.ParamGroup, "_move_to")],
    "buffers, parameters compared": [(group, "Bound")],
    "gathers bound": [(bound, "make_gathers")],
    "gathered parameters made": [(bound.Bound, "_bind_params")],
    "reductions bound": [(bound.Bound, "bind_reductions")],
    "gathers": [(group.ParamGroup, "start_unshard"), (group.ParamGroup, "finish_unshard")],
    "gathered parameters freed": [(group.ParamGroup, "reshard")],
    "gradients taken, reduced": [(group.ParamGroup, "collect"), (group.ParamGroup, "reduce")],
    "DTensors of gradients": [(gradients.Gradients, "deliver")],
    "schedule": [
        *((scheduler.Scheduler, f"enter_{way}") for way in ("forward", "backward")),
        *((scheduler.Scheduler, f"exit_{way}") for way in ("forward", "backward")),
        (scheduler.Scheduler, "end_backward"),
    ],
    "hooks of modules": [(hooks.UnitHooks, "pre_forward"), (hooks.UnitHooks, "post_forward")],
}
"""Functions by part: where each is found, and its name there."""


class Ledger:
    """Calls and seconds by part, while it is open.

    Attributes:
        calls: by part.
        seconds: by part, without those of other parts inside.
        clock: what tells the time; ``None`` while nothing is noted.
    """

    def __init__(self) -> None:
        self.calls = dict.fromkeys(PARTS, 0)
        self.seconds = dict.fromkeys((*PARTS, REST), 0.0)
        self.clock: Callable[[], float] | None = None
        self._running = [REST]
        self._since = 0.0

    def run(self, step: Callable[[], object], clock: Callable[[], float]) -> None:
        """Note what ``step`` does."""
        self.clock, self._since = clock, clock()
        step()
        self._turn(clock)
        self.clock = None

    def noted(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as one of a part."""

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            if self.clock is None:
                return function(*args, **kwargs)
            self.calls[part] += 1
            self._turn(self.clock)
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn(self.clock)
                self._running.pop()

        return call

    def _turn(self, clock: Callable[[], float]) -> None:
        """What has run until now is over, or something inside of it begins."""
        now = clock()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now


_ledger = Ledger()


def watch() -> None:
    """Wrap the functions of all parts, for good: units that are made from now on call these."""
    for part, functions in PARTS.items():
        for owner, name in functions:
            setattr(owner, name, _ledger.noted(part, getattr(owner, name)))


def taken_apart(step: Callable[[], object], clock: Callable[[], float]) -> Rows:
    """Run a step; what it did."""
    _ledger.run(step, clock)
    ms = {part: seconds * 1e3 for part, seconds in _ledger.seconds.items()}
    return [(part, _ledger.calls.get(part, 1), ms[part]) for part in ms]


def table(rows: Rows) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Header and rows, and the sum of all."""
    total = sum(ms for _, _, ms in rows)
    shown: list[tuple[object, ...]] = [
        (part, calls, f"{ms:.2f}", f"{ms * 1e3 / calls:.1f}" if calls else "", f"{ms / total:.0%}")
        for part, calls, ms in rows
    ]
    shown.append(("all", "", f"{total:.2f}", "", ""))
    return ("part", "calls", "ms", "us a call", "share"), shown
