"""The safetensors format by byte offsets: many processes write one file; slices are read in place.

    names, shapes, dtypes ── plan ──> Layout: files, headers, the first byte of every tensor
    Layout                ── Writer ─> create on one rank; write slices on all ranks; synced
    a place in a file     ── Reader ─> slices of a tensor into memory that is there

    [ 8 bytes: n ][ n bytes: JSON, padded to 8 ][ tensor ][ tensor ] …       one file

This module knows plain names, shapes and dtypes; it knows no model and does not communicate.

The package ``safetensors`` writes a file from one process that has all tensors whole, and does not
return the offsets of tensors. Here each rank writes its own slices, which requires the offsets;
`contents` reads such files with the package. Order, header and padding are identical to the
package's, byte for byte; tests compare them.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from fsdp2.checkpoint import files
from fsdp2.checkpoint.stores import AnyPath
from fsdp2.core.errors import checkpoint_error

DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names, in the order in which the package puts tensors into a file."""

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
METADATA = "__metadata__"
BLOCK = 8 << 20  # bytes that are staged at once, where they cannot be used as they lie
_SMALL = 4096  # bytes; shorter runs are read with what lies between them
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}


@dataclass(frozen=True)
class About:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """The position of a full tensor's bytes."""

    file: str
    offset: int
    about: About


@dataclass(frozen=True)
class Layout:
    """The files that tensors become."""

    headers: Mapping[str, bytes]
    lengths: Mapping[str, int]
    places: Mapping[str, Place]
    index: bytes | None

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(self.lengths.values()) + len(self.index or b"")


# ---- what will be where


def plan(
    tensors: Mapping[str, About],
    *,
    shard_bytes: int | None = None,
    tied: Mapping[str, str] | None = None,
) -> Layout:
    """Decide files and offsets from facts that all ranks share; the same on each.

    Tensors go into files in their order: a file takes the next tensor as long as it stays within
    ``shard_bytes``, and a larger tensor has a file of its own, as ``save_pretrained`` does it.
    """
    for name, about in tensors.items():
        if about.dtype not in _NAMES:
            raise checkpoint_error(
                "tensors-dtype",
                f"'{name}' has dtype {about.dtype}, which safetensors does not support; pass "
                f"dtype= if it is a floating-point tensor, or let names= return None for it",
            )
        if name == METADATA:
            raise checkpoint_error(
                "tensors-name",
                f"'{name}' is a name that safetensors reserves; let names= return another name "
                f"for it",
            )
    shards = _shards(tensors, shard_bytes)
    headers: dict[str, bytes] = {}
    lengths: dict[str, int] = {}
    places: dict[str, Place] = {}
    for number, names in enumerate(shards, 1):
        file = f"model{SUFFIX}"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}{SUFFIX}"
        others = {other: name for other, name in (tied or {}).items() if name in set(names)}
        header, offsets = _header({name: tensors[name] for name in names}, others)
        headers[file] = header
        lengths[file] = len(header) + sum(tensors[name].nbytes for name in names)
        places |= {n: Place(file, len(header) + at, tensors[n]) for n, at in offsets.items()}
    index = None
    if len(shards) > 1:
        total = sum(about.nbytes for about in tensors.values())
        where = {name: places[name].file for name in tensors}
        content = {"metadata": {"total_size": total}, "weight_map": where}
        index = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    return Layout(headers, lengths, {name: places[name] for name in tensors}, index)


def _shards(tensors: Mapping[str, About], limit: int | None) -> list[list[str]]:
    """Names of each file."""
    closed: list[list[str]] = []
    current: list[str] = []
    size = 0
    for name, about in tensors.items():
        if limit is not None and about.nbytes > limit:
            closed.append([name])
            continue
        if limit is not None and current and size + about.nbytes > limit:
            closed.append(current)
            current, size = [], 0
        current.append(name)
        size += about.nbytes
    return [*closed, current] if current or not closed else closed


def _header(tensors: Mapping[str, About], tied: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """A file's first bytes, and the offset of each tensor after them."""
    ordered = sorted(tensors, key=lambda name: (_RANKS[tensors[name].dtype], name.encode()))
    content: dict[str, object] = {METADATA: {"format": "pt", **tied}}
    offsets, at = {}, 0
    for name in ordered:
        about = tensors[name]
        offsets[name] = at
        content[name] = {
            "dtype": _NAMES[about.dtype],
            "shape": list(about.shape),
            "data_offsets": [at, at + about.nbytes],
        }
        at += about.nbytes
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


# ---- writing


class Writer:
    """The files of a layout, to which any number of processes write their slices at once."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder = folder
        self._layout = layout
        self._open: dict[str, BinaryIO] = {}

    def create(self) -> None:
        """Make all files, with their headers and lengths, and the index; `close` syncs them."""
        for name, header in self._layout.headers.items():
            file = self._open[name] = files.DISK.create(self._folder / name)
            files.DISK.resize(file, self._layout.lengths[name])
            files.DISK.write_at(file, header, 0)
        if self._layout.index is not None:
            files.write_durably({self._folder / INDEX: self._layout.index})

    def write(self, name: str, tensor: torch.Tensor, offsets: Sequence[int] | None = None) -> None:
        """Write a tensor, or a box of one, and no other bytes; at most 8 MiB are staged."""
        place = self._layout.places[name]
        first = tuple(offsets or (0,) * tensor.dim())
        assert lies_in(place.about.shape, first, tensor.shape), (name, first, tensor.shape)
        file = self._open.get(place.file)
        if file is None:
            file = self._open[place.file] = files.DISK.open(self._folder / place.file)
        tensor = tensor.detach().resolve_conj().resolve_neg()
        for block in blocks(place.about, tuple(tensor.shape)):
            part = tensor[block].to("cpu", place.about.dtype).contiguous()
            begin = tuple(s.start + o for s, o in zip(block, first, strict=True))
            data = bytes_of(part)
            done = 0
            for at, length in _runs(place.about, begin, tuple(part.shape)):
                files.DISK.write_at(file, data[done : done + length], place.offset + at)
                done += length

    def close(self) -> None:
        """Sync and close what was made or written; call it again to no effect."""
        while self._open:
            _, file = self._open.popitem()
            with file:
                files.DISK.sync(file)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        if raised is None:
            self.close()
        self.abandon()

    def abandon(self) -> None:
        """Close all files, as what was written is of no use."""
        while self._open:
            self._open.popitem()[1].close()


# ---- reading


class Reader:
    """Boxes of tensors whose places are known, read into memory that is there."""

    def __init__(self, folder: AnyPath) -> None:
        self._folder = folder
        self._open: dict[str, BinaryIO] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def opened(self, name: str) -> BinaryIO:
        """A file of the folder, which stays open."""
        file = self._open.get(name)
        if file is None:
            file = self._open[name] = (self._folder / name).open("rb")
        return file

    def read_box(self, place: Place, out: torch.Tensor, first: tuple[int, ...]) -> None:
        """Fill ``out``, of any device, stride and dtype, with the box that begins at ``first``.

        Bytes are read to where they belong if ``out`` is on the CPU, in order, and of the file's
        dtype. Else at most 8 MiB are staged. Runs of less than 4 KiB are read with what lies
        between them.
        """
        file, out = self.opened(place.file), out.detach()
        for block in blocks(place.about, tuple(out.shape)):
            begin = tuple(s.start + o for s, o in zip(block, first, strict=True))
            self._read_block(file, place, out[block], begin)

    def _read_block(
        self, file: BinaryIO, place: Place, out: torch.Tensor, begin: tuple[int, ...]
    ) -> None:
        about, shape = place.about, tuple(out.shape)
        runs = _runs(about, begin, shape)
        start, length = next(runs)
        count = out.numel() * about.dtype.itemsize // length
        if count > 1 and length < _SMALL:
            strides = _strides(about.shape)
            span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            staged = torch.empty(span, dtype=about.dtype)
            self._fill(file, place, staged, iter([(start, staged.nbytes)]))
            out.copy_(staged.as_strided(shape, strides))
            return
        there = out.is_cpu and out.dtype == about.dtype and out.is_contiguous()
        staged = out if there else torch.empty(shape, dtype=about.dtype)
        self._fill(file, place, staged, itertools.chain([(start, length)], runs))
        if not there:
            out.copy_(staged)

    def _fill(
        self,
        file: BinaryIO,
        place: Place,
        staged: torch.Tensor,
        runs: Iterator[tuple[int, int]],
    ) -> None:
        data, done = bytes_of(staged), 0
        for at, length in runs:
            if files.read_at(file, data[done : done + length], place.offset + at) != length:
                path = self._folder / place.file
                raise checkpoint_error(
                    "tensors-shorter",
                    f"'{path}' became shorter while fsdp2 read it; copy the file again",
                )
            done += length


# ---- boxes and runs


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The first element in each dim, and the extents."""


def cover(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes lie in a tensor, do not overlap, and leave no element out."""
    full = [(first, sizes) for first, sizes in boxes if math.prod(sizes)]
    if sum(math.prod(sizes) for _, sizes in full) != math.prod(shape):
        return False
    if not all(lies_in(shape, *box) for box in full):
        return False
    if len(full) <= 1:
        return True
    open_: list[Box] = []  # that reach to the index of dim 0 that is looked at
    for first, sizes in sorted(full):
        open_ = [box for box in open_ if box[0][0] + box[1][0] > first[0]]
        if any(_overlap((first, sizes), other) for other in open_):
            return False
        open_.append((first, sizes))
    return True


def lies_in(shape: Sequence[int], first: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a box is a part of a tensor."""
    return len(first) == len(sizes) == len(shape) and all(
        min(at, length) >= 0 and at + length <= whole
        for at, length, whole in zip(first, sizes, shape, strict=True)
    )


def _overlap(one: Box, other: Box) -> bool:
    pairs = zip(*one, *other, strict=True)
    return all(at < place + size and place < at + length for at, length, place, size in pairs)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index of each dim to the next, in order."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def blocks(about: About, shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Parts of a box of ``shape`` that each span at most a block of the file; none of an empty."""

    def below(shape: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
        if not shape:
            yield ()
            return
        step = BLOCK // (strides[0] * about.dtype.itemsize)
        rest = tuple(slice(0, length) for length in shape[1:])
        for start in range(0, shape[0], max(1, step)):
            if step:
                yield slice(start, min(start + step, shape[0])), *rest
            else:
                for inner in below(shape[1:], strides[1:]):
                    yield slice(start, start + 1), *inner

    return below(shape, _strides(about.shape)) if math.prod(shape) else iter(())


def _runs(
    about: About, first: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """(first byte in the tensor, bytes) of what lies together of a box that is not empty."""
    strides, item = _strides(about.shape), about.dtype.itemsize
    split = len(shape)
    while split and shape[split - 1] == about.shape[split - 1]:
        split -= 1
    split = max(0, split - 1)  # of this dim a part lies together
    length = math.prod(shape[split:]) * item
    start = sum(at * stride for at, stride in zip(first, strides, strict=True))
    for outer in itertools.product(*(range(n) for n in shape[:split])):
        at = start + sum(i * stride for i, stride in zip(outer, strides[:split], strict=True))
        yield at * item, length


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which must outlive it."""
    size = tensor.numel() * tensor.dtype.itemsize
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr()))
