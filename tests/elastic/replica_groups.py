"""Replica groups without torchft: what stands in for its manager.

    manager = StandIn()                             one group, which averages with nobody
    run_groups(2, lambda manager: ...)              groups as threads, each with its manager
    StandIn(Across(group))                          groups that a process group connects

An error is as torchft's: nothing is raised, the rest of the step does not travel, the vote is no.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

TIMEOUT = 60.0  # seconds after which a group that waits for another gives up

Exchange = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Takes this group's numbers to all groups, and brings theirs, in the order of groups."""


class Done:
    """A collective that is over."""

    def wait(self) -> bool:
        return True


class StandIn:
    """A manager of replica groups."""

    def __init__(self, exchange: Exchange = lambda tensor: [tensor], groups: int = 1) -> None:
        self._exchange, self._groups = exchange, groups
        self.participates = True
        self.others_participate = groups - 1
        self.breaks: int | None = None
        self.sent: list[int] = []
        self.step = self.begun = 0
        self._error: Exception | None = None

    def start_quorum(self) -> None:
        self._error, self.sent = None, []
        self.begun += 1

    def allreduce(self, tensor: torch.Tensor) -> Done:
        if len(self.sent) == self.breaks:
            tensor.fill_(torch.nan)  # as an all-reduce that stops half way
            self.report_error(RuntimeError("connection closed by peer"))
        self.sent.append(tensor.numel())
        if self._error is None:
            if not self.participates:
                tensor.zero_()
            total, *others = self._exchange(tensor.clone())
            total = total.clone()
            for other in others:
                total += other
            tensor.copy_(total.div_(self.num_participants()))
        return Done()

    def should_commit(self) -> bool:
        commits = self._error is None
        self.step += commits
        return commits

    def current_step(self) -> int:
        return self.step

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "batches_committed": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def num_participants(self) -> int:
        return self.others_participate + self.participates if self.begun else 0

    def is_participating(self) -> bool:
        return self.participates

    def errored(self) -> Exception | None:
        return self._error

    def report_error(self, e: Exception) -> None:
        self._error = e


def run_groups(groups: int, run: Callable[[StandIn, int], T]) -> list[T]:
    """The results of ``run(manager, group)`` in a thread for each group."""
    barrier = threading.Barrier(groups, timeout=TIMEOUT)
    values: list[Any] = [None] * groups

    def exchange(group: int, value: torch.Tensor) -> list[torch.Tensor]:
        values[group] = value
        barrier.wait()
        found = list(values)
        barrier.wait()
        return found

    def one(group: int) -> T:
        try:
            return run(StandIn(lambda tensor: exchange(group, tensor), groups), group)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(groups) as pool:
        running = [pool.submit(one, group) for group in range(groups)]
        return [each.result() for each in running]


def across(group: dist.ProcessGroup) -> StandIn:
    """The manager of a rank that a process group connects with its counterparts."""

    def exchange(tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(found, tensor, group=group)
        return found

    return StandIn(exchange, group.size())
