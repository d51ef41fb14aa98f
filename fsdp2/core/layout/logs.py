"""Messages that fsdp2 sends to the standard ``logging``: binds, and abandoned schedules.

    fsdp2.bind       DEBUG   a group bound its buffers, and why
    fsdp2.schedule   DEBUG   an unused prediction, an iteration that was given up

A step that repeats the previous one logs nothing: messages come from binding a group, or from rare
events.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fsdp2.core.layout.layout import GroupLayout, ParamShape, Transport

BIND = logging.getLogger("fsdp2.bind")
SCHEDULE = logging.getLogger("fsdp2.schedule")


def bind_reason(
    before: GroupLayout | None, shapes: Sequence[ParamShape], moved: Sequence[str]
) -> str:
    """Why a group binds: the first time, with another layout, or with rows that were ``moved``."""
    if before is None:
        return "first use"
    known = {
        slot.index: segment
        for segment in before.segments
        if segment.transport is not Transport.EXTENSION
        for slot in segment.slots
    }
    casts: dict[str, list[str]] = {}
    for index, shape in enumerate(shapes):
        old = known.get(index)
        if old is not None and old.shard_dtype != shape.shard_dtype:
            cast = f"from {old.shard_dtype} to {shape.shard_dtype}"
            casts.setdefault(cast, []).append(shape.name)
    reasons = [f"{_several(names)} changed {cast}" for cast, names in casts.items()]
    if moved:
        reasons.append(f"{_several(moved)} got other memory")
    return "; ".join(reasons) or "parameters may have changed"


def _several(names: Sequence[str]) -> str:
    more = len(names) - 1
    return f"'{names[0]}'" + (f" and {more} more" if more else "")
