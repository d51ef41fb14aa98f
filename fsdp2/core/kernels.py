"""The tensor operations that transports and reductions launch on the current stream.

They are few, and behind one protocol, so that the same transports, reductions and scheduler run
on simulated tensors too (`fsdp2.core.virtual`), where each call states what it reads and writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fsdp2.core.buffers import FlatBuffer, TransientBuffer
from fsdp2.core.layout import contiguous_strides

Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]

Strided = tuple[tuple[int, ...], tuple[int, ...], int]
"""Of a view in a flat tensor: shape; strides and start, in elements."""


class Run(NamedTuple):
    """Views that lie one behind the other in a flat tensor and differ in dim 0 alone.

    Attributes:
        shape: of all of them together.
        place: the same, in a flat tensor of more; ``None`` where the tensor is made in ``shape``.
        sizes: of each in dim 0, or ``None`` where the run is a single view.
    """

    shape: tuple[int, ...]
    place: Strided | None
    sizes: tuple[int, ...] | None

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each view."""
        first, *inner = self.shape
        return [(size, *inner) for size in self.sizes or (first,)]


SHORTEST_RUN = 3
"""A view costs 0.8 µs; one that a split makes 0.3, after 1.3 for the first (torch 2.13, CPU)."""


def runs(shapes: Sequence[tuple[int, ...]], starts: Sequence[int]) -> list[Run]:
    """The fewest calls that make contiguous views of ``shapes``, in this order.

    Args:
        shapes: of each view, one dim at least.
        starts: where each begins, in elements.

    Example: shapes (2, 4), (6, 4), (2, 4) and (5,) from 0, 8, 32 and 40 are two runs, one of sizes
    (2, 6, 2) over (10, 4) from 0, and one over (5,) from 40.
    """
    found: list[list[int]] = []
    behind = -1
    for index, (shape, start) in enumerate(zip(shapes, starts, strict=True)):
        if start == behind and shape[1:] == shapes[found[-1][0]][1:]:
            found[-1].append(index)
        else:
            found.append([index])
        behind = start + math.prod(shape)
    planned: list[Run] = []
    for run in found:
        together = [run] if len(run) >= SHORTEST_RUN else [[index] for index in run]
        for indices in together:
            sizes = tuple(shapes[index][0] for index in indices)
            shape = (sum(sizes), *shapes[indices[0]][1:])
            place = (shape, contiguous_strides(shape), starts[indices[0]])
            planned.append(Run(shape, place, sizes if len(sizes) > 1 else None))
    return planned


def whole_run(shapes: Sequence[tuple[int, ...]]) -> Run | None:
    """The run of views that are all of a tensor; ``None`` where they differ beyond dim 0.

    Args:
        shapes: of each view, one dim at least.

    Example: (2, 4), (6, 4) and (2, 4) are the parts, of sizes (2, 6, 2), of a tensor of (10, 4).
    """
    inner = shapes[0][1:]
    if any(shape[1:] != inner for shape in shapes):
        return None
    sizes = tuple(shape[0] for shape in shapes)
    return Run((sum(sizes), *inner), None, sizes if len(sizes) > 1 else None)


class Kernels(Protocol):
    """Memory and copies of one device; tensors are opaque to the callers.

    Attributes:
        fuses: whether a copy of many tensors is one kernel where their layouts allow it.
    """

    fuses: bool

    def transient(self, nbytes: int, name: str) -> Any:
        """A buffer that comes and goes."""

    def flat(self, nbytes: int, on_meta: bool) -> Any:
        """A persistent buffer."""

    def host_flat(self, nbytes: int, on_meta: bool, pin: bool) -> Any:
        """A persistent buffer in CPU memory, page-locked if ``pin``."""

    def host_empty(self, shape: tuple[int, ...], dtype: Any, pin: bool) -> Any:
        """A new tensor in CPU memory, page-locked if ``pin``."""

    def to_host(self, target: Any, source: Any) -> None:
        """Copy to CPU memory, where it is once the lane is behind this call."""

    def empty(self, shape: tuple[int, ...], dtype: Any, name: str) -> Any:
        """A new tensor, freed when its last reference goes."""

    def zeros(self, shape: tuple[int, ...], dtype: Any, name: str) -> Any:
        """A new tensor of zeros."""

    def pieces(self, flat: Any, sizes: Sequence[int]) -> Any:
        """Consecutive flat views of ``flat``."""

    def views(self, flat: Any, planned: Sequence[Run]) -> list[Any]:
        """Views of ``flat``, as `runs` planned them."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy, casting where dtypes differ."""

    def copy_many(self, targets: Any, sources: Any) -> None:
        """Copy pairwise in as few kernels as the device can."""

    def split_copy(self, source: Any, sizes: Sequence[int], targets: Any) -> None:
        """``source``: [ranks, sum(sizes)] → ``targets[i]``: [ranks, sizes[i]].

        It is one kernel only where the source's rows lie one behind the other.
        """

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
        self.fuses = device.type != "cpu"

    def transient(self, nbytes: int, name: str) -> TransientBuffer:
        """A buffer on the device."""
        return TransientBuffer(nbytes, self._device, name)

    def flat(self, nbytes: int, on_meta: bool) -> FlatBuffer:
        """A persistent buffer of zeros on the device, or without memory on meta."""
        return FlatBuffer(nbytes, torch.device("meta") if on_meta else self._device)

    def host_flat(self, nbytes: int, on_meta: bool, pin: bool) -> FlatBuffer:
        """A persistent buffer of zeros in CPU memory, or without memory on meta."""
        return FlatBuffer(nbytes, torch.device("meta" if on_meta else "cpu"), pin)

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> torch.Tensor:
        """An uninitialised tensor in CPU memory."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pin)

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """One asynchronous copy."""
        target.copy_(source, non_blocking=True)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        """An uninitialised tensor."""
        # One by one: torch looks at a tuple for symbolic sizes, which takes half as long again.
        return torch.empty(*shape, dtype=dtype, device=self._device)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        """A tensor of zeros."""
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def pieces(self, flat: torch.Tensor, sizes: Sequence[int]) -> Tensors:
        """One call for all views: cheaper than a narrow each."""
        return flat.split_with_sizes(sizes)

    def views(self, flat: torch.Tensor, planned: Sequence[Run]) -> list[torch.Tensor]:
        """Two calls for a run, one for a single view; one less where it is all of ``flat``."""
        views: list[torch.Tensor] = []
        for _, place, sizes in planned:
            view = flat if place is None else flat.as_strided(*place)
            if sizes is None:
                views.append(view)
            else:
                views += view.split_with_sizes(sizes)
        return views

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
