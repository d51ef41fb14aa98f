"""DCP's files: a rank's items one after another, and the index of their positions.

    __0_0.distcp   [ archive of torch.save | archive | … ]     .metadata   name, box -> file, offset

`torch.distributed.checkpoint` writes the same. This module does not copy rows that are views of a
larger buffer, and renames nothing: if the file is new, so is its folder.

The index is read without running code. Nothing of torch's is made before all of it is checked:
names, shapes, boxes that cover each tensor once, and files that lie in the folder.

    .metadata ── _Interpreter ─> drafts ── checked ─> Metadata
"""

from __future__ import annotations

import functools
import io
import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from typing import IO, Any, ClassVar, TypeVar, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fsdp2.checkpoint.archives import ALIGNMENT, write_archive
from fsdp2.checkpoint.files import BrokenError, Summed
from fsdp2.checkpoint.staging import copied, is_plain
from fsdp2.checkpoint.stores import INDEX, AnyPath, is_inside
from fsdp2.checkpoint.tensors import cover
from fsdp2.core.errors import CheckpointError, checkpoint_error

T = TypeVar("T")

_LONGEST = 1 << 24
"""Entries of a list in a state dict, which are made when the last of them is named."""

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""By the names that pickles have for them; asking torch for other names would import modules."""

_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


# ---- written


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"__{rank}_0{filesystem.DEFAULT_SUFFIX}"


def write_items(
    stream: Summed, name: str, plan: SavePlan, planner: SavePlanner
) -> list[WriteResult]:
    """Write what a plan says into the file of this name."""
    found = []
    for item in plan.items:
        begin = stream.tell()
        value = planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            stream.write(cast(BytesIO, value).getbuffer())
        elif is_plain(rows := cast(torch.Tensor, value)) and not rows.is_quantized:
            write_archive(stream.write, rows)
        else:  # a class of the user's: torch knows how
            torch.save(copied(rows.detach().cpu()), cast(IO[bytes], stream))
        place = filesystem._StorageInfo(name, begin, stream.tell() - begin)
        found.append(WriteResult(item.index, place.length, place))
    return found


@functools.lru_cache(4096)
def framing_of(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, int]:
    """The bytes of an item before a tensor's values, and the size of all but the values.

    An item that begins with these bytes and has this length is read without a parser.
    """
    whole, before = io.BytesIO(), 0
    like = torch.empty(shape, dtype=dtype, device="meta")
    over = like.nbytes % ALIGNMENT

    def data_of(_: torch.Tensor) -> Iterator[bytes]:
        """The part of the values that determines the bytes after them."""
        nonlocal before
        before = whole.tell()
        yield bytes(over)

    write_archive(whole.write, like, data_of)
    return whole.getvalue()[:before], len(whole.getvalue()) - over


def index_of(metadata: Metadata, places: Mapping[MetadataIndex, object]) -> bytes:
    """DCP's index: ``metadata``, and where each item is."""
    whole = replace(metadata, storage_data=places, version=filesystem.CURRENT_DCP_VERSION)
    return pickle.dumps(whole)


# ---- the index, read


class _Draft:
    """An object as described by a file; hashed by its identity."""

    state: object = {}

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Plain(_Draft):
    """One that is what its constructor was given."""

    def __new__(cls, *given: object) -> Any:
        return given[0] if len(given) == 1 else given


_PYTHONS: Any = pickle._Unpickler
_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES: dict[tuple[str, str], type[_Draft]] = {
    (_METADATA, "Metadata"): _Draft,
    (_METADATA, "TensorStorageMetadata"): _Draft,
    (_METADATA, "TensorProperties"): _Draft,
    (_METADATA, "ChunkStorageMetadata"): _Draft,
    (_METADATA, "BytesStorageMetadata"): _Draft,
    (_METADATA, "MetadataIndex"): _Draft,
    (_METADATA, "StorageMeta"): _Draft,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Draft,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Plain,
    ("torch.serialization", "_get_layout"): _Plain,
    ("torch", "Size"): _Plain,
    ("pathlib", "PosixPath"): _Plain,
    ("pathlib._local", "PosixPath"): _Plain,
}


class _Interpreter(_PYTHONS):
    """Creates drafts: no class of the process is named, so that BUILD changes none.

    The one in C allocates a memo as large as a file says, and crashes on keys of nested tuples.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._made: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) not in _CLASSES:
            raise checkpoint_error(
                "ckpt-index-code",
                f"the index of the step refers to '{module}.{name}', which DCP never writes into "
                f"an index; load only steps that save() has written",
            )
        # A class of this file's own: whatever the file does to it is gone with it.
        return self._made.setdefault(name, type(name, (_CLASSES[module, name],), {}))

    def persistent_load(self, pid: object) -> object:
        raise BrokenError()

    def _set_items(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(key, value)

    def _set(self, key: object, value: object) -> None:
        if type(self.stack[-1]) is not dict or not isinstance(key, (str, int, _Draft)):
            raise BrokenError()
        self.stack[-1][key] = value

    dispatch: ClassVar[dict[int, Any]] = {
        **_PYTHONS.dispatch,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }
    for _code in (
        *(pickle.DICT, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET),
        *(pickle.BYTEARRAY8, pickle.EXT1, pickle.EXT2, pickle.EXT4),
    ):
        del dispatch[_code[0]]


def read_index(folder: AnyPath) -> Metadata:
    """The index of a folder of DCP."""
    path = folder / INDEX
    try:
        return _checked(_Interpreter(path.read_bytes()).load(), path)
    except CheckpointError:
        raise
    except Exception as error:  # a pickle may break in any way
        raise checkpoint_error(
            "ckpt-index-broken",
            f"'{path}' is not a DCP index; load another step, or copy the file again",
        ) from error


# ---- drafts, checked


def _checked(draft: object, path: AnyPath) -> Metadata:
    state = _state(draft, "Metadata")
    saved: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, about in _of(state["state_dict_metadata"], dict).items():
        found = saved[_of(name, str)] = _about(about)
        if isinstance(found, TensorStorageMetadata):
            _require_whole(name, found, path)
    stored = {
        _index(key): _place(value, path) for key, value in _of(state["storage_data"], dict).items()
    }
    for name, found in saved.items():
        wanted = [MetadataIndex(name)]
        if isinstance(found, TensorStorageMetadata):
            wanted = [MetadataIndex(name, chunk.offsets) for chunk in found.chunks]
        if any(index not in stored for index in wanted):
            raise BrokenError()
    nesting = {
        _of(name, str): _nesting(place)
        for name, place in _of(state.get("planner_data") or {}, dict).items()
    }
    for name in saved:
        nesting.setdefault(name, (name,))
    version = state.get("version")
    return Metadata(saved, nesting, stored, version=None if version is None else _of(version, str))


def _of(value: object, kind: type[T]) -> T:
    """The value, which is of this very class."""
    if type(value) is not kind:
        raise BrokenError()
    return value


def _state(draft: object, kind: str) -> Any:
    if not isinstance(draft, _Draft) or type(draft).__name__ != kind:
        raise BrokenError()
    return draft.state


def _sizes(value: object) -> torch.Size:
    """Sizes that are not negative, and few enough for torch."""
    sizes = _of(value, tuple)
    if any(type(each) is not int or not 0 <= each < 1 << 62 for each in sizes) or len(sizes) > 64:
        raise BrokenError()
    return torch.Size(sizes)


def _about(draft: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(draft, _Draft) and type(draft).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(draft, "TensorStorageMetadata")
    size, chunks = _sizes(state["size"]), []
    for chunk in _of(state["chunks"], list):
        box = _state(chunk, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(_sizes(box["offsets"]), _sizes(box["sizes"])))
    kept = _of(_state(state["properties"], "TensorProperties"), tuple)
    dtype, _, grad, code, pinned, *_ = kept  # and strides, from torch 2.15 on
    if len(kept) > 6:
        raise BrokenError()
    properties = TensorProperties(
        dtype=_of(dtype, torch.dtype),
        requires_grad=_of(grad, bool),
        memory_format=_FORMATS[_of(code, int)],
        pin_memory=_of(pinned, bool),
    )
    return TensorStorageMetadata(properties, size, chunks)


def _require_whole(name: str, about: TensorStorageMetadata, path: AnyPath) -> None:
    """Else memory that nothing is read into would count as values."""
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in about.chunks]
    if not cover(about.size, boxes):
        held = sum(math.prod(sizes) for _, sizes in boxes)
        raise checkpoint_error(
            "ckpt-parts-missing",
            f"'{path}' has only {held} of {math.prod(about.size)} elements of '{name}'; copy the "
            f"files of all ranks, from the same step",
        )


def _index(draft: object) -> MetadataIndex:
    state = _state(draft, "MetadataIndex")
    offset, number = state.get("offset"), state.get("index")
    return MetadataIndex(
        _of(state["fqn"], str),
        None if offset is None else _sizes(offset),
        None if number is None else _of(number, int),
    )


def _place(draft: object, index: AnyPath) -> object:
    state = _state(draft, "_StorageInfo")
    name = _of(state["relative_path"], str)
    if not is_inside(name):
        raise checkpoint_error(
            "ckpt-index-path",
            f"'{index}' names the file {name!r}, which is not in its folder; load only steps that "
            f"save() has written",
        )
    offset, length = _of(state["offset"], int), _of(state["length"], int)
    transforms = state.get("transform_descriptors")
    if offset < 0 or length < 0 or not isinstance(transforms, (list, tuple, type(None))):
        raise BrokenError()
    return filesystem._StorageInfo(name, offset, length, transforms)


def _nesting(value: object) -> tuple[str | int, ...]:
    """The position of a value in the nested state dict."""
    place = _of(value, tuple)
    numbers = [_of(each, int) for each in place if type(each) is not str]
    if not place or any(not 0 <= each < _LONGEST for each in numbers):
        raise BrokenError()
    return place
