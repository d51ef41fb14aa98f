"""How far this process has come, and what to say where a collective fails there.

Nothing is kept for the message but the count of optimizer steps, which gathers need anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from fsdp2.core.errors import CommunicationError, coded


class OptimizerSteps:
    """Counts optimizer steps in this process; parameters gathered before one are out of date.

    The counts are facts that ranks share, so that all of them gather again or none does.

    Attributes:
        count: how often parameters may have changed: where steps begin, and where they end.
        ended: steps that have ended.
    """

    count = 0
    ended = 0


class Backwards:
    """Counts backwards of this process that units have taken part in.

    Attributes:
        ended: those whose end was seen.
    """

    ended = 0


class ShardReaders:
    """Who reads shards beside training; who writes them lets these finish before.

    Attributes:
        waiting: each returns when it has read; it takes itself out. Empty where nobody reads.
    """

    waiting: ClassVar[list[Callable[[], None]]] = []

    @classmethod
    def finish(cls) -> None:
        """Return when shards may be written: at once where nobody reads."""
        for wait in tuple(cls.waiting):
            wait()


def communication_error(operation: str, unit: str, error: RuntimeError) -> CommunicationError:
    """What to raise where a collective raised ``error``: no `torch.OutOfMemoryError`, though.

    That one, a RuntimeError too, is left as it is. And no frame may keep either in a local
    variable: its traceback refers to the frame, and would keep all that is gathered.

    Args:
        operation: for example ``"all-gather"``.
        unit: name of the unit.
        error: what the backend raised.
    """
    backward = torch._C._current_graph_task_id() != -1
    return coded(
        CommunicationError,
        "collective-failed",
        f"the {operation} of unit '{unit}' failed in {'backward' if backward else 'forward'}, "
        f"iteration {OptimizerSteps.ended}, most likely as another rank has ended, is too late or "
        f"is at another step; fsdp2.debug(check_ranks=True) or FSDP2_DEBUG=1 finds out: {error}",
    )
