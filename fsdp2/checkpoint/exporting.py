"""`export`: a folder that Hugging Face's libraries load, written by all ranks at once.

1. every rank   which parts of which tensors it has    ─> all ranks: files, headers, offsets
2. rank 0       files with headers and lengths            .exporting-OUT/
3. every rank   its slices, at their offsets; syncs what it has written
4. rank 0       the folder synced, renamed                .exporting-OUT -> OUT

Nothing is gathered, and nothing is merged afterwards. A rank stages at most 8 MiB of a live model;
of a saved step, one saved piece of a tensor at a time.
"""

from __future__ import annotations

import contextlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from fsdp2.checkpoint import files
from fsdp2.checkpoint.consensus import Call
from fsdp2.checkpoint.folder import (
    Progress,
    check_files,
    items_of,
    read_manifest,
    store_of,
)
from fsdp2.checkpoint.state import Held, Reader, held_by, read_chunk
from fsdp2.checkpoint.stores import AnyPath, PathLike, disk_path, local_path
from fsdp2.checkpoint.tensors import About, Layout, Writer, plan
from fsdp2.core.errors import CheckpointError, coded
from fsdp2.core.facts import ProcessGroup

Names = Callable[[str], str | None]
"""A model's name of a tensor -> its name in the files; ``None``: it is not there."""


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths."""

_EXPORTING = ".exporting-"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Exported:
    """The result of `export`.

    Attributes:
        folder: the folder.
        files: its safetensors files.
        nbytes: bytes of all files.
        tied: names that were left out, each with the name under which its values are stored.
    """

    folder: Path
    files: list[str]
    nbytes: int
    tied: dict[str, str]


def export(
    folder: PathLike,
    source: nn.Module | PathLike,
    *,
    step: int | None = None,
    format: str = "safetensors",
    dtype: torch.dtype | None = None,
    shard_size: int | str = "5GB",
    names: Names | None = None,
    progress: Progress | None = None,
    process_group: ProcessGroup | None = None,
) -> Exported:
    """Write a model's parameters and persistent buffers in the format of Hugging Face's libraries.

    It writes one file ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and an index.
    Every rank of the process group calls it, with the same arguments, between steps; without a
    process group, a single process does. Each rank writes its own slices; if several ranks have a
    tensor, one of them writes it. The folder exists only when it is complete and durable. A crash
    leaves ``.exporting-FOLDER`` next to it, which the next call removes.

    The package ``safetensors`` is not needed: it has no writer for several processes. The bytes
    equal those that it writes. Shards on a dim other than 0 are written run by run: the shorter the
    runs, the slower.

    Args:
        folder: the target, which must not exist yet. All ranks must see it.
        source: a model, sharded in any way or not at all; or a folder of steps, as for `save`, or
            its URL, whose tensors the ranks divide among them, piece by piece.
        step: the step of a folder of steps. Default ``None``: the newest complete one.
        format: "safetensors".
        dtype: floating-point tensors are cast to it. Default ``None``: no cast.
        shard_size: maximum size of the tensors in a file: bytes, or "5GB" (10**9) or "5GiB"
            (2**30). A larger tensor gets its own file. Default "5GB".
        names: maps the model's name of a tensor to its name in the files; ``None`` leaves it out.
            Default: the same.
        progress: called with the bytes that this rank has written, and the total that it will
            write.
        process_group: as for `save`.

    Returns:
        The folder, its files, and the tied names that represent others. A tied tensor is written
        once, under its first name, and the metadata of its file list the others, as with
        ``safetensors.torch.save_model``. A saved step has all names and does not record ties.

    Raises:
        CheckpointError: on all ranks; the folder does not exist in this case.

    Example::

        fsdp2.checkpoint.export("out", model, dtype=torch.bfloat16)
        transformers.AutoModelForCausalLM.from_pretrained("out")     # with its config.json in it
    """
    out = disk_path(folder)
    call = Call(f"export('{out}')", process_group)
    jobs: list[_Export] = []
    facts = call.together(
        lambda: _facts(call, jobs, out, source, step, format, dtype, shard_size, names)
    )
    (job,) = jobs
    shared = _Shared.of(facts)
    layout = plan(shared.tensors, shard_bytes=facts[0].shard_bytes, tied=shared.tied)
    writing = out.with_name(_EXPORTING + out.name)
    writer = Writer(writing, layout)
    try:
        call.together(lambda: _begin(out, writing, layout, writer) if call.is_first else None)
        call.together(lambda: job.write(writer, shared, progress))
        call.together(lambda: _commit(out, writing) if call.is_first else None)
    except CheckpointError:
        writer.abandon()
        if call.is_first and not out.exists():
            with contextlib.suppress(OSError):
                files.discard(writing)
        raise
    return Exported(out, sorted(layout.lengths), layout.total, shared.tied)


# ---- what there is


@dataclass(frozen=True)
class _Facts:
    """A rank's message to the others.

    Attributes:
        arguments: which must be the same on all.
        shard_bytes: one of them.
        tensors: by the name in the files, in order; dtypes as they will be there.
        sources: the source's name of each.
        boxes: its parts of each tensor; tensors without a part are absent.
        whole: names of those that every rank holds in full, such as buffers.
        tied: names of the files for others of them.
    """

    arguments: tuple[str, ...]
    shard_bytes: int
    tensors: dict[str, About]
    sources: dict[str, str]
    boxes: dict[str, list[Box]]
    whole: set[str]
    tied: dict[str, str]


@dataclass(frozen=True)
class _Shared:
    """The facts that all ranks then know; the same on each.

    Attributes:
        tensors: by name, in order.
        tied: other names.
        owners: which rank writes which box of which tensor.
    """

    tensors: dict[str, About]
    tied: dict[str, str]
    owners: dict[tuple[str, Box], int]

    @classmethod
    def of(cls, facts: Sequence[_Facts]) -> _Shared:
        """Raises what cannot be written, from what all have told: on all ranks alike."""
        if any(other.arguments != facts[0].arguments for other in facts):
            raise coded(
                CheckpointError,
                "export-arguments",
                f"export() got different arguments on different ranks "
                f"({[other.arguments for other in facts]}); pass the same on all ranks",
            )
        tensors: dict[str, About] = {}
        sources: dict[str, str] = {}
        tied: dict[str, str] = {}
        for other in facts:
            for name, about in other.tensors.items():
                if tensors.setdefault(name, about) != about:
                    raise coded(
                        CheckpointError,
                        "export-models",
                        f"'{name}' is {about} on one rank and {tensors[name]} on another; build "
                        f"the same model on all ranks",
                    )
            for name, own in other.sources.items():
                if sources.setdefault(name, own) != own:
                    raise coded(
                        CheckpointError,
                        "export-clash-on-ranks",
                        f"export(names=…) returned '{name}' for '{sources[name]}', and for "
                        f"'{own}' on another rank; return another name for one, or None to leave "
                        f"it out",
                    )
            tied |= other.tied
        tied = {name: kept for name, kept in tied.items() if name not in tensors}
        return cls(tensors, tied, _owners(facts, tensors))


def _owners(facts: Sequence[_Facts], tensors: Mapping[str, About]) -> dict[tuple[str, Box], int]:
    """One rank for each box: of replicas in turn; of what is whole everywhere the first."""
    ranks: dict[tuple[str, Box], list[int]] = {}
    for rank, other in enumerate(facts):
        for name, boxes in other.boxes.items():
            for box in boxes:
                ranks.setdefault((name, box), []).append(rank)
    whole = set().union(*(other.whole for other in facts))
    found = {}
    elements = dict.fromkeys(tensors, 0)
    for number, ((name, box), holders) in enumerate(ranks.items()):
        turn = 0 if name in whole else number % len(holders)
        found[name, box] = holders[turn]
        elements[name] += math.prod(box[1])
    for name, about in tensors.items():
        if elements[name] != math.prod(about.shape):
            raise coded(
                CheckpointError,
                "export-incomplete",
                f"the ranks have only {elements[name]} of {math.prod(about.shape)} elements of "
                f"'{name}'; call export() on all ranks of the model's meshes",
            )
    return found


@dataclass
class _Export(ABC):
    """One export, on one rank.

    Attributes:
        call: the ranks that take part.
        names: the name in the files of each of the source's; ``None``: left out.
        dtype: of floating-point tensors.
        tensors: by the source's name.
        boxes: what this rank has of each, by the source's name.
        tied: the source's names for others of them.
    """

    call: Call
    names: Names
    dtype: torch.dtype | None
    tensors: dict[str, About] = field(default_factory=dict)
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)

    def mapped(self) -> dict[str, str]:
        """The names of the written tensors, by the source's.

        Raises:
            CheckpointError: two tensors have one name, or a name is not a string.
        """
        found: dict[str, str] = {}
        taken: dict[str, str] = {}
        for name in [*self.tensors, *self.tied]:
            other = self.names(name)
            if other is None:
                continue
            if not isinstance(other, str):
                raise coded(
                    CheckpointError,
                    "export-name",
                    f"export(names=…) returned {other!r} for '{name}'; return a string, or None "
                    f"to leave it out",
                )
            if other in taken:
                raise coded(
                    CheckpointError,
                    "export-clash",
                    f"export(names=…) returned '{other}' for '{taken[other]}' and for '{name}'; "
                    f"return another name for one, or None to leave it out",
                )
            taken[other] = name
            found[name] = other
        return found

    def about(self, name: str) -> About:
        """As it will be in the files."""
        about = self.tensors[name]
        if self.dtype is None or not about.dtype.is_floating_point:
            return about
        return About(about.shape, self.dtype)

    def facts(self, arguments: tuple[str, ...], shard_bytes: int) -> _Facts:
        mapped = self.mapped()
        kept = {name: mapped[name] for name in self.tensors if name in mapped}
        tied: dict[str, str] = {}
        for other, first in self.tied.items():
            if other in mapped and first in kept:
                tied[mapped[other]] = kept[first]
        return _Facts(
            arguments,
            shard_bytes,
            {other: self.about(name) for name, other in kept.items()},
            {other: name for name, other in kept.items()},
            {other: self.boxes[name] for name, other in kept.items() if name in self.boxes},
            {kept[name] for name in self.whole() if name in kept},
            tied,
        )

    def whole(self) -> set[str]:
        """For tensors that every rank holds in full, the first rank's copy is used."""
        return set()

    @abstractmethod
    def parts(self, name: str) -> Iterator[tuple[Box, Callable[[], Tensor]]]:
        """This rank's parts of a tensor, and how to read them."""

    def write(self, writer: Writer, shared: _Shared, progress: Progress | None) -> None:
        mapped = self.mapped()
        mine = [
            (other, box, get)
            for name, other in mapped.items()
            if name in self.tensors
            for box, get in self.parts(name)
            if shared.owners[other, box] == self.call.rank
        ]
        sizes = [math.prod(box[1]) * shared.tensors[o].dtype.itemsize for o, box, _ in mine]
        done, total = 0, sum(sizes)
        with writer:
            for (other, box, get), size in zip(mine, sizes, strict=True):
                writer.write(other, get(), box[0])
                done += size
                if progress is not None:
                    progress(done, total)


@dataclass
class _LiveJob(_Export):
    """The export of a model."""

    held: dict[str, Held] = field(default_factory=dict)

    def take(self, model: nn.Module) -> None:
        self.held, self.tied, others = held_by(model, self.names)
        for name in others:
            if self.names(name) is not None:
                raise coded(
                    CheckpointError,
                    "export-no-tensor",
                    f"'{name}' is not a tensor, and safetensors stores only tensors; let names= "
                    f"return None for it",
                )
        for name, held in self.held.items():
            if held.local.is_meta and self.names(name) is not None:
                raise coded(
                    CheckpointError,
                    "export-meta",
                    f"'{name}' is on the meta device and has no values; give it values before "
                    f"export()",
                )
            self.tensors[name] = About(held.shape, held.dtype)
            if held.local.numel():
                self.boxes[name] = [(held.offsets, tuple(held.local.shape))]

    def whole(self) -> set[str]:
        return {name for name, held in self.held.items() if not held.sharded}

    def parts(self, name: str) -> Iterator[tuple[Box, Callable[[], Tensor]]]:
        for box in self.boxes.get(name, ()):
            yield box, lambda: self.held[name].local


@dataclass
class _SavedJob(_Export):
    """The export of a saved step: ranks take pieces in turn."""

    path: AnyPath = Path()
    metadata: Metadata = field(default_factory=lambda: Metadata({}))
    chunks: dict[str, list[ChunkStorageMetadata]] = field(default_factory=dict)

    def take(self, folder: PathLike, step: int | None) -> None:
        store = store_of(folder)
        manifest = read_manifest(store, step)
        check_files(store, manifest)
        self.path = items_of(store, manifest)
        self.metadata = Reader(self.path).read_metadata()
        rank, size = self.call.rank, self.call.size
        number = 0
        for saved, about in self.metadata.state_dict_metadata.items():
            if not saved.startswith("model."):
                continue
            name = saved.removeprefix("model.")
            if not isinstance(about, TensorStorageMetadata):
                if self.names(name) is None:
                    continue
                raise coded(
                    CheckpointError,
                    "export-no-tensor",
                    f"'{name}' is not a tensor, and safetensors stores only tensors; let names= "
                    f"return None for it",
                )
            self.tensors[name] = About(tuple(about.size), about.properties.dtype)
            for chunk in about.chunks:
                number += 1
                if number % size == rank and chunk.sizes.numel():
                    self.chunks.setdefault(name, []).append(chunk)
        self.boxes = {n: [_box_of(chunk) for chunk in chunks] for n, chunks in self.chunks.items()}

    def parts(self, name: str) -> Iterator[tuple[Box, Callable[[], Tensor]]]:
        def get(chunk: ChunkStorageMetadata) -> Callable[[], Tensor]:
            return lambda: read_chunk(self.path, self.metadata, f"model.{name}", chunk)

        for chunk in self.chunks.get(name, ()):
            yield _box_of(chunk), get(chunk)


def _box_of(chunk: ChunkStorageMetadata) -> Box:
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _facts(
    call: Call,
    jobs: list[_Export],
    out: Path,
    source: nn.Module | PathLike,
    step: int | None,
    format: str,
    dtype: torch.dtype | None,
    shard_size: int | str,
    names: Names | None,
) -> _Facts:
    """Check the arguments, look at the source; the job is put into ``jobs``."""
    if format != "safetensors":
        raise coded(
            CheckpointError,
            "export-format",
            f"export(format=…) takes 'safetensors', not {format!r}",
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise coded(
            CheckpointError,
            "export-dtype",
            f"export(dtype=…) takes a floating-point dtype or None, not {dtype}",
        )
    shard_bytes = _bytes_in(shard_size)
    local_path(out)
    if out.exists() or out.is_symlink():
        raise coded(
            CheckpointError,
            "export-there",
            f"'{out}' already exists, and export() replaces nothing; pass another folder, or "
            f"remove this one",
        )
    job: _LiveJob | _SavedJob
    named = names or (lambda name: name)
    if isinstance(source, nn.Module):
        if step is not None:
            raise coded(
                CheckpointError,
                "export-step-of-model",
                f"export(step={step}) needs a folder of steps, but export() got a model; leave "
                f"step out, or pass the folder",
            )
        job = _LiveJob(call, named, dtype)
        job.take(source)
    else:
        job = _SavedJob(call, named, dtype)
        job.take(source, step)
    jobs.append(job)
    kind = "model" if isinstance(source, nn.Module) else str(source)
    return job.facts((str(out), kind, str(step), str(dtype), str(shard_bytes)), shard_bytes)


def _bytes_in(size: int | str) -> int:
    """5 * 10**9 of "5GB", 5 * 2**30 of "5GiB"."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(size), re.IGNORECASE)
    bytes_ = 0
    if isinstance(size, str) and match is not None:
        number, unit, binary = match.groups()
        units = _BINARY if binary else _UNITS
        bytes_ = int(float(number) * units.get(unit.upper(), 0))
    if bytes_ < 1:
        raise coded(
            CheckpointError,
            "export-shard-size",
            f"export(shard_size=…) takes bytes, or a string such as '5GB' or '500MiB', not "
            f"{size!r}",
        )
    return bytes_


# ---- the folder


def _begin(out: Path, writing: Path, layout: Layout, writer: Writer) -> None:
    """Create all files with their headers in a temporary folder; removes remains of an earlier
    crash.
    """
    files.discard(writing)
    above = next(path for path in out.absolute().parents if path.is_dir())
    free = files.free_bytes(above)
    if free < layout.total:
        raise coded(
            CheckpointError,
            "export-disk",
            f"'{out}' needs {layout.total:,} bytes, but the disk of '{above}' has only {free:,} "
            f"free; free space, or pass a folder on another disk",
        )
    files.make_folders(out.parent)
    files.DISK.make_folder(writing)
    writer.create()


def _commit(out: Path, writing: Path) -> None:
    files.DISK.sync_folder(writing)
    files.DISK.rename(writing, out)
    files.DISK.sync_folder(out.parent)
