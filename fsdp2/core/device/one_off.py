"""Collectives that no step binds: a few numbers, a barrier, the first one of a group.

They go through ``torch.distributed``'s functions, whose checks cost nothing here, and block the
host or the current stream until they are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from fsdp2.core.device.collectives import Collectives, GroupCollectives, ReduceKind


def gather_numbers(
    group: dist.ProcessGroup, numbers: Sequence[int], device: torch.device
) -> list[list[int]]:
    """The numbers of each rank of ``group``, as many of each, in the order of its ranks."""
    return GroupCollectives(group, device, asynchronous=False).exchange(numbers)


def largest_over(lines: Iterable[Collectives], numbers: Sequence[int]) -> list[int]:
    """The largest of each number over all ranks of ``lines``, so that all of them raise alike."""
    found = list(numbers)
    # One axis after the other: the second passes on what the first has found on its ranks.
    for line in lines if found else ():
        found = line.largest(found)
    return found


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the result of a functional collective; return any other tensor unchanged."""
    if isinstance(tensor, AsyncCollectiveTensor):
        result: torch.Tensor = tensor.wait()
        return result
    return tensor


def run_barrier(group: dist.ProcessGroup) -> None:
    """Block until all ranks of ``group`` are here, which makes its communicator."""
    dist.barrier(group)


def run_first_collective(group: dist.ProcessGroup, device: torch.device) -> None:
    """An all-reduce of one number, which makes the communicator of ``group``; blocks the host."""
    # As for lanes: the current stream waits for it, the host only for the communicator.
    GroupCollectives(group, device, asynchronous=True).all_reduce(
        torch.zeros(1, device=device), ReduceKind(average=False)
    )
