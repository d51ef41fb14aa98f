"""The user's collectives: their interface, and a check of the buffers that they return.

AllGather       for `FSDPModule.set_custom_all_gather`
ReduceScatter   for `FSDPModule.set_custom_reduce_scatter`

`fsdp2.core.device.comm_memory` has fsdp2's own implementations, built in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp2.core.errors import coded


class Comm(ABC):
    """A user's own collective: it allocates its buffers and runs.

    A buffer is in use from ``allocate`` until the collective's result has been copied out of it,
    and must not be returned again earlier. Memory from an allocator never is. An object that keeps
    its buffers should serve one unit, whose all-gathers follow each other. Gradients of several
    dtypes and tensor subclasses with all-gather hooks use separate collectives, which request the
    second's buffer before the first returns its own.

    Example::

        class NewMemory(fsdp2.Comm):  # a base of an AllGather and a ReduceScatter
            def allocate(self, size, *, dtype, device):
                return torch.empty(*size, dtype=dtype, device=device)
    """

    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer for the collective, new at each call or kept by this object.

        Args:
            size: its shape, one length; return a tensor of exactly that shape.
            dtype: its dtype.
            device: its device.
        """


class AllGather(Comm):
    """A user's all-gather, for `FSDPModule.set_custom_all_gather`.

    Example::

        class Logged(fsdp2.AllGather):
            def allocate(self, size, *, dtype, device):
                return torch.empty(*size, dtype=dtype, device=device)

            def __call__(self, output_tensor, input_tensor, group, async_op=False):
                print(f"gathering {output_tensor.nbytes} bytes")
                return dist.all_gather_into_tensor(
                    output_tensor, input_tensor, group=group, async_op=async_op)
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` [n] of all ranks into ``output_tensor`` [ranks * n].

        ``input_tensor`` may be this rank's part of ``output_tensor``. It runs with the all-gather
        stream current; fsdp2 waits for a returned work object.
        """


class ReduceScatter(Comm):
    """A user's reduce-scatter, for `FSDPModule.set_custom_reduce_scatter`.

    Example::

        class Logged(fsdp2.ReduceScatter):
            def allocate(self, size, *, dtype, device):
                return torch.empty(*size, dtype=dtype, device=device)

            def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
                print(f"reducing {input_tensor.nbytes} bytes")
                return dist.reduce_scatter_tensor(
                    output_tensor, input_tensor, op=op, group=group, async_op=async_op)
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` [ranks * n] with ``op`` and scatter into ``output_tensor`` [n].

        ``op`` is a ``torch.distributed.ReduceOp``: average, sum or a premultiplied sum. It runs
        with the reduction stream current; fsdp2 waits for a returned work object.
        """


def checked_buffer(
    comm: Comm, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A buffer of the user's collective, on the current lane; checked."""
    with torch.inference_mode(False):
        buffer = comm.allocate((numel,), dtype=dtype, device=device)
    if tuple(buffer.shape) != (numel,) or buffer.dtype != dtype:
        raise coded(
            ValueError,
            "custom-allocation",
            f"{type(comm).__name__}.allocate(({numel},), dtype={dtype}) returned a tensor of "
            f"shape {tuple(buffer.shape)} and {buffer.dtype}; return a 1-D tensor of the size and "
            f"dtype in the call",
        )
    return buffer
