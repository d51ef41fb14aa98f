"""Communication hooks for `FullyShardedDataParallel.register_comm_hook`.

    hook(state, grad, output)    sharded: sum the flat ``grad`` [ranks * n], this rank's part to
                                 ``output`` [n]
    hook(state, grad)            NO_SHARD: sum the flat ``grad`` in place

torch's default ones are under their names here; its compressing ones call ``record_stream``, which
tensors in CPU memory refuse, so that fsdp2 has its own. The state, `DefaultState`, takes the
process group to reduce over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    reduce_scatter_hook,
)

from fsdp2.core.facts import GroupCollectives, ProcessGroup, ReduceKind, ReduceScatter

__all__ = [
    "DefaultState",
    "HookedReduceScatter",
    "HookedReplicas",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]

Hook = Callable[..., object]
"""Called with its state, a flat gradient and, where parameters are sharded, an output."""


def fp16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Average in float16: half the bytes. Without ``output`` in place, as `allreduce_hook`."""
    _compress(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Average in bfloat16: half the bytes. Without ``output`` in place, as `allreduce_hook`."""
    _compress(torch.bfloat16, state, grad, output)


def _compress(
    dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    small = grad.to(dtype)
    if output is None:
        allreduce_hook(state, small)
        grad.data = small.to(state.parameter_type)
        return
    part = output.to(dtype)
    reduce_scatter_hook(state, small, part)
    output.data = part.to(state.parameter_type)


class HookedReduceScatter(ReduceScatter):
    """Lets a unit's reduce-scatters be a user's hook."""

    def __init__(self, state: object, hook: Hook) -> None:
        self._state, self._hook = state, hook

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """New memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Call the hook; it may give the output other memory and another dtype."""
        output = output_tensor.detach()
        self._hook(self._state, input_tensor.detach(), output)
        if output.data_ptr() != output_tensor.data_ptr():
            output_tensor.copy_(output)


class HookedReplicas(GroupCollectives):
    """Lets a unit's all-reduces be a user's hook."""

    def __init__(
        self, group: ProcessGroup, device: torch.device, state: object, hook: Hook
    ) -> None:
        super().__init__(group, device, asynchronous=False)
        self._state, self._hook = state, hook

    def all_reduce(self, tensor: torch.Tensor, kind: ReduceKind) -> None:
        """Call the hook; it may give the gradient other memory and another dtype."""
        grad = tensor.detach()
        self._hook(self._state, grad)
        if grad.data_ptr() != tensor.data_ptr():
            tensor.copy_(grad)
