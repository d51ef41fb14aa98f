"""Whether all ranks of a process group are there: asked once, before a unit uses it first.

Rooms above core ask (`fsdp2.checks.presence`). Nothing here runs in a step.
"""

from __future__ import annotations

from weakref import WeakSet

import torch

from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.notices import Notice

first_use: Notice[[ProcessGroup, torch.device, str]] = Notice()
"""Called before the first use of a process group, with its device and the unit's name."""

# Weak: a destroyed group, and what its backend holds, would stay alive otherwise.
_met: WeakSet[ProcessGroup] = WeakSet()


def meet(group: ProcessGroup | None, device: torch.device, unit: str) -> None:
    """Return when every rank of ``group`` is there; at once after the first time.

    Args:
        group: the process group.
        device: of its collectives.
        unit: name of the unit that is about to use it, for messages.

    Raises:
        RankMismatchError: a rank does not come, or has another backend.
        CommunicationError: it cannot be asked for any more.
    """
    if group is not None and group not in _met:
        first_use(group, device, unit)
        # Last: if a rank does not come, the next use asks again.
        _met.add(group)
