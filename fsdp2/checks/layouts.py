"""Log messages about the units below a root, when it becomes a root."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from fsdp2.core.layout.layout import GroupLayout
from fsdp2.core.modules import registry

LAYOUT = logging.getLogger("fsdp2.layout")
"""INFO: once per root, units, groups, bytes that a rank holds, gathers and pads; DEBUG: the same
per group.
"""


def _log_layout(root: str, units: Iterable[tuple[str, Sequence[GroupLayout]]]) -> None:
    """Log the contents of the units below a root."""
    named = [(name, layout) for name, layouts in units for layout in layouts]
    if not LAYOUT.isEnabledFor(logging.INFO):
        return
    details = LAYOUT.isEnabledFor(logging.DEBUG)
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
    for (name, layout), nbytes in zip(named, gathered, strict=True) if details else ():
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


registry.started.add(_log_layout)
