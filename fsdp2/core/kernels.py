"""The tensor operations that transports and reductions launch on the current stream.

They are few, and behind one protocol, so that the same transports, reductions and scheduler run
on simulated tensors too (`fsdp2.core.virtual`), where each call states what it reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fsdp2.core.buffers import FlatBuffer, TransientBuffer

Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]

Strided = tuple[tuple[int, ...], tuple[int, ...], int]
"""Of a view in a flat tensor: shape; strides and start, in elements."""


class Kernels(Protocol):
    """Memory and copies of one device; tensors are opaque to the callers."""

    def transient(self, nbytes: int, name: str) -> Any:
        """A buffer that comes and goes."""

    def flat(self, nbytes: int, on_meta: bool) -> Any:
        """A persistent buffer."""

    def host_flat(self, nbytes: int, on_meta: bool, pin: bool) -> Any:
        """A persistent buffer in CPU memory, page-locked if ``pin``."""

    def to_host(self, source: Any, pin: bool) -> Any:
        """A copy in CPU memory, which is there once the lane is behind this call."""

    def empty(self, numel: int, dtype: Any, name: str) -> Any:
        """A new flat tensor, freed when its last reference goes."""

    def zeros(self, shape: tuple[int, ...], dtype: Any, name: str) -> Any:
        """A new tensor of zeros."""

    def pieces(self, flat: Any, sizes: Sequence[int]) -> Any:
        """Consecutive flat views of ``flat``."""

    def views(self, flat: Any, places: Sequence[Strided]) -> list[Any]:
        """Views of ``flat``."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy, casting where dtypes differ."""

    def copy_many(self, targets: Any, sources: Any) -> None:
        """Copy pairwise in as few kernels as the device can."""

    def split_copy(self, source: Any, sizes: Sequence[int], targets: Any) -> None:
        """``source``: [ranks, sum(sizes)] → ``targets[i]``: [ranks, sizes[i]]."""

    def chunk_cat(self, tensors: Any, chunks: int, out: Any) -> None:
        """Rows of each tensor in ``chunks`` equal (zero-padded) parts → ``out``: [chunks, …]."""

    def divide(self, tensor: Any, factor: float) -> None:
        """Divide in place."""

    def add_many(self, targets: Any, sources: Any) -> None:
        """Add pairwise, in place."""


class TorchKernels:
    """The real ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def transient(self, nbytes: int, name: str) -> TransientBuffer:
        """A buffer on the device."""
        return TransientBuffer(nbytes, self._device, name)

    def flat(self, nbytes: int, on_meta: bool) -> FlatBuffer:
        """A persistent buffer of zeros on the device, or without memory on meta."""
        return FlatBuffer(nbytes, torch.device("meta") if on_meta else self._device)

    def host_flat(self, nbytes: int, on_meta: bool, pin: bool) -> FlatBuffer:
        """A persistent buffer of zeros in CPU memory, or without memory on meta."""
        return FlatBuffer(nbytes, torch.device("meta" if on_meta else "cpu"), pin)

    def to_host(self, source: torch.Tensor, pin: bool) -> torch.Tensor:
        """One asynchronous copy."""
        target = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pin)
        return target.copy_(source, non_blocking=True)

    def empty(self, numel: int, dtype: torch.dtype, name: str) -> torch.Tensor:
        """An uninitialised flat tensor."""
        return torch.empty(numel, dtype=dtype, device=self._device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        """A tensor of zeros."""
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def pieces(self, flat: torch.Tensor, sizes: Sequence[int]) -> Tensors:
        """One call for all views: cheaper than a narrow each."""
        return flat.split_with_sizes(sizes)

    def views(self, flat: torch.Tensor, places: Sequence[Strided]) -> list[torch.Tensor]:
        """One call each."""
        return [flat.as_strided(*place) for place in places]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """One kernel; from page-locked memory without blocking the host."""
        target.copy_(source, non_blocking=True)

    def copy_many(self, targets: Tensors, sources: Tensors) -> None:
        """One fused kernel where the tensors allow it."""
        torch._foreach_copy_(targets, sources)

    def split_copy(self, source: torch.Tensor, sizes: Sequence[int], targets: Tensors) -> None:
        """One fused kernel on accelerators."""
        torch.split_with_sizes_copy(source, sizes, dim=1, out=targets)

    def chunk_cat(self, tensors: Tensors, chunks: int, out: torch.Tensor) -> None:
        """One fused kernel on accelerators, the cast included."""
        torch._chunk_cat(tensors, dim=0, num_chunks=chunks, out=out)

    def divide(self, tensor: torch.Tensor, factor: float) -> None:
        """One kernel."""
        tensor.div_(factor)

    def add_many(self, targets: Tensors, sources: Tensors) -> None:
        """One fused kernel."""
        torch._foreach_add_(targets, sources)
