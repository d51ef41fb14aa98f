"""What is saved of a model, an optimizer and a run, by name; and how that differs from a step's.

model.<name>                              parameters and persistent buffers
buffers.<name>                            buffers that are not persistent, on request
optimizer.state.<parameter>.<key>         the names of torch's get_optimizer_state_dict
optimizer.param_groups                    with names in the place of parameters
rng.<rank>.<device>                       states of random number generators
extra.<place>                             tensors of the user's

And which part of each tensor this rank has: `held_by`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.futures import Future

from fsdp2.checkpoint.files import read_at
from fsdp2.checkpoint.folder import Json
from fsdp2.checkpoint.index import read_index
from fsdp2.checkpoint.items import framing_of
from fsdp2.checkpoint.snapshot import Nested, name_of, named_parameters, renamed, snapshot
from fsdp2.checkpoint.stores import AnyPath
from fsdp2.checkpoint.tensors import About, Catalogue, Place
from fsdp2.checkpoint.tensors import Reader as TensorReader
from fsdp2.core.config import CheckpointError
from fsdp2.core.device.collectives import rank_and_size
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.names import clean

Extra: TypeAlias = Any
"""None, bool, int, float, str, tensors, and lists, tuples and dicts with str keys of them."""


# ---- what is there


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, rng: bool, buffers: bool = False
) -> Nested:
    """All that is saved but ``extra``; tensors are those of the model, not copies."""
    seen = snapshot(model, optimizer)
    state: Nested = {"model": dict(seen.model)}
    if seen.optimizer is not None:
        state["optimizer"] = dict(seen.optimizer)
    if buffers:
        state["buffers"] = dict(seen.buffers)
    if rng:
        state["rng"] = {str(rank_and_size()[0]): rng_states()}
    return state


def rng_states() -> dict[str, torch.Tensor]:
    """The CPU's, and the current accelerator's."""
    states = {"cpu": torch.get_rng_state()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if hasattr(module, "get_rng_state"):
            states[accelerator.type] = module.get_rng_state()
    return states


def set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    for kind, value in states.items():
        if kind == "cpu":
            torch.set_rng_state(value)
        else:
            torch.get_device_module(kind).set_rng_state(value)


def params_by_place(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[tuple[str, torch.Tensor]]:
    """(name, parameter) of the optimizer's parameters, in the order of their numbers.

    Raises:
        CheckpointError: the model does not have one of them.
    """
    names: dict[int, str] = {}
    for name, param in named_parameters(model):
        names.setdefault(id(param), name)
    placed = [param for group in optimizer.param_groups for param in group["params"]]
    return [(name_of(param, names), param) for param in placed]


def named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Nested:
    """An optimizer's state dict, with names in the place of numbers."""
    names = [name for name, _ in params_by_place(model, optimizer)]
    return renamed(optimizer.state_dict(), names)


def packed(extra: Extra) -> tuple[str | None, Json, dict[str, torch.Tensor]]:
    """The first class in it that cannot be saved; what JSON has of it; its tensors by place."""
    tensors: dict[str, torch.Tensor] = {}
    wrong: list[str] = []

    def pack(value: object) -> Json:
        if isinstance(value, torch.Tensor):
            tensors[str(len(tensors))] = value.detach()
            return {"tensor": len(tensors) - 1}
        if isinstance(value, dict) and all(type(key) is str for key in value):
            return {"dict": {key: pack(held) for key, held in value.items()}}
        if isinstance(value, (list, tuple)):
            return [pack(held) for held in value]
        if value is None or type(value) in (bool, int, float, str):
            return value  # type: ignore[return-value]  # checked
        wrong.append(type(value).__qualname__)
        return None

    content = pack(extra)
    return (wrong[0] if wrong else None), content, tensors


def unpacked(content: Json, tensors: Mapping[str, torch.Tensor]) -> Extra:
    """What `packed` was given."""
    if isinstance(content, list):
        return [unpacked(held, tensors) for held in content]
    if isinstance(content, dict):
        if "tensor" in content:
            return tensors[str(content["tensor"])]
        held = content["dict"]
        assert isinstance(held, dict)
        return {key: unpacked(value, tensors) for key, value in held.items()}
    return content


# ---- what differs


@dataclass
class Differences:
    """Names that a model or an optimizer and a step do not have alike.

    Attributes:
        missing: the model or the optimizer has it, the step does not.
        unexpected: the step has it, nobody takes it.
        reshaped: both have it, of other shapes.
        retyped: both have it, in other dtypes.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    retyped: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped or self.retyped)

    def left(self) -> set[str]:
        """What is not loaded of what is there."""
        return {*self.missing, *self.reshaped, *self.retyped}

    def compare(self, name: str, value: object, saved: object) -> bool:
        """Whether ``value`` is of the shape and dtype that was saved; noted if not."""
        if not isinstance(saved, TensorStorageMetadata):
            return not isinstance(value, torch.Tensor)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(saved.size):
            self.reshaped.append(name)
            return False
        if value.dtype != saved.properties.dtype:
            self.retyped.append(name)
            return False
        return True

    @classmethod
    def over_ranks(cls, parts: Sequence[Differences]) -> Differences:
        """What is so on any rank; unexpected is what is so on all."""
        unexpected = set(parts[0].unexpected).intersection(*(part.unexpected for part in parts))
        return cls(
            sorted({name for part in parts for name in part.missing}),
            sorted(unexpected),
            sorted({name for part in parts for name in part.reshaped}),
            sorted({name for part in parts for name in part.retyped}),
        )


# ---- DCP's reader, which runs no code


class _Files(FileSystem):
    """What DCP's reader does to files, done to any."""

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
    """DCP's, of a step wherever it is, with an index that runs no code and is checked."""

    def __init__(self, path: AnyPath) -> None:
        super().__init__("")
        self.fs = _Files()
        self.path: Any = path

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self._saved = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Tensors as `write_items` writes them right into their memory; all others by DCP."""
        stored, others = self.storage_data, []
        ordered = sorted(
            plan.items,
            key=lambda item: (
                stored[item.storage_index].relative_path,
                stored[item.storage_index].offset,
            ),
        )
        with TensorReader(Catalogue(self.path, {}, {}, {})) as reader:
            for item in ordered:
                if not self._read_framed(reader, item, planner):
                    others.append(item)
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

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return read_index(self.path)


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_into(path: AnyPath, metadata: Metadata, state: Nested) -> None:
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


def read_below(path: AnyPath, metadata: Metadata, prefix: str) -> Any:
    """Whatever was saved under a name, nested as it was; plain tensors on the CPU."""
    saved = metadata.state_dict_metadata
    flat: Nested = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        if isinstance(about, TensorStorageMetadata)
        else None
        for name, about in saved.items()
        if name == prefix or name.startswith(prefix + ".")
    }
    read_into(path, metadata, flat)
    nested: Nested = {}
    for name, value in flat.items():
        set_element(nested, metadata.planner_data[name], value)
    for key in prefix.split("."):
        nested = nested.get(key, {})
    return nested


def read_chunk(path: AnyPath, metadata: Metadata, name: str, chunk: ChunkStorageMetadata) -> Tensor:
    """One saved piece of a tensor, on the CPU; about three times its bytes are held on the way."""
    about = metadata.state_dict_metadata[name]
    assert isinstance(about, TensorStorageMetadata)
    out = torch.empty(chunk.sizes, dtype=about.properties.dtype)
    origin = torch.Size([0] * out.dim())
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(name, origin),
        dest_offsets=origin,
        storage_index=MetadataIndex(name, chunk.offsets),
        storage_offsets=origin,
        lengths=chunk.sizes,
    )
    reader, planner = Reader(path), _Planner(flatten_state_dict=False)
    planner.set_up_planner({name: out}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(LoadPlan([item]))])
    reader.read_data(plan, planner).wait()
    return out


# ---- where a rank's part of a tensor lies


@dataclass(frozen=True)
class Held:
    """A tensor of a model, and what this rank has of it.

    Attributes:
        shape: of the whole tensor.
        local: this rank's part, a plain tensor.
        offsets: of its first element in the whole, in each dim.
        sharded: whether it is a part: a DTensor's.
    """

    shape: tuple[int, ...]
    local: Tensor
    offsets: tuple[int, ...]
    sharded: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def identity(self) -> object:
        """Which memory it is: the same for tied tensors."""
        local = self.local
        storage = local.untyped_storage()._cdata
        return storage, local.storage_offset(), tuple(local.shape), local.stride(), local.dtype


def held_by(model: nn.Module) -> tuple[dict[str, Held], dict[str, str], list[str]]:
    """Parameters and persistent buffers by name; names tied to others; names of other values.

    Raises:
        CheckpointError: one is of a class whose bytes are not its values.
    """
    found: dict[str, Held] = {}
    tied: dict[str, str] = {}
    others: list[str] = []
    first: dict[object, str] = {}
    state = get_model_state_dict(model)
    registered = {clean(name): id(param) for name, param in _registered(model)}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            others.append(name)
            continue
        held = _held(name, value.detach())
        # What has no memory is tied where it is the same object; its storage tells nothing.
        same = registered.get(name, name) if held.local.is_meta else held.identity
        kept = first.setdefault((same, held.shape), name)
        if kept == name:
            found[name] = held
        else:
            tied[name] = kept
    return found, tied, others


def _registered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _held(name: str, value: Tensor) -> Held:
    shape = tuple(value.shape)
    local = value.to_local() if isinstance(value, DTensor) else value
    if type(local) not in (Tensor, nn.Parameter) or local.layout is not torch.strided:
        kind = type(local).__name__ if local.layout is torch.strided else str(local.layout)
        raise CheckpointError(
            f"'{name}' is a {kind}, not a plain tensor, so that its bytes are not its values; "
            f"convert it, or pass names= that returns None for it"
        )
    if not isinstance(value, DTensor):
        return Held(shape, local, (0,) * len(shape), False)
    offsets, lengths = _part(shape, value)
    if lengths != tuple(local.shape):
        raise CheckpointError(
            f"'{name}' has a part of shape {tuple(local.shape)} here, which its placements "
            f"{value.placements} do not tell; redistribute it to Shard and Replicate"
        )
    return Held(shape, local, offsets, True)


def _part(shape: tuple[int, ...], value: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and lengths of this rank's part, as the placements say.

    Several dims of a mesh may cut one dim of a tensor: from the left to the right, but a strided
    one comes behind those to its right, whose pieces its ``split_factor`` counts.
    """
    mesh, coordinate = value.device_mesh, value.device_mesh.get_coordinate()
    offsets, lengths = [0] * len(shape), list(shape)
    if coordinate is None:  # of another mesh
        return tuple(offsets), (0,) * len(shape)
    order: list[int] = []  # mesh dims that cut, in turn
    for at in reversed(range(mesh.ndim)):
        placement, place = value.placements[at], 0
        if isinstance(placement, _StridedShard):
            pieces = 1
            while place < len(order) and pieces < placement.split_factor:
                behind = value.placements[order[place]]
                pieces *= mesh.size(order[place]) if behind.is_shard(placement.dim) else 1
                place += 1
        elif not isinstance(placement, Shard):
            if placement.is_replicate():
                continue
            return (-1,) * len(shape), (-1,) * len(shape)  # which is no part
        order.insert(place, at)
    for at in order:
        placement = value.placements[at]
        assert isinstance(placement, (Shard, _StridedShard))
        dim = placement.dim
        piece = -(-lengths[dim] // mesh.size(at))
        start = min(coordinate[at] * piece, lengths[dim])
        offsets[dim] += start
        lengths[dim] = min(piece, lengths[dim] - start)
    return tuple(offsets), tuple(lengths)
