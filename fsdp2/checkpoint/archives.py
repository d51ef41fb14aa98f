"""Files of torch.save: read by torch without running code, and written tensor by tensor.

    archive/data.pkl     the nesting; a tensor in it is (storage, offset, shape, strides)
    archive/data/0       the bytes of storage 0, mapped where they are
    archive/data/1       …

``torch.save`` needs all tensors in memory, writes the whole storage of a view, and puts a checksum
of the values before them. `write_archive` takes one tensor at a time, and only the bytes after the
values depend on them: `items.framing_of` relies on this.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.tensors import bytes_of
from fsdp2.core.errors import CheckpointError, checkpoint_error

ALIGNMENT = 64  # bytes, of storages in the file, as torch.save does it
_SMALL, _ZIP64 = 30, 20  # bytes: of a member's header without names, and of its sizes of 64 bits

Bytes = bytes | bytearray | memoryview

Write = Callable[[Bytes], object]
"""Takes the output, from beginning to end."""


# ---- tensors that are read when they are needed


def lazy(shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> Tensor:
    """A meta tensor that stands for values which ``read`` returns."""
    made = torch.empty(shape, dtype=dtype, device="meta")
    made._fsdp2_read = read  # type: ignore[attr-defined]
    return made


def values_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor on the CPU: of a `lazy` one what it stands for."""
    read: Callable[[], Tensor] | None = getattr(tensor, "_fsdp2_read", None)
    found = tensor.detach() if read is None else read()
    return found.cpu().contiguous().resolve_conj().resolve_neg()


def mapped(tree: Any, change: Callable[[Tensor], object]) -> Any:
    """The same nesting, with other values in the place of tensors; shared containers stay so."""
    done: dict[int, Any] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if not isinstance(value, (dict, list, tuple)):
            return value
        if id(value) not in done:
            if isinstance(value, dict):
                done[id(value)] = {key: walk(each) for key, each in value.items()}
            else:
                done[id(value)] = type(value)(map(walk, value))
        return done[id(value)]

    return walk(tree)


# ---- reading


def read_file(path: Path) -> Any:
    """The object passed to ``torch.save``; tensors are mapped from the file, tied ones are one."""
    known: dict[object, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            raise checkpoint_error(
                "ckpt-file-shards",
                f"'{path}' has DTensors, the shards of one rank; load it in a job of as many ranks "
                f"and save it with torch.distributed.checkpoint",
            )
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        return known.setdefault(place, tensor) if tensor.numel() else tensor

    try:
        tree = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return mapped(tree, once)
    except (CheckpointError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # zip files and pickles may break in any way
        name = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and name is not None:
            raise checkpoint_error(
                "ckpt-file-code",
                f"'{path}' refers to '{name[1]}', which plain values do not need; save only "
                f"tensors, numbers, strings, lists and dicts",
            ) from error
        raise checkpoint_error(
            "ckpt-file-cut",
            f"'{path}' is not a complete file of torch.save, from torch 1.6 or later; save it "
            f"again, or copy the whole file",
        ) from error


# ---- writing


class _Counted(io.RawIOBase):
    """Counts written bytes; cannot seek, so that zip files store sizes after the bytes."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.count = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._write(data)
        self.count += len(data)
        return len(data)


@dataclass(frozen=True, eq=False)
class _Token:
    """The storage of a tensor, in a pickle."""

    number: int
    tensor: Tensor


class _Pickler(pickle.Pickler):
    """Tensors with storages of their own, which are numbered."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tokens: dict[int, _Token] = {}

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        token = self.tokens.setdefault(id(obj), _Token(len(self.tokens), obj))
        strides = torch.empty(obj.shape, dtype=obj.dtype, device="meta").stride()
        hooks: dict[int, object] = collections.OrderedDict()
        args = (token, 0, tuple(obj.shape), strides, False, hooks)
        if _storage_class(obj.dtype) is torch.UntypedStorage:
            return torch._utils._rebuild_tensor_v3, (*args, obj.dtype)
        return torch._utils._rebuild_tensor_v2, args

    def persistent_id(self, obj: object) -> object:
        if not isinstance(obj, _Token):
            return None
        kind = _storage_class(obj.tensor.dtype)
        untyped = kind is torch.UntypedStorage
        count = obj.tensor.nbytes if untyped else obj.tensor.numel()
        return "storage", kind, str(obj.number), "cpu", count


def _storage_class(dtype: torch.dtype) -> type:
    """The class that ``torch.save`` names: `torch.UntypedStorage` for newer dtypes."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return torch.UntypedStorage if name is None else cast(type, getattr(torch, name))


def _data_of(tensor: Tensor) -> Iterator[Bytes]:
    values = values_of(tensor)
    if values.numel():
        yield bytes_of(values)


def write_archive(
    write: Write, tree: Any, data_of: Callable[[Tensor], Iterator[Bytes]] = _data_of
) -> None:
    """Write what ``torch.load(weights_only=True, mmap=True)`` reads, one tensor after another."""
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(tree)
    counted = _Counted(write)
    with zipfile.ZipFile(cast("IO[bytes]", counted), "w") as archive:

        def member(name: str, blocks: Iterator[Bytes], size: int) -> None:
            info = zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0))
            info.file_size = size
            wide = size * 1.05 > zipfile.ZIP64_LIMIT
            start = counted.count + _SMALL + len(info.filename) + 4 + _ZIP64 * wide
            fill = -start % ALIGNMENT
            info.extra = struct.pack("<2sH", b"FB", fill) + b"\0" * fill
            with archive.open(info, "w", force_zip64=wide) as file:
                for block in blocks:
                    file.write(block)

        def small(name: str, content: bytes) -> None:
            member(name, iter([content]), len(content))

        small("data.pkl", text.getvalue())
        small(".format_version", b"1")
        small(".storage_alignment", str(ALIGNMENT).encode())
        small("byteorder", b"little")
        for token in pickler.tokens.values():
            member(f"data/{token.number}", data_of(token.tensor), token.tensor.nbytes)
        small("version", b"3\n")
