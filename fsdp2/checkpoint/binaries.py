"""``pytorch_model*.bin``: files of torch.save as a catalogue, without running code.

pytorch_model.bin.index.json   name -> file          ┐
pytorch_model-00001-of-2.bin   zip: data.pkl, data/0 ├─> Catalogue, as of safetensors: each rank
pytorch_model-00002-of-2.bin                         ┘   reads its own slices where they lie
"""

from __future__ import annotations

import json
from pathlib import Path

from fsdp2.checkpoint.archives import read_file
from fsdp2.checkpoint.contents import contents_of
from fsdp2.checkpoint.entries import Entry
from fsdp2.checkpoint.files import BrokenError
from fsdp2.checkpoint.stores import AnyPath, is_inside
from fsdp2.checkpoint.tensors import INDEX as OTHER_INDEX
from fsdp2.checkpoint.tensors import SUFFIX, About, Catalogue, Place
from fsdp2.core.errors import CheckpointError, coded

INDEX = "pytorch_model.bin.index.json"
_SUFFIXES = (".bin", ".pt", ".pth")


def are_binaries(path: AnyPath) -> bool:
    """Whether it is such a file, an index, or a folder with some and without safetensors."""
    if path.is_file():
        return path.suffix in _SUFFIXES or path.name == INDEX
    if (path / OTHER_INDEX).is_file() or any(path.glob(f"*{SUFFIX}")):
        return False
    return (path / INDEX).is_file() or any(path.glob("pytorch_model*.bin"))


def catalogue_of(path: AnyPath) -> Catalogue:
    """Their contents, by name: which tensor is at which position of which file.

    Raises:
        CheckpointError: they are on a store, are broken, or hold tensors that are not in order.
    """
    if not isinstance(path, Path):
        raise coded(
            CheckpointError,
            "bins-store",
            f"'{path}' is a file of torch.save on an object store, but fsdp2 maps such files into "
            f"memory, which needs a disk; copy it to a disk, or pass safetensors",
        )
    folder, names = files_of(path)
    lengths: dict[str, int] = {}
    places: dict[str, Place] = {}
    for name in names:
        file = folder / name
        if not file.is_file():
            raise coded(
                CheckpointError,
                "tensors-missing",
                f"'{file}' is missing; copy all files that the index of the folder names",
            )
        lengths[name] = file.stat().st_size
        for key, value in contents_of(read_file(file), file).model.items():
            if isinstance(value, Entry):
                places[key] = _place(key, value, file)
    return Catalogue(folder, lengths, places, {})


def files_of(path: Path) -> tuple[Path, list[str]]:
    """Their folder and their names, in order."""
    if path.is_file() and path.name != INDEX:
        return path.parent, [path.name]
    index = path if path.is_file() else path / INDEX
    if not index.is_file():
        return path, sorted(file.name for file in path.glob("pytorch_model*.bin"))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if any("/" in name or not is_inside(name) for name in names):
            raise BrokenError()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise coded(
            CheckpointError,
            "bins-index",
            f"'{index}' is not an index of pytorch_model*.bin files; pass the folder of "
            f"save_pretrained, or one of its files",
        ) from error
    return index.parent, names


def _place(name: str, entry: Entry, path: Path) -> Place:
    (piece,) = entry.pieces
    about, tensor = About(entry.shape, entry.dtype), piece.tensor
    if piece.file is None:  # it has no elements
        return Place(path.name, 0, about)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise coded(
            CheckpointError,
            "bins-view",
            f"'{name}' of '{path}' is a view that is not contiguous; convert() the file to "
            f"safetensors, and load that",
        )
    return Place(path.name, piece.file.offset_of(tensor), about)
