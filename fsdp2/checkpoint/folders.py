"""Folders of Hugging Face's libraries: slices of their tensors, wherever they lie.

model.safetensors.index.json     name -> file     ┐  `TensorFolder`: shapes and dtypes by name; each
model-00001-of-00002.safetensors safetensors      ├─ rank reads its own slices of mapped files
pytorch_model-00001-of-2.bin     files of         │
                                 torch.save       ┘
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp2.checkpoint.archives import read_file
from fsdp2.checkpoint.contents import contents_of
from fsdp2.checkpoint.files import BrokenError
from fsdp2.checkpoint.stores import is_inside
from fsdp2.checkpoint.tensors import BLOCK, DTYPES, INDEX, SUFFIX, About
from fsdp2.core.errors import checkpoint_error

BINARY_INDEX = "pytorch_model.bin.index.json"


class TensorFolder:
    """The tensors of a folder, of one file, or of the files that an index names.

    For a folder: the files of its index; otherwise ``model.safetensors``; otherwise all with that
    suffix; otherwise ``pytorch_model*.bin``.
    """

    def __init__(self, path: Path) -> None:
        self.path, names, wanted = _files_of(path)
        self.abouts: dict[str, About] = {}
        self.tied: dict[str, str] = {}
        self._slices: dict[str, Any] = {}  # of safetensors, or mapped tensors
        for file in names:
            if not (self.path / file).is_file():
                raise checkpoint_error(
                    "tensors-missing",
                    f"'{self.path / file}' is missing; copy all files that the index names",
                )
            tensors = file.endswith(SUFFIX) or is_safetensors(self.path / file)
            add = self._add_safetensors if tensors else self._add_binary
            for name, about, part in add(self.path / file):
                if wanted.get(name, file) != file:
                    continue
                if name in self.abouts:
                    raise checkpoint_error(
                        "tensors-twice",
                        f"'{name}' is in several files of '{self.path}', and no index says which "
                        f"one to read; pass one file instead of the folder",
                    )
                self.abouts[name], self._slices[name] = about, part
        for name, file in wanted.items():
            if name not in self.abouts:
                raise checkpoint_error(
                    "tensors-not-there",
                    f"the index of '{self.path}' says that '{name}' is in '{file}', but it is not "
                    f"there; copy the file again",
                )
        self.tied = {
            other: name
            for other, name in self.tied.items()
            if name in self.abouts and other not in self.abouts
        }

    def _add_safetensors(self, path: Path) -> Iterator[tuple[str, About, Any]]:
        with _readable(path) as file:
            self.tied |= file.metadata() or {}
            for name in file.offset_keys():
                part = file.get_slice(name)
                kind = part.get_dtype()
                if kind not in DTYPES:
                    raise checkpoint_error(
                        "tensors-unknown-dtype",
                        f"'{path}' has '{name}' in dtype {kind}, which this version does not "
                        f"read; write it in another dtype",
                    )
                yield name, About(tuple(part.get_shape()), DTYPES[kind]), part

    def _add_binary(self, path: Path) -> Iterator[tuple[str, About, Any]]:
        for name, value in contents_of(read_file(path), path).model.items():
            if isinstance(value, Tensor):
                yield name, About(tuple(value.shape), value.dtype), value

    def values(self, name: str) -> Tensor:
        """A whole tensor, mapped from its file."""
        found: Tensor = self._slices[name][...]
        return found

    def read(self, name: str, out: Tensor, offsets: Sequence[int]) -> None:
        """Fill ``out``, of any device and dtype, with the box that begins there, by 8 MiB."""
        part, rows = self._slices[name], len(out) if out.dim() else 1
        step = max(1, BLOCK * rows // max(1, math.prod(out.shape) * out.element_size()))
        for start in range(0, rows, step):
            piece = out[start : start + step] if out.dim() else out
            first = (offsets[0] + start, *offsets[1:]) if out.dim() else ()
            box = tuple(slice(at, at + size) for at, size in zip(first, piece.shape, strict=True))
            piece.copy_(part[box] if box else part[...])


def _readable(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise checkpoint_error(
            "tensors-package",
            f"'{path}' is a safetensors file, which the package safetensors reads; pip install "
            f"'fsdp2[safetensors]'",
        ) from error
    try:
        return safe_open(path, "pt")
    except Exception as error:  # of its own class
        raise checkpoint_error(
            "tensors-header",
            f"'{path}' is not a complete safetensors file ({error}); copy it again",
        ) from error


def _files_of(path: Path) -> tuple[Path, list[str], dict[str, str]]:
    """The folder, its files, and the file of each tensor if an index says it."""
    if path.is_file() and path.suffix != ".json":
        return path.parent, [path.name], {}
    indexes = [path] if path.is_file() else [path / INDEX, path / BINARY_INDEX]
    single = path / f"model{SUFFIX}"
    several = sorted(file.name for file in path.glob(f"*{SUFFIX}"))
    for index in indexes:
        if index.is_file():
            return _files_of_index(index)
        if several:
            return path, [single.name] if single.is_file() else several, {}
    found = sorted(file.name for file in path.glob("pytorch_model*.bin"))
    if not found:
        raise checkpoint_error(
            "tensors-none",
            f"'{path}' has no safetensors and no pytorch_model*.bin; pass a folder that export() "
            f"or save_pretrained() has written",
        )
    return path, found, {}


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as one, whatever its name is: with the header's length and ``{``."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _files_of_index(index: Path) -> tuple[Path, list[str], dict[str, str]]:
    try:
        wanted = dict(json.loads(index.read_bytes())["weight_map"])
        names = sorted(set(wanted.values()))
        if any("/" in name or not is_inside(name) for name in names):
            raise BrokenError()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise checkpoint_error(
            "tensors-index",
            f"'{index}' is not an index of files of tensors; pass the folder of save_pretrained, "
            f"or one of its files",
        ) from error
    return index.parent, names, wanted
