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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp2.checkpoint import files
from fsdp2.checkpoint.consensus import Call
from fsdp2.checkpoint.folder import Progress, check_files, items_of, read_manifest, store_of
from fsdp2.checkpoint.reading import Step
from fsdp2.checkpoint.state import Names, held_by
from fsdp2.checkpoint.stores import PathLike, disk_path, local_path
from fsdp2.checkpoint.tensors import About, Box, Layout, Writer, plan
from fsdp2.core.errors import CheckpointError, checkpoint_error
from fsdp2.core.facts import ProcessGroup

_EXPORTING = ".exporting-"


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
    named = names or (lambda name: name)
    mine: list[_Part] = []

    def look() -> _Facts:
        """Check the arguments, look at the source; this rank's parts become ``mine``."""
        if format != "safetensors":
            raise checkpoint_error(
                "export-format", f"export(format=…) takes 'safetensors', not {format!r}"
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise checkpoint_error(
                "export-dtype", f"export(dtype=…) takes a floating-point dtype or None, not {dtype}"
            )
        shard_bytes = _bytes_in(shard_size)
        local_path(out)
        if out.exists() or out.is_symlink():
            raise checkpoint_error(
                "export-there",
                f"'{out}' already exists, and export() replaces nothing; pass another folder, or "
                f"remove this one",
            )
        if isinstance(source, nn.Module) and step is not None:
            raise checkpoint_error(
                "export-step-of-model",
                f"export(step={step}) needs a folder of steps, but export() got a model; leave "
                f"step out, or pass the folder",
            )
        arguments = str(out), str(step), str(dtype), str(shard_bytes)
        if isinstance(source, nn.Module):
            facts = _Facts(("model", *arguments), shard_bytes)
            mine.extend(_of_model(source, named, facts))
        else:
            facts = _Facts((str(source), *arguments), shard_bytes)
            mine.extend(_of_step(call, source, step, named, facts))
        for part in mine:
            facts.boxes.setdefault(part.name, []).append(part.box)
        for name, about in facts.tensors.items():
            if about.dtype.is_floating_point:
                facts.tensors[name] = About(about.shape, dtype or about.dtype)
        return facts

    facts = call.together(look)
    tensors, tied = _shared(facts)
    owners = _owners(facts, tensors)
    layout = plan(tensors, shard_bytes=facts[0].shard_bytes, tied=tied)
    writing = out.with_name(_EXPORTING + out.name)
    writer = Writer(writing, layout)
    own = [part for part in mine if owners[part.name, part.box] == call.rank]
    try:
        call.together(lambda: _begin(out, writing, layout, writer) if call.is_first else None)
        call.together(lambda: _write(writer, own, tensors, progress))
        call.together(lambda: files.publish(writing, out) if call.is_first else None)
    except CheckpointError:
        writer.abandon()
        if call.is_first and not out.exists():
            with contextlib.suppress(OSError):
                files.discard(writing)
        raise
    return Exported(out, sorted(layout.lengths), layout.total, tied)


# ---- what there is


@dataclass
class _Facts:
    """A rank's message to the others."""

    arguments: tuple[str, ...]  # equal on all ranks
    shard_bytes: int
    tensors: dict[str, About] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # the source's name of each
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)  # what every rank holds in full
    tied: dict[str, str] = field(default_factory=dict)


class _Part(NamedTuple):
    """This rank's part of a tensor."""

    name: str
    box: Box
    get: Callable[[], Tensor]


def _shared(facts: Sequence[_Facts]) -> tuple[dict[str, About], dict[str, str]]:
    """All tensors and the names tied to them, as each rank then knows them."""
    if any(other.arguments != facts[0].arguments for other in facts):
        raise checkpoint_error(
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
                raise checkpoint_error(
                    "export-models",
                    f"'{name}' is {about} on one rank and {tensors[name]} on another; build "
                    f"the same model on all ranks",
                )
        for name, own in other.sources.items():
            if sources.setdefault(name, own) != own:
                raise checkpoint_error(
                    "export-clash-on-ranks",
                    f"export(names=…) returned '{name}' for '{sources[name]}', and for "
                    f"'{own}' on another rank; return another name for one, or None to leave "
                    f"it out",
                )
        tied |= other.tied
    return tensors, {name: kept for name, kept in tied.items() if name not in tensors}


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
            raise checkpoint_error(
                "export-incomplete",
                f"the ranks have only {elements[name]} of {math.prod(about.shape)} elements of "
                f"'{name}'; call export() on all ranks of the model's meshes",
            )
    return found


def _mapped(found: Iterable[str], names: Names) -> dict[str, str]:
    """The names of the written tensors, by the source's."""
    mapped: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in found:
        other = names(name)
        if other is None:
            continue
        if not isinstance(other, str):
            raise checkpoint_error(
                "export-name",
                f"export(names=…) returned {other!r} for '{name}'; return a string, or None "
                f"to leave it out",
            )
        if other in taken:
            raise checkpoint_error(
                "export-clash",
                f"export(names=…) returned '{other}' for '{taken[other]}' and for '{name}'; "
                f"return another name for one, or None to leave it out",
            )
        taken[other] = name
        mapped[name] = other
    return mapped


def _write(
    writer: Writer, own: list[_Part], tensors: Mapping[str, About], progress: Progress | None
) -> None:
    sizes = [math.prod(part.box[1]) * tensors[part.name].dtype.itemsize for part in own]
    done, total = 0, sum(sizes)
    with writer:
        for part, size in zip(own, sizes, strict=True):
            writer.write(part.name, part.get(), part.box[0])
            done += size
            if progress is not None:
                progress(done, total)


def _require_left_out(name: str, names: Names) -> None:
    if names(name) is not None:
        raise checkpoint_error(
            "export-no-tensor",
            f"'{name}' is not a tensor, and safetensors stores only tensors; let names= "
            f"return None for it",
        )


def _of_model(model: nn.Module, names: Names, facts: _Facts) -> Iterator[_Part]:
    """This rank's parts, of which ``facts`` then knows the tensors."""
    held_here, tied, others = held_by(model, names)
    for name in others:
        _require_left_out(name, names)
    mapped = _mapped([*held_here, *tied], names)
    for name, held in held_here.items():
        if name not in mapped:
            continue
        if held.local.is_meta:
            raise checkpoint_error(
                "export-meta",
                f"'{name}' is on the meta device and has no values; give it values before export()",
            )
        other = mapped[name]
        facts.tensors[other], facts.sources[other] = About(held.shape, held.dtype), name
        if not held.sharded:
            facts.whole.add(other)
        if held.local.numel():
            box = (held.offsets, tuple(held.local.shape))
            yield _Part(other, box, partial(getattr, held, "local"))
    both = ((other, first) for other, first in tied.items() if {other, first} <= mapped.keys())
    facts.tied = {mapped[other]: mapped[first] for other, first in both}


def _of_step(
    call: Call, folder: PathLike, step: int | None, names: Names, facts: _Facts
) -> Iterator[_Part]:
    """The same of a step, whose saved pieces the ranks take in turn."""
    store = store_of(folder)
    manifest = read_manifest(store, step)
    check_files(store, manifest)
    content, number = Step(items_of(store, manifest), typed=False), 0
    saved = [name for name in content.saved if name.startswith("model.")]
    for name in saved:
        if name not in content.abouts:
            _require_left_out(name.removeprefix("model."), names)
    tensors = [name.removeprefix("model.") for name in saved if name in content.abouts]
    for own, name in _mapped(tensors, names).items():
        about = content.saved[f"model.{own}"]
        assert isinstance(about, TensorStorageMetadata)
        facts.tensors[name], facts.sources[name] = content.abouts[f"model.{own}"], own
        for chunk in about.chunks:
            number += 1
            if number % call.size == call.rank and chunk.sizes.numel():
                box = (tuple(chunk.offsets), tuple(chunk.sizes))
                yield _Part(name, box, partial(content.chunk, f"model.{own}", chunk))


def _bytes_in(size: int | str) -> int:
    """5 * 10**9 of "5GB", 5 * 2**30 of "5GiB"."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    pattern = r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?\s*"
    match = re.fullmatch(pattern, size, re.IGNORECASE) if isinstance(size, str) else None
    bytes_ = 0
    if match is not None:
        number, unit, binary = match.groups()
        power = "KMGT".index(unit.upper()) + 1 if unit else 0
        bytes_ = int(float(number) * (1024 if binary else 1000) ** power)
    if bytes_ < 1:
        raise checkpoint_error(
            "export-shard-size",
            f"export(shard_size=…) takes bytes, or a string such as '5GB' or '500MiB', not "
            f"{size!r}",
        )
    return bytes_


# ---- the folder


def _begin(out: Path, writing: Path, layout: Layout, writer: Writer) -> None:
    """Create all files with their headers in a temporary folder, emptied of an earlier crash."""
    files.discard(writing)
    above = next(path for path in out.absolute().parents if path.is_dir())
    free = files.free_bytes(above)
    if free < layout.total:
        raise checkpoint_error(
            "export-disk",
            f"'{out}' needs {layout.total:,} bytes, but the disk of '{above}' has only {free:,} "
            f"free; free space, or pass a folder on another disk",
        )
    files.make_folders(out.parent)
    files.DISK.make_folder(writing)
    writer.create()
