"""What one call of ``fully_shard`` made, as the scheduler sees it: groups and flags.

IDLE ──forward──> FORWARD ──> IDLE ──backward──> BACKWARD ──> REDUCED ──end of backward──> IDLE
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from fsdp2.core.config import GroupOptions
from fsdp2.core.group import ParamGroup


class Phase(Enum):
    """Where a unit is in its iteration."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCED = "reduced"


IDLE, FORWARD, BACKWARD, REDUCED = Phase
"""For the hot path, as in `fsdp2.core.streams`."""


class Unit:
    """What one call of ``fully_shard`` made: groups that are used together, and their flags.

    Attributes:
        name: full name of its module ("" for the root), or several joined by commas.
        groups: its parameter groups; none if every parameter belongs to other units.
        options: what groups that are added later begin with.
        reshard_after_forward: ``None`` for the default: keep at the root, free elsewhere.
        reshard_after_backward: whether parameters are freed after backward.
        sync: whether backward reduces gradients; otherwise they accumulate unreduced.
        all_reduce: whether reductions sum over copies too; otherwise partial sums are kept.
        unshard_in_backward: whether backward needs the gathered parameters.
        input_buffers: reductions of which the inputs may be alive at a time.
        forward_prefetch: units to gather when this one's forward starts; empty for the recorded
            order.
        backward_prefetch: the same for backward.
        is_root: whether it is the root of its scheduler.
        phase: where it is in the iteration.
        visits: a position in the forward's order of exits for each call whose backward is to come.
        filled: whether its absent gradients were taken as zeros since its backward began.
    """

    __slots__ = (
        "__weakref__",
        "all_reduce",
        "backward_prefetch",
        "filled",
        "forward_prefetch",
        "groups",
        "input_buffers",
        "is_root",
        "name",
        "options",
        "phase",
        "reshard_after_backward",
        "reshard_after_forward",
        "sync",
        "unshard_in_backward",
        "visits",
    )

    def __init__(
        self,
        name: str,
        groups: Sequence[ParamGroup],
        options: GroupOptions = GroupOptions(),  # noqa: B008  # frozen
    ) -> None:
        self.name = name
        self.groups = list(groups)
        self.options = options
        self.reshard_after_forward: bool | None = None
        self.reshard_after_backward = True
        self.sync = True
        self.all_reduce = True
        self.unshard_in_backward = True
        self.input_buffers = 1
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        self.is_root = False
        self.phase = IDLE
        self.visits: list[int] = []
        self.filled = False

    @property
    def title(self) -> str:
        """Its name for messages: "(root)" for the root."""
        return self.name or "(root)"

    @property
    def frees_after_forward(self) -> bool:
        """Whether parameters are freed when its forward ends."""
        if self.reshard_after_forward is None:
            return not self.is_root
        return self.reshard_after_forward

    @property
    def is_sharded(self) -> bool:
        """Whether a group of it has to be gathered before use."""
        for group in self.groups:  # noqa: SIM110  # asked in every prefetch
            if group.state.needs_gather:
                return True
        return False

    @property
    def is_gathered(self) -> bool:
        """Whether a group of it is gathered, or on its way."""
        return any(not group.state.needs_gather for group in self.groups)

    def change(self, **options: Any) -> None:
        """Replace options of its groups, and of those that will be added."""
        self.options = replace(self.options, **options)
        for group in self.groups:
            group.set_options(replace(group.options, **options))

    def reshard(self) -> None:
        """Free its gathered parameters; no-op where they are sharded."""
        for group in self.groups:
            group.reshard()

    @property
    def is_over(self) -> bool:
        """Whether it is sharded, and nothing is there to reduce."""
        for group in self.groups:  # noqa: SIM110  # asked for every unit at the end of backward
            if not group.is_over:
                return False
        return True

    def settle(self) -> None:
        """Block the host until it may write offloaded shards."""
        for group in self.groups:
            group.settle()

    def forbid_reading(self) -> None:
        """Let a backward raise that reads parameters which are not gathered.

        They have no memory then; the backward of an embedding and the like does not read it.
        """
        for group in self.groups:
            if group.state.needs_gather:
                for param in group.params:
                    param.forbid_reading()

    def reshard_if_outdated(self) -> None:
        """Free what was gathered before an optimizer step."""
        for group in self.groups:
            group.free_if_outdated()

    def __repr__(self) -> str:
        return f"Unit({self.title!r}, {self.phase.value})"
