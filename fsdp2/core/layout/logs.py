"""Messages that fsdp2 sends to the standard ``logging``: binds, and abandoned schedules.

    fsdp2.bind       DEBUG   a group bound its buffers, and why
    fsdp2.schedule   DEBUG   an unused prediction, an iteration that was given up

A step that repeats the previous one logs nothing: messages come from binding a group, or from rare
events. ``logging`` formats the arguments if the level requests the message.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp2.core.layout.layout import GroupLayout, ParamShape, Transport

BIND = logging.getLogger("fsdp2.bind")
SCHEDULE = logging.getLogger("fsdp2.schedule")


@dataclass(frozen=True)
class BindReason:
    """Why a group binds, formatted only if wanted: another layout, or rows that were ``moved``."""

    before: GroupLayout | None
    shapes: Sequence[ParamShape]
    moved: Sequence[str]

    def __str__(self) -> str:
        if self.before is None:
            return "first use"
        known = {
            slot.index: segment
            for segment in self.before.segments
            if segment.transport is not Transport.EXTENSION
            for slot in segment.slots
        }
        casts: dict[str, list[str]] = {}
        for index, shape in enumerate(self.shapes):
            old = known.get(index)
            if old is not None and old.shard_dtype != shape.shard_dtype:
                cast = f"from {old.shard_dtype} to {shape.shard_dtype}"
                casts.setdefault(cast, []).append(shape.name)
        reasons = [f"{_several(names)} changed {cast}" for cast, names in casts.items()]
        if self.moved:
            reasons.append(f"{_several(self.moved)} got other memory")
        return "; ".join(reasons) or "parameters may have changed"


def _several(names: Sequence[str]) -> str:
    more = len(names) - 1
    return f"'{names[0]}'" + (f" and {more} more" if more else "")
