"""Communication hooks for `FullyShardedDataParallel.register_comm_hook`.

    hook(state, grad, output)    sharded: sum the flat ``grad`` [ranks * n], this rank's part to
                                 ``output`` [n]
    hook(state, grad)            NO_SHARD: sum the flat ``grad`` in place

The hooks here have the names, arguments and arithmetic of torch's default ones
(``torch.distributed.algorithms._comm_hooks.default_hooks``), which you may use as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fsdp2.core.custom_collectives import ReduceScatter
from fsdp2.core.device.collectives import GroupCollectives, ReduceKind, scatter_sums
from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.errors import coded
from fsdp2.ranks.transfers import sum_over

Hook = Callable[..., object]
"""Called with its state, a flat gradient and, where parameters are sharded, an output."""


class DefaultState:
    """The state of `allreduce_hook` and `reduce_scatter_hook`: a process group and two divisors.

    Gradients are averaged: divided by about half of the group's size before the sum, and by the
    rest after it, so that fp16 neither overflows nor vanishes.

    Args:
        process_group: the group to reduce over.

    Raises:
        ValueError: it is ``None``.
    """

    __slots__ = (
        "gradient_postdivide_factor",
        "gradient_predivide_factor",
        "process_group",
        "world_size",
    )

    def __init__(self, process_group: ProcessGroup) -> None:
        if process_group is None:
            raise coded(
                ValueError,
                "fsdp1-hook-state",
                "DefaultState got no process group; pass the one to reduce over",
            )
        self.process_group = process_group
        self.world_size = process_group.size()
        before = 1
        while self.world_size % before == 0 and self.world_size / before > before:
            before *= 2
        self.gradient_predivide_factor = float(before)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor


class LowPrecisionState(DefaultState):
    """The state of the compressing hooks, which adds the dtype of the result.

    Args:
        process_group: the group to reduce over.
        parameter_type: dtype of the reduced gradient. Default ``torch.float32``.
    """

    __slots__ = ("parameter_type",)

    def __init__(
        self, process_group: ProcessGroup, parameter_type: torch.dtype = torch.float32
    ) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Average ``grad``, of any shape, over the ranks in place: for ``NO_SHARD``."""
    if state.gradient_predivide_factor > 1:
        grad.div_(state.gradient_predivide_factor)
    sum_over(grad, state.process_group)
    if state.gradient_postdivide_factor > 1:
        grad.div_(state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Average ``grad`` [ranks * n] over the ranks, and keep this rank's part in ``output`` [n]."""
    if state.gradient_predivide_factor > 1:
        grad.div_(state.gradient_predivide_factor)
    scatter_sums(output, grad, state.process_group)
    if state.gradient_postdivide_factor > 1:
        output.div_(state.gradient_postdivide_factor)


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


# ---- how units call them


class HookedReduceScatter(ReduceScatter):
    """Lets a unit's reduce-scatters be a user's hook.

    Args:
        state: the hook's first argument.
        hook: called with it, the flat gradient and the output.
    """

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
    """Lets a unit's all-reduces be a user's hook.

    Args:
        group: the process group of the replicate axis.
        device: the device of the gradients.
        state: the hook's first argument.
        hook: called with it and the flat gradient.
    """

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
