"""Files of torch.save: read as entries without running code, and written entry by entry.

    archive/data.pkl     the nesting; a tensor in it is (storage, offset, shape, strides)
    archive/data/0       the bytes of storage 0, mapped where they are
    archive/data/1       …

Objects of torch's distributed classes are not made: a `Record` keeps what the file says of them.
"""

from __future__ import annotations

import collections
import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard, cast

import torch

from fsdp2.checkpoint.entries import Entry, MappedFile, Tree, Window, entries_of
from fsdp2.checkpoint.files import BrokenError
from fsdp2.checkpoint.pickles import DTYPES, Interpreter, Maker, check_tree
from fsdp2.core.errors import CheckpointError, coded

ALIGNMENT = 64  # bytes, of storages in the file, as torch.save does it
_SMALL, _ZIP64 = 30, 20  # bytes: of a member's header without names, and of its sizes of 64 bits
_MEMBER = struct.Struct("<26xHH")  # lengths of a member's name and of what else stands there


Bytes = bytes | bytearray | memoryview

Write = Callable[[Bytes], object]
"""Takes the output, from beginning to end."""


# ---- reading


class Record:
    """An object that was not made: of a class of torch's for tensors of several ranks.

    Attributes:
        kind: name of its class.
        args: what it is made of.
        state: what it is set to.
    """

    kind = ""
    args: tuple[object, ...]
    state: Any

    def __new__(cls, *args: object) -> Record:
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    def __init__(self, *args: object) -> None:
        pass

    def build_from(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) == 2:  # of __dict__, of __slots__
            state = {**(state[0] or {}), **(state[1] or {})}
        self.state = state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


_RECORDED = (
    "torch.distributed._mesh_layout",
    "torch.distributed._shard.",
    "torch.distributed.device_mesh",
    "torch.distributed.remote_device",
    "torch.distributed.tensor",
)


def _encoded(text: str, encoding: str) -> bytes:
    """How protocol 2 has bytes."""
    if encoding != "latin1":
        raise BrokenError()
    return text.encode(encoding)


def _array(data: bytes | bytearray = b"") -> bytearray:
    if not isinstance(data, (bytes, bytearray)):  # a number would be so many bytes of memory
        raise BrokenError()
    return bytearray(data)


def _scalars(values: Iterable[object] = ()) -> Iterable[object]:
    """Elements that a set may have: hashed without recursion."""
    if any(isinstance(each, tuple) for each in values):
        raise BrokenError()
    return values


_LAYOUTS = {str(each): each for each in (torch.strided, torch.sparse_coo, torch.sparse_csr)}

_HARMLESS: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encoded,
    ("builtins", "bytearray"): _array,
    ("builtins", "complex"): complex,
    ("builtins", "frozenset"): lambda values=(): frozenset(_scalars(values)),
    ("builtins", "set"): lambda values=(): set(_scalars(values)),
    ("collections", "Counter"): lambda counts=(): collections.Counter(dict(counts)),
    ("collections", "OrderedDict"): dict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): lambda name: _LAYOUTS[name],
}


@dataclass(frozen=True)
class _Storage:
    """Bytes in a file."""

    key: str
    offset: int
    length: int
    dtype: torch.dtype


class _Names:
    """Makes entries and plain values, and nothing that could do something."""

    def __init__(self, file: MappedFile, members: dict[str, tuple[int, int]]) -> None:
        self._file = file
        self._members = members
        self._made: dict[object, Entry] = {}

    def find(self, module: str, name: str) -> object:
        """The value that stands for a name of the pickle."""
        module = {"__builtin__": "builtins"}.get(module, module)
        own: dict[tuple[str, str], Callable[..., object]] = {
            ("builtins", "getattr"): self._inner,
            ("torch._tensor", "_rebuild_from_type_v2"): self._typed,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._untyped,
            ("torch._utils", "_rebuild_wrapper_subclass"): Record,
            ("torch", "Tensor"): Record,
            ("torch.nn.parameter", "Parameter"): Record,
            ("torch.nn.parameter", "Buffer"): Record,
        }
        made = own.get((module, name), _HARMLESS.get((module, name)))
        if made is not None:
            return Maker(made)
        if any(module == each.rstrip(".") or module.startswith(each) for each in _RECORDED):
            return Maker(_kind(name))
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return torch.uint8 if name == "UntypedStorage" else _dtype_of(name)
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise coded(
            CheckpointError,
            "ckpt-file-code",
            f"'{self._file.path}' refers to '{module}.{name}', which plain values do not need; "
            f"save only tensors, numbers, strings, lists and dicts",
        )

    def persistent(self, pid: Any) -> _Storage:
        """The storage that a persistent id names."""
        _, dtype, key, _, count = pid
        offset, length = self._members[f"data/{key}"]
        if not isinstance(count, int) or not 0 <= count * dtype.itemsize <= length:
            raise BrokenError()
        return _Storage(key, offset, length, dtype)

    def _inner(self, outer: object, name: str) -> object:
        """A class in a class, which this version of pickle asks for so."""
        if not _makes_records(outer):
            raise BrokenError()
        return Maker(_kind(name))

    def _typed(self, make: object, kind: object, args: Iterable[object], state: object) -> object:
        if _makes_records(kind) and _makes_records(make):
            found = kind.make()
            assert isinstance(found, Record)
            found.build_from(state)
            return found
        if not isinstance(make, Maker):
            raise BrokenError()
        return make.make(*args)

    def _tensor(
        self,
        storage: _Storage,
        offset: int,
        shape: object,
        strides: object,
        _grad: bool = False,
        _hooks: object = None,
        flags: object = None,
    ) -> Entry:
        return self._entry(storage, storage.dtype, offset, shape, strides, flags)

    def _untyped(
        self,
        storage: _Storage,
        offset: int,
        shape: object,
        strides: object,
        _grad: bool,
        _hooks: object,
        dtype: torch.dtype,
        flags: object = None,
    ) -> Entry:
        return self._entry(storage, dtype, offset, shape, strides, flags)

    def _entry(
        self,
        storage: _Storage,
        dtype: torch.dtype,
        offset: int,
        shape: Any,
        strides: Any,
        flags: Any,
    ) -> Entry:
        place = (storage.key, dtype, offset, tuple(shape), tuple(strides), str(flags))
        if place not in self._made:
            count = storage.length // dtype.itemsize
            if torch.Size(shape).numel():
                flat = self._file.values(storage.offset, count, dtype)
                tensor = flat.as_strided(tuple(shape), tuple(strides), offset)
            else:
                tensor = torch.empty(tuple(shape), dtype=dtype)
            if (flags or {}).get("conj"):
                tensor = tensor.conj()
            if (flags or {}).get("neg"):
                tensor = torch._neg_view(tensor)
            self._made[place] = Entry.of(tensor, self._file if tensor.numel() else None)
        return self._made[place]


def _kind(name: str) -> type[Record]:
    """A class of records that is the file's own."""
    return type(name, (Record,), {"kind": name})


def _makes_records(value: object) -> TypeGuard[Maker]:
    made = value.make if isinstance(value, Maker) else None
    return isinstance(made, type) and issubclass(made, Record)


def _dtype_of(storage: str) -> torch.dtype:
    """FloatStorage -> torch.float32"""
    known = torch.storage._dtype_to_storage_type_map().items()
    return {name: dtype for dtype, name in known}[storage]


def read_archive(file: MappedFile, begin: int = 0, end: int | None = None) -> Tree:
    """The object passed to ``torch.save``, with tensors as entries.

    Args:
        file: the file.
        begin: where it begins there. Default 0.
        end: where it ends. Default ``None``: with the file.

    Raises:
        CheckpointError: it is truncated, or contains classes other than plain ones.
    """
    end = file.length if end is None else end
    try:
        with zipfile.ZipFile(cast("IO[bytes]", Window(file, begin, end))) as archive:
            members = {
                info.filename.partition("/")[2]: (_data_of(file, begin, info), info.file_size)
                for info in archive.infolist()
            }
            root = archive.infolist()[0].filename.partition("/")[0]
            text = archive.read(f"{root}/data.pkl")
            if "byteorder" in members and archive.read(f"{root}/byteorder") != b"little":
                raise BrokenError()
        names = _Names(file, members)
        tree = Interpreter(text, names.find, names.persistent).load()
        check_tree(tree)
        return tree
    except CheckpointError:
        raise
    except Exception as error:  # zip files and pickles may break in any way
        raise coded(
            CheckpointError,
            "ckpt-file-cut",
            f"'{file.path}' is not a complete file of torch.save; save it again, or copy the "
            f"whole file",
        ) from error
    finally:
        file.release_all()


def _data_of(file: MappedFile, begin: int, info: zipfile.ZipInfo) -> int:
    """The offset of a member's bytes in the file."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise BrokenError()
    header = begin + info.header_offset
    name, more = _MEMBER.unpack(file.read(header, header + _SMALL))
    return header + _SMALL + cast(int, name) + cast(int, more)


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
    """The storage of an entry, in a pickle."""

    number: int
    entry: Entry


class _Pickler(pickle.Pickler):
    """Entries as tensors of storages, which are numbered."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.entries: dict[Entry, _Token] = {}

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, Entry):
            return NotImplemented
        token = self.entries.setdefault(obj, _Token(len(self.entries), obj))
        strides = torch.empty(obj.shape, dtype=obj.dtype, device="meta").stride()
        hooks: dict[int, object] = collections.OrderedDict()
        args = (token, 0, obj.shape, strides, False, hooks)
        if _storage_class(obj.dtype) is torch.UntypedStorage:
            return torch._utils._rebuild_tensor_v3, (*args, obj.dtype)
        return torch._utils._rebuild_tensor_v2, args

    def persistent_id(self, obj: object) -> object:
        if not isinstance(obj, _Token):
            return None
        kind = _storage_class(obj.entry.dtype)
        count = obj.entry.nbytes if kind is torch.UntypedStorage else obj.entry.numel
        return "storage", kind, str(obj.number), "cpu", count


def _storage_class(dtype: torch.dtype) -> type:
    """The class that ``torch.save`` names: `torch.UntypedStorage` for newer dtypes."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return torch.UntypedStorage if name is None else cast(type, getattr(torch, name))


def write_archive(write: Write, tree: Tree) -> None:
    """Write what ``torch.load(weights_only=True, mmap=True)`` reads, a block at a time.

    Args:
        write: takes the bytes.
        tree: entries and plain values. An entry that is there twice is one tensor.
    """
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(tree)
    counted = _Counted(write)
    with zipfile.ZipFile(cast("IO[bytes]", counted), "w") as archive:

        def member(name: str, blocks: Iterable[Bytes], size: int) -> None:
            info = zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0))
            info.file_size = size
            wide = size * 1.05 > zipfile.ZIP64_LIMIT
            start = counted.count + _SMALL + len(info.filename) + 4 + _ZIP64 * wide
            fill = -start % ALIGNMENT
            info.extra = struct.pack("<2sH", b"FB", fill) + b"\0" * fill
            with archive.open(info, "w", force_zip64=wide) as file:
                for block in blocks:
                    file.write(block)

        member("data.pkl", [text.getvalue()], len(text.getvalue()))
        member(".format_version", [b"1"], 1)
        member(".storage_alignment", [str(ALIGNMENT).encode()], 2)
        member("byteorder", [b"little"], 6)
        for entry, token in pickler.entries.items():
            member(f"data/{token.number}", entry.blocks(), entry.nbytes)
        member("version", [b"3\n"], 2)


def read_file(path: Path) -> Tree:
    """The contents of one file of ``torch.save``."""
    return read_archive(MappedFile(path))


def size_of(tree: Tree) -> int:
    """Bytes of all entries, tied ones once."""
    return sum(entry.nbytes for entry in {id(e): e for e in entries_of(tree)}.values())
