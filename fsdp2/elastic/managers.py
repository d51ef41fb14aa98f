"""The interface of a manager of replica groups: `torchft.Manager`, or a stand-in in tests."""

from __future__ import annotations

from typing import Protocol

import torch

from fsdp2.core.facts import Work


class Manager(Protocol):
    """The used part of `torchft.Manager`; its own docstrings say more."""

    def start_quorum(self) -> None:
        """Begin a step: find out which groups take part, and heal this one if it missed a step."""

    def allreduce(self, tensor: torch.Tensor) -> Work:
        """Average in place over the groups that take part; report errors instead of raising."""

    def should_commit(self) -> bool:
        """Whether the step counts: the same answer on all ranks of a group, asked once per step."""

    def current_step(self) -> int:
        """How many steps counted."""

    def num_participants(self) -> int:
        """How many groups take part in this step."""

    def is_participating(self) -> bool:
        """Whether this group does: not while it heals during the step."""

    def participating_rank(self) -> int | None:
        """This group's place among those that take part; ``None`` if it does not."""

    def batches_committed(self) -> int:
        """How many batches counted: in each step that counted as many as groups took part."""

    def state_dict(self) -> dict[str, int]:
        """Both counts, of steps and of batches."""

    def load_state_dict(self, state_dict: dict[str, int], /) -> None:
        """Take them over."""

    def errored(self) -> object:
        """The error that this rank has reported in this step, or ``None``."""

    def report_error(self, e: Exception) -> None:
        """Let the step be dropped by all ranks of this group."""
