"""The two kinds of memory that a group owns.

    FlatBuffer        persistent: the group's shards        [segment 0 | pad | segment 1 | …]
    TransientBuffer   comes and goes: gathered parameters, casts and packed collectives

A TransientBuffer keeps its tensors for ever and gives their storage back in between. Autograd
saves views of gathered parameters for backward; when the storage is filled again, those views are
valid again (invariant I3). One storage means one allocation and one free a gather, whatever the
number of parameters.

Each view has a version counter of its own (`_aliased`): collectives and copies bump the counter of
the view that they write to, never that of the parameter that autograd saved (invariant I4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.utils.dlpack import from_dlpack


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides = []
    running = 1
    for length in reversed(shape):
        strides.append(running)
        running *= length
    return tuple(reversed(strides))


def _aliased(
    raw: torch.Tensor,
    dtype: torch.dtype,
    byte_offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
) -> torch.Tensor:
    """A view of ``raw``'s storage with a version counter of its own."""
    typed = torch.empty(0, dtype=dtype, device=raw.device)
    if strides is None:
        strides = contiguous_strides(shape)
    typed.set_(raw.untyped_storage(), byte_offset // dtype.itemsize, shape, strides)
    return typed


def _own_storage(raw: torch.Tensor) -> torch.Tensor:
    """The same memory as ``raw`` (bytes), behind a storage that begins and ends where it does."""
    if raw.numel() == 0:
        return torch.empty_like(raw)
    if type(raw) is not torch.Tensor or raw.is_meta:
        return raw  # no memory
    # By capsule: it orders no streams, and takes page-locked memory as what it is.
    alias: torch.Tensor = from_dlpack(torch._C._to_dlpack(raw))
    return alias


def separate(tensor: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A part of a contiguous tensor, with a storage of its own over that part of the memory.

    See `FlatBuffer.piece` for what that is good for.

    Args:
        tensor: contiguous.
        start: the part's first element.
        shape: of the part.
    """
    with torch.inference_mode(False):
        part = tensor.detach().view(-1).narrow(0, start, math.prod(shape)).view(torch.uint8)
        return _aliased(_own_storage(part), tensor.dtype, 0, shape, None)


class Buffer(Protocol):
    """Memory that tensors are views of."""

    def view(
        self,
        dtype: torch.dtype,
        byte_offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A tensor over the buffer; ``strides`` in elements, contiguous by default."""


class FlatBuffer:
    """A persistent flat buffer, viewed in any dtype at any aligned offset.

    Args:
        nbytes: its size in bytes.
        device: where it is.
        pin: whether its memory is page-locked; CPU only.
    """

    def __init__(self, nbytes: int, device: torch.device, pin: bool = False) -> None:
        with torch.inference_mode(False):
            self._raw = torch.zeros(nbytes, dtype=torch.uint8, device=device, pin_memory=pin)
        self.nbytes = nbytes
        self.device = device

    def view(
        self,
        dtype: torch.dtype,
        byte_offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A tensor over the buffer; ``strides`` in elements, contiguous by default."""
        with torch.inference_mode(False):
            return _aliased(self._raw, dtype, byte_offset, shape, strides)

    def piece(self, dtype: torch.dtype, byte_offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """As `view`, with a storage of its own over its part of the memory, which it keeps alive.

        What torch does to whole storages is then done to the piece alone: ``torch.save`` and
        ``copy.deepcopy`` of one parameter leave the others out. Nor can ``torch.save`` write a
        DTensor whose rows begin in the middle of a storage, or views of one storage in two dtypes.
        """
        with torch.inference_mode(False):
            end = byte_offset + math.prod(shape) * dtype.itemsize
            return separate(self._raw[byte_offset:end].view(dtype), 0, shape)

    @property
    def storage(self) -> torch.UntypedStorage:
        """The storage that every view shares."""
        return self._raw.untyped_storage()


class TransientBuffer:
    """A flat buffer whose memory is there only between ``acquire`` and ``release``.

    Views are made once, while the buffer is first allocated, and stay valid objects for good.

    Attributes:
        allocated: whether the memory is there (always, for an empty buffer). Nobody else resizes
            the storage, so that it need not be asked.
    """

    __slots__ = ("_raw", "_storage", "allocated", "name", "nbytes")

    def __init__(self, nbytes: int, device: torch.device, name: str) -> None:
        with torch.inference_mode(False):
            self._raw = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._storage = self._raw.untyped_storage()
        self.nbytes = nbytes
        self.name = name
        self.allocated = True

    def view(
        self,
        dtype: torch.dtype,
        byte_offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A tensor over the buffer, which must be allocated; ``strides`` in elements."""
        assert self.allocated, f"{self.name} is not allocated"
        with torch.inference_mode(False):
            return _aliased(self._raw, dtype, byte_offset, shape, strides)

    def references(self) -> int:
        """How many tensors and others refer to the memory, autograd's among them."""
        return torch._C._storage_Use_Count(self._storage._cdata)

    def acquire(self) -> None:
        """Allocate on the current stream, if the memory is not there; contents are undefined."""
        if not self.allocated:  # to resize would move memory that is there
            self._storage.resize_(self.nbytes)
            self.allocated = True

    def release(self) -> None:
        """Give the memory back to the current stream's allocator."""
        self.allocated = not self.nbytes  # first: an interrupt in between costs a copy at most
        self._storage.resize_(0)
