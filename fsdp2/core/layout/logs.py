"""What fsdp2 tells the standard ``logging``: layouts, binds, what was given up.

    fsdp2.layout     INFO    once a root: units, groups, bytes a rank holds, gathers and pads
                     DEBUG   the same of every group
    fsdp2.bind       DEBUG   a group bound its buffers, and why
    fsdp2.schedule   DEBUG   a guess that was not used, an iteration that was given up

Nothing is called in a step that repeats the one before: all of it happens when a group is bound, or
at rare events. Arguments are formatted by ``logging``, if the level asks for the message.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp2.core.layout.layout import GroupLayout, ParamShape, Transport

LAYOUT = logging.getLogger("fsdp2.layout")
BIND = logging.getLogger("fsdp2.bind")
SCHEDULE = logging.getLogger("fsdp2.schedule")


@dataclass(frozen=True)
class BindReason:
    """Why a group binds; formatted only if the message is wanted.

    Attributes:
        before: the layout that it had when it was bound last; ``None``: never bound.
        shapes: its parameters as they are now.
        moved: names of those whose rows are not where the group put them.
    """

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


def log_layout(root: str, units: Iterable[tuple[str, Sequence[GroupLayout]]]) -> None:
    """Say what the units below a root hold.

    Args:
        root: name of its class.
        units: a name, and the layouts of its groups, for each.
    """
    named = [(name, layout) for name, layouts in units for layout in layouts]
    layouts = [layout for _, layout in named]
    gathered = [layout.gathered_bytes for layout in layouts]
    LAYOUT.info(
        "%s: %d units with %d groups of %d parameters; a rank holds %d bytes of shards, %d of "
        "them padding; all groups gathered are %d bytes, the largest is %d",
        root,
        len({name for name, _ in named}),
        len(layouts),
        sum(len(layout.slots) for layout in layouts),
        sum(layout.shard_bytes for layout in layouts),
        sum(layout.padding_bytes for layout in layouts),
        sum(gathered),
        max(gathered, default=0),
    )
    for (name, layout), nbytes in zip(named, gathered, strict=True):
        LAYOUT.debug(
            "%s: %d parameters (%d not on dim 0), %d bytes of shards, %d padding, %d gathered, %s",
            name,
            len(layout.slots),
            sum(slot.dim != 0 for slot in layout.slots),
            layout.shard_bytes,
            layout.padding_bytes,
            nbytes,
            layout.transports,
        )
