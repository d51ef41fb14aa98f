"""DCP's index, read without running code, and checked: what is where of a folder of DCP.

    .metadata ── Interpreter ─> drafts ── checked ─> Metadata

Nothing of torch's is made before all of it is checked: names, shapes, boxes that cover each tensor
once, and files that lie in the folder.
"""

from __future__ import annotations

import math
from typing import TypeVar

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

from fsdp2.checkpoint.boxes import cover
from fsdp2.checkpoint.files import BrokenError
from fsdp2.checkpoint.pickles import DTYPES, Interpreter, Maker
from fsdp2.checkpoint.stores import INDEX, AnyPath, is_inside
from fsdp2.core.errors import CheckpointError, coded

T = TypeVar("T")

_LONGEST = 1 << 24
"""Entries of a list in a state dict, which are made when the last of them is named."""

_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


class _Draft:
    """An object as described by a file."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: object = {}

    def build_from(self, state: object) -> None:
        self.state = state


class _Whole(_Draft):
    __slots__ = ()


class _Tensor(_Draft):
    __slots__ = ()


class _Properties(_Draft):
    __slots__ = ()


class _Chunk(_Draft):
    __slots__ = ()


class _Bytes(_Draft):
    __slots__ = ()


class _Index(_Draft):
    __slots__ = ()


class _Place(_Draft):
    __slots__ = ()


class _Layout(str):
    """The name of a layout, which the file may pass on, and not call."""

    __slots__ = ()


_MAKERS: dict[tuple[str, str], Maker] = {
    ("torch.distributed.checkpoint.metadata", "Metadata"): Maker(_Whole),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"): Maker(_Tensor),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): Maker(_Properties),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"): Maker(_Chunk),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"): Maker(_Bytes),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): Maker(_Index),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"): Maker(_Draft),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): Maker(lambda code: code),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Maker(_Place),
    ("torch.serialization", "_get_layout"): Maker(_Layout),
    ("torch", "Size"): Maker(tuple),
    ("pathlib", "PosixPath"): Maker(lambda *parts: parts),
    ("pathlib._local", "PosixPath"): Maker(lambda *parts: parts),
    ("collections", "OrderedDict"): Maker(dict),
}


def _find(module: str, name: str) -> object:
    maker = _MAKERS.get((module, name))
    if maker is not None:
        return maker
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    raise coded(
        CheckpointError,
        "ckpt-index-code",
        f"the index of the step refers to '{module}.{name}', which DCP never writes into an "
        f"index; load only steps that save() has written",
    )


def read_index(folder: AnyPath) -> Metadata:
    """The index of a folder of DCP.

    Raises:
        CheckpointError: it is none, or says what no index does.
    """
    path = folder / INDEX
    try:
        return _checked(Interpreter(path.read_bytes(), _find, hashable=(_Index,)).load(), path)
    except CheckpointError:
        raise
    except Exception as error:  # a pickle may break in any way
        raise coded(
            CheckpointError,
            "ckpt-index-broken",
            f"'{path}' is not a DCP index; load another step, or copy the file again",
        ) from error


# ---- drafts, checked


def _checked(draft: object, path: AnyPath) -> Metadata:
    state = _state(draft, _Whole)
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


def _state(draft: object, kind: type[_Draft]) -> dict[str, object]:
    return _of(_of(draft, kind).state, dict)


def _sizes(value: object) -> torch.Size:
    """Sizes that are not negative, and few enough for torch."""
    sizes = _of(value, tuple)
    if any(type(each) is not int or not 0 <= each < 1 << 62 for each in sizes) or len(sizes) > 64:
        raise BrokenError()
    return torch.Size(sizes)


def _about(draft: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(draft) is _Bytes:
        return BytesStorageMetadata()
    state = _state(draft, _Tensor)
    size, chunks = _sizes(state["size"]), []
    for chunk in _of(state["chunks"], list):
        box = _state(chunk, _Chunk)
        chunks.append(ChunkStorageMetadata(_sizes(box["offsets"]), _sizes(box["sizes"])))
    kept = _of(_of(state["properties"], _Properties).state, tuple)
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
        raise coded(
            CheckpointError,
            "ckpt-parts-missing",
            f"'{path}' has only {held} of {math.prod(about.size)} elements of '{name}'; copy the "
            f"files of all ranks, from the same step",
        )


def _index(draft: object) -> MetadataIndex:
    state = _state(draft, _Index)
    offset, number = state.get("offset"), state.get("index")
    return MetadataIndex(
        _of(state["fqn"], str),
        None if offset is None else _sizes(offset),
        None if number is None else _of(number, int),
    )


def _place(draft: object, index: AnyPath) -> object:
    state = _state(draft, _Place)
    name = _of(state["relative_path"], str)
    if not is_inside(name):
        raise coded(
            CheckpointError,
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
