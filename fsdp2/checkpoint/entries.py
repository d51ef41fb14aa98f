"""Tensors that stay in their files: mapped, read block by block, and released after use.

    __0_0.distcp  ─ mapped ─> Piece(offsets (0, 0)) ┐
    __1_0.distcp  ─ mapped ─> Piece(offsets (4, 0)) ┴─> Entry ── blocks() ──> bytes, row-major

Memory holds a block of a tensor at a time. If a tensor's pieces are not split only on dim 0, it is
assembled first: memory holds that one tensor.
"""

from __future__ import annotations

import ctypes
import errno
import io
import math
import mmap
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fsdp2.checkpoint.boxes import cover
from fsdp2.core.errors import CheckpointError, coded

BLOCK = 1 << 20  # bytes that are read at once, unless one element of dim 0 of a piece has more
_AT_ONCE = 1 << 24  # the same, of what is in memory anyway

Tree: TypeAlias = Any
"""Nested dicts, lists and tuples of entries and plain values."""


class MappedFile:
    """A file whose pages are read where they are touched.

    Raises:
        CheckpointError: it is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.length = path.stat().st_size
        if not self.length:
            raise coded(
                CheckpointError,
                "ckpt-file-empty",
                f"'{path}' is empty; save it again, or copy the whole file",
            )
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._begin = self.values(0, 1, torch.uint8).data_ptr()

    def read(self, begin: int, end: int) -> bytes:
        return self._map[begin:end]

    def values(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Numbers in the file, not copied; read-only."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)

    def offset_of(self, tensor: torch.Tensor) -> int:
        """The offset at which the numbers of a tensor in this file begin."""
        return tensor.data_ptr() - self._begin

    def release_all(self) -> None:
        """Let all pages go: where one is touched, the kernel may map megabytes around it."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def release(self, tensor: torch.Tensor) -> None:
        """Let the pages of a tensor in this file go; they are read again where they are touched."""
        begin = tensor.data_ptr() - self._begin
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        end = begin + (last + 1) * tensor.element_size()
        self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


class Window(io.RawIOBase):
    """A part of a mapped file, as a file."""

    def __init__(self, file: MappedFile, begin: int, end: int) -> None:
        self._file, self._first, self._end = file, begin, end
        self._at = begin

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at - self._first

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: self._first, io.SEEK_CUR: self._at, io.SEEK_END: self._end}[whence]
        if start + offset < self._first:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = start + offset
        return self.tell()

    def read(self, size: int = -1) -> bytes:
        end = self._end if size < 0 else min(self._at + size, self._end)
        found = self._file.read(self._at, max(end, self._at))
        self._at += len(found)
        return found


@dataclass(frozen=True)
class Piece:
    """A part of a tensor.

    Attributes:
        tensor: its numbers.
        offsets: where it begins in the whole tensor, an index a dim.
        file: what the numbers are mapped from; ``None`` if they are in memory.
    """

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    file: MappedFile | None = None

    @property
    def block(self) -> int:
        """Bytes of a block at most."""
        return _AT_ONCE if self.file is None else BLOCK

    def blocks(self) -> Iterator[torch.Tensor]:
        """Views one after the other, in row-major order; pages are released after each."""
        for block in _blocks(self.tensor, self.block):
            yield block
            if self.file is not None:
                self.file.release(block)


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor, in pieces. Tied tensors of a file are one entry.

    Attributes:
        shape: of the whole.
        dtype: of the whole.
        pieces: they cover it, each element once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, file: MappedFile | None = None) -> Entry:
        """One that is whole."""
        shape = tuple(tensor.shape)
        return cls(shape, tensor.dtype, (Piece(tensor, (0,) * len(shape), file),))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def narrow(self, dim: int, start: int, length: int) -> Entry:
        """A part of it, along one dim."""
        found = []
        for piece in self.pieces:
            at = piece.offsets[dim]
            low, high = max(start, at), min(start + length, at + piece.tensor.shape[dim])
            if low < high:
                offsets = (*piece.offsets[:dim], low - start, *piece.offsets[dim + 1 :])
                part = piece.tensor.narrow(dim, low - at, high - low)
                found.append(Piece(part, offsets, piece.file))
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return Entry(shape, self.dtype, tuple(found))

    def blocks(self) -> Iterator[memoryview]:
        """Its bytes in row-major order."""
        for block in self._ordered():
            held = block.contiguous().resolve_conj().resolve_neg()
            size = held.numel() * held.element_size()
            yield memoryview((ctypes.c_ubyte * size).from_address(held.data_ptr())).cast("B")

    def whole(self) -> torch.Tensor:
        """It, in memory."""
        found = torch.empty(self.shape, dtype=self.dtype)
        for piece in self.pieces:
            place = found
            for dim, start in enumerate(piece.offsets):
                place = place.narrow(dim, start, piece.tensor.shape[dim])
            for to, block in zip(_blocks(place, piece.block), piece.blocks(), strict=True):
                to.copy_(block)
        return found

    def _ordered(self) -> Iterator[torch.Tensor]:
        if not self.numel:
            return
        rows = all(
            piece.tensor.shape[1:] == self.shape[1:] and not any(piece.offsets[1:])
            for piece in self.pieces
        )
        if not rows:
            yield from _blocks(self.whole(), BLOCK)
            return
        for piece in sorted(self.pieces, key=lambda piece: piece.offsets):
            yield from piece.blocks()


def _blocks(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Views of ``size`` bytes or less, in row-major order; of equal shapes the same."""
    if tensor.numel() * tensor.element_size() <= size:
        if tensor.numel():
            yield tensor
        return
    row = tensor[0].numel() * tensor.element_size()
    if row > size:
        for each in tensor:
            yield from _blocks(each, size)
        return
    for start in range(0, len(tensor), size // row):
        yield tensor[start : start + size // row]


def whole_of(
    name: str, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Piece], source: Path
) -> Entry:
    """An entry of pieces that ranks have saved; copies count once.

    Raises:
        CheckpointError: they do not cover it.
    """
    once = {(piece.offsets, tuple(piece.tensor.shape)): piece for piece in pieces}
    kept = [piece for piece in once.values() if piece.tensor.numel()]
    covered = sum(piece.tensor.numel() for piece in kept)
    boxes = [(piece.offsets, tuple(piece.tensor.shape)) for piece in kept]
    if any(piece.tensor.dtype != dtype for piece in kept) or not cover(shape, boxes):
        raise coded(
            CheckpointError,
            "ckpt-parts-missing",
            f"'{source}' has only {covered} of {math.prod(shape)} elements of '{name}'; copy the "
            f"files of all ranks, from the same step",
        )
    return Entry(tuple(shape), dtype, tuple(kept))


def entries_of(tree: Tree) -> Iterator[Entry]:
    """All entries below, in order."""
    if isinstance(tree, Entry):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from entries_of(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from entries_of(value)
