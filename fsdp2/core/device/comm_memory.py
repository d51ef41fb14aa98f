"""Our collectives in memory that the backend would rather have.

They are what a user could pass to `set_custom_all_gather` and `set_custom_reduce_scatter`, ready
made: packed, each in a buffer that comes and goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.core.custom_collectives import AllGather, Comm, ReduceScatter
from fsdp2.core.device.collectives import run_all_gather, run_barrier, run_reduce_scatter


class GroupMemory:
    """Buffers from a process group's allocator, or plain ones where its backend has none."""

    only_sums = False
    """Whether a reduce-scatter in it can only sum."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(
        self, size: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        backend: Any = self._group._get_backend(device)
        if backend.supports_tensor_alloc(device):
            found: torch.Tensor = backend.allocate_tensor(prod(size), dtype=dtype, device=device)
            return found
        return torch.empty(*size, dtype=dtype, device=device)

    def meet(self, group: dist.ProcessGroup, *buffers: torch.Tensor) -> None:
        """Nothing to register with the other ranks."""


class SymmetricMemory:
    """Buffers from torch's pool of symmetric memory, which are used again and again."""

    only_sums = True  # so NCCL has it

    def __init__(self, backend: str) -> None:
        # Here, as CPU builds need not have it.
        import torch.distributed._symmetric_memory as symmetric

        self._symmetric = symmetric
        self._ready: set[str] = set()
        symmetric.set_backend(backend)  # type: ignore[arg-type]  # a literal

    def allocate(
        self, size: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        pool = self._symmetric.get_mem_pool(device)
        with torch.get_device_module(device).use_mem_pool(pool):
            return torch.empty(*size, dtype=dtype, device=device)

    def meet(self, group: dist.ProcessGroup, *buffers: torch.Tensor) -> None:
        """Exchange the buffers' addresses; torch remembers those that it has met before."""
        name = group.group_name
        if name not in self._ready:  # the exchange needs a communicator, made by the first use
            run_barrier(group)
            self._ready.add(name)
        for buffer in buffers:
            self._symmetric.rendezvous(buffer, group=name)


Memory = GroupMemory | SymmetricMemory


class OwnComm(Comm):
    """A built-in collective; the backend sees where its buffers are: in ``memory``."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.memory.allocate(size, dtype, device)


class OwnAllGather(OwnComm, AllGather):
    """The built-in all-gather."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Run it in place, so that one buffer is to be known."""
        self.memory.meet(group, output_tensor)
        return run_all_gather(group, output_tensor, input_tensor)


class OwnReduceScatter(OwnComm, ReduceScatter):
    """The built-in reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.memory.meet(group, input_tensor, output_tensor)
        return run_reduce_scatter(group, output_tensor, input_tensor, op)


OwnComms = tuple[OwnAllGather, OwnReduceScatter]
"""Our collectives over a process group, in one kind of memory."""


def conflicting(comms: Sequence[Comm | None], memory: type[Memory]) -> Comm | None:
    """The first of a group's collectives that is not in ``memory``; ``None``: there is none."""
    for comm in comms:
        if comm is not None and not isinstance(getattr(comm, "memory", None), memory):
            return comm
    return None
