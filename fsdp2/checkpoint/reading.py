"""The contents of a step, or of another folder of DCP, by owner: tensors read in place, and values.

model.norm.weight             a tensor of the model          ┐
model.norm._extra_state.seen  ┐ one value, of several items  ├─ by `Step.model`
model.norm._extra_state.w     ┘                              ┘
values.model.norm._extra_state    the same with its types, if the step has it

DCP's reader does it, for any path; but it runs no code, and reads what `save` writes in place.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor
from torch.futures import Future

from fsdp2.checkpoint.archives import lazy
from fsdp2.checkpoint.files import read_at
from fsdp2.checkpoint.folder import Json, broken_values
from fsdp2.checkpoint.items import framing_of, read_index
from fsdp2.checkpoint.snapshots import Nested
from fsdp2.checkpoint.state import Saved
from fsdp2.checkpoint.stores import AnyPath
from fsdp2.checkpoint.tensors import About, Place
from fsdp2.checkpoint.tensors import Reader as TensorReader
from fsdp2.checkpoint.values import Value, tensors_in, unpacked
from fsdp2.core.errors import checkpoint_error
from fsdp2.core.facts import local_of

GROUPS = "optimizer.param_groups"

Path = tuple[Any, ...]
"""The position of a value in the nested state dict: strings, and indices of lists."""

Units = dict[str, list[str]]
"""By name, the items of a value; a tensor is one item of that name."""


class Step:
    """The items of a folder.

    Args:
        path: the folder.
        typed: whether to read "about" and "values", which `save` and `convert` have written.
    """

    def __init__(self, path: AnyPath, typed: bool = True) -> None:
        self.path = path
        self.metadata = read_index(path)
        self.saved = self.metadata.state_dict_metadata
        self.abouts = {  # of tensors, which can be read in place
            name: About(tuple(about.size), about.properties.dtype)
            for name, about in self.saved.items()
            if isinstance(about, TensorStorageMetadata)
        }
        self.model: Units = {}
        self.states: dict[str, Units] = {}
        self._options: dict[tuple[int, str], list[str]] = {}
        self._paths: Mapping[str, Path] = self.metadata.planner_data or {}
        for name in self.saved:
            self._note(self._paths[name], name)
        self.about = Saved()
        self._typed: dict[str, tuple[Path, Json]] = {}
        if typed:
            self._read_texts()

    def _note(self, path: Path, name: str | None) -> None:
        """An item, or (``None``) a value that may have none: an empty dict."""
        if path[:1] == ("model",) and len(path) > 1:
            items = self.model.setdefault(path[1], [])
        elif path[:2] == ("optimizer", "state") and len(path) > 3:
            items = self.states.setdefault(path[2], {}).setdefault(path[3], [])
        elif path[:2] == ("optimizer", "param_groups") and len(path) > 3:
            items = self._options.setdefault((path[2], path[3]), [])
        else:
            return
        if name is not None:
            items.append(name)

    def _read_texts(self) -> None:
        texts: Nested = {
            name: None
            for name in self.saved
            if (name == "about" or name.startswith("values.")) and name not in self.abouts
        }
        _read_into(self.path, self.metadata, texts)
        if "about" in texts:
            self.about = Saved(**json.loads(texts.pop("about")))
        for name, text in texts.items():
            path, content = json.loads(text)
            self._typed[name.removeprefix("values.")] = tuple(path), content
            self._note(tuple(path), None)

    def read(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Read tensors in place, by name; each rank its own rows. A name may come twice."""
        batches: list[Nested] = []
        for name, tensor in pairs:
            batch = next((each for each in batches if name not in each), None)
            if batch is None:
                batches.append(batch := {})
            batch[name] = tensor
        for batch in batches:
            _read_into(self.path, self.metadata, batch)

    def values(self, units: Mapping[str, Sequence[str]], like: Mapping[str, Tensor]) -> Nested:
        """Values as they were saved."""
        items = {
            unit: tensors_in(self._typed[unit][1]) if unit in self._typed else list(names)
            for unit, names in units.items()
        }
        flat = {
            name: self._memory(name, like.get(name)) for each in items.values() for name in each
        }
        _read_into(self.path, self.metadata, flat)
        return {unit: self._value(unit, names, flat) for unit, names in items.items()}

    def _value(self, unit: str, names: Iterable[str], flat: Nested) -> Value:
        if unit in self._typed:
            return unpacked(self._typed[unit][1], flat)
        made: Nested = {}
        for name in names:
            path = self._paths[name]
            inside = path[2:] if path[0] == "model" else path[4:]
            set_element(made, ("it", *inside), flat[name])
        return made.get("it", {})

    def _memory(self, name: str, like: Tensor | None) -> Tensor | None:
        about = self.abouts.get(name)
        if about is None:
            return None
        if isinstance(like, DTensor) and like.shape == about.shape:
            return torch.empty_like(like, dtype=about.dtype)
        device = "cpu" if like is None else like.device
        return torch.empty(about.shape, dtype=about.dtype, device=device)

    def groups(self) -> list[Nested]:
        """Options of the saved optimizers' groups, with names in the place of parameters."""
        units = {f"{GROUPS}.{at}.{key}": items for (at, key), items in self._options.items()}
        values = self.values(units, {})
        found: list[Nested] = [{} for _ in {at for at, _ in self._options}]
        for at, key in self._options:
            found[at][key] = values[f"{GROUPS}.{at}.{key}"]
        return found

    def below(self, prefix: str) -> Any:
        """Whatever was saved below a name, nested as it was; plain tensors on the CPU."""
        names = [name for name in self.saved if name.startswith(f"{prefix}.")]
        flat = {name: self._memory(name, None) for name in names}
        _read_into(self.path, self.metadata, flat)
        nested = self._nested(flat)
        for key in prefix.split("."):
            nested = nested.get(key, {})
        return nested

    def rank_extra(self, rank: int) -> Value:
        """The ``rank_extra`` of a rank; ``None`` if there was no such rank."""
        held = self.below(f"rank_extra.{rank}")
        return unpacked(json.loads(held.pop("content")), held) if held else None

    def tree(self) -> Nested:
        """The whole state dict, nested as it was, with the types of values; tensors are `lazy`."""
        flat: Nested = {}
        for name in self.saved:
            path, about = self._paths[name], self.abouts.get(name)
            if about is not None:
                flat[name] = lazy(about.shape, about.dtype, partial(self._whole, name))
            elif ".".join(map(str, path[: 4 if path[0] == "optimizer" else 2])) not in self._typed:
                flat[name] = None  # else its items may be of any class
        with broken_values(self.path):
            values = {name: None for name, value in flat.items() if value is None}
            _read_into(self.path, self.metadata, values)
            flat |= values
            nested = self._nested(flat)
            for path, content in self._typed.values():
                at: Any = nested
                for part in path[:-1]:
                    at = at.setdefault(part, {}) if isinstance(at, dict) else at[part]
                at[path[-1]] = unpacked(content, flat)
        return nested

    def _nested(self, flat: Nested) -> Nested:
        nested: Nested = {}
        for name, value in flat.items():
            set_element(nested, self._paths[name], value)
        return nested

    def _whole(self, name: str) -> Tensor:
        made = self._memory(name, None)
        assert made is not None
        with broken_values(self.path):
            self.read([(name, made)])
        return made

    def chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """One saved piece of a tensor, on the CPU; about three times its bytes are held then."""
        about, origin = self.saved[name], torch.Size([0] * len(chunk.sizes))
        assert isinstance(about, TensorStorageMetadata)
        out = torch.empty(chunk.sizes, dtype=about.properties.dtype)
        alone = TensorStorageMetadata(
            about.properties, chunk.sizes, [ChunkStorageMetadata(origin, chunk.sizes)]
        )
        stored = self.metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        piece = Metadata({name: alone}, storage_data={MetadataIndex(name, origin): stored})
        _read_into(self.path, piece, {name: out})
        return out


# ---- DCP's reader, which runs no code


class _Files(FileSystem):
    """The file operations of DCP's reader, for any path."""

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with path.open(mode) as stream:
            yield stream


def _chunk_at(about: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    """The piece that begins there; planners mostly know which it is."""
    hint = index.index
    if hint is not None and hint < len(about.chunks) and about.chunks[hint].offsets == index.offset:
        return about.chunks[hint]
    return next(chunk for chunk in about.chunks if chunk.offsets == index.offset)


class Reader(FileSystemReader):
    """DCP's, of the data of a step wherever it is."""

    def __init__(self, path: AnyPath) -> None:
        super().__init__("")
        self.fs = _Files()
        self.path: Any = path

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self._saved = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Tensors as `write_items` writes them right into their memory; all others by DCP."""

        def place(item: ReadItem) -> tuple[str, int]:
            info = self.storage_data[item.storage_index]
            return info.relative_path, info.offset

        with TensorReader(self.path) as reader:
            ordered = sorted(plan.items, key=place)
            others = [each for each in ordered if not self._read_framed(reader, each, planner)]
        return super().read_data(replace(plan, items=others), planner)

    def _read_framed(self, reader: TensorReader, item: ReadItem, planner: LoadPlanner) -> bool:
        """Whether it is an item of ours, and has been read."""
        info, about = self.storage_data[item.storage_index], self._saved[item.storage_index.fqn]
        if info.transform_descriptors or not isinstance(about, TensorStorageMetadata):
            return False
        chunk = _chunk_at(about, item.storage_index)
        target = planner.resolve_tensor(item).detach()
        kept = About(tuple(chunk.sizes), about.properties.dtype)
        if type(target) is not Tensor or target.shape != item.lengths:
            return False
        before, without = framing_of(kept.dtype, kept.shape)
        if info.length != without + kept.nbytes:
            return False
        head = memoryview(bytearray(len(before)))
        count = read_at(reader.opened(info.relative_path), head, info.offset)
        if count != len(before) or head != before:
            return False
        if target.numel():
            place = Place(info.relative_path, info.offset + len(before), kept)
            reader.read_box(place, target, tuple(item.storage_offsets))
        planner.commit_tensor(item, target)
        return True


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise checkpoint_error(
                "ckpt-value-code",
                f"the step has '{name}' as an object of a class, which cannot be loaded without "
                f"running code; load it with torch.distributed.checkpoint, or leave it out with "
                f"names=",
            ) from error


def _read_into(path: AnyPath, metadata: Metadata, state: Nested) -> None:
    """Fill tensors, and replace values, of a flat state dict; each rank reads what it needs."""
    if not state:
        return
    reader, planner = Reader(path), _Planner(flatten_state_dict=False)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (whole,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    # A class of tensors that the model itself has is one that it trusts.
    rows = (local_of(value) for value in state.values() if isinstance(value, Tensor))
    kinds = {type(each) for each in rows} - {Tensor, nn.Parameter}
    with torch.serialization.safe_globals(list(kinds)):
        reader.read_data(planner.finish_plan(whole), planner).wait()
    state.update(planner.state_dict)  # values; tensors are the same
