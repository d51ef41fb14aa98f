"""`convert`: from one kind of checkpoint to another, in one process, a block of a tensor at a time.

    steps          a folder of steps, or one step of it        ┐            ┌─> steps
    dcp            a folder of torch.distributed.checkpoint    │            ├─> dcp
    torch, fsdp1   a file of torch.save; or weights in         ├─ Contents ─┼─> torch, fsdp1
                   several, with Hugging Face's index          │            │
    ranks          torch FSDP1's sharded state dicts, a file   │            │
                   of torch.save per rank                      │            │
    xla            a file of `fsdp2.xla` per rank              │            ├─> xla
    safetensors    a file, or a folder of Hugging Face's       ┘            └─> safetensors

The target is written next to its final path until it is complete and durable.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp2.checkpoint import binaries, files
from fsdp2.checkpoint.archives import Bytes, Write, read_archive, read_file, write_archive
from fsdp2.checkpoint.contents import Contents, contents_of, contents_of_step, joined
from fsdp2.checkpoint.entries import Entry, MappedFile, Piece, Tree, entries_of, whole_of
from fsdp2.checkpoint.folder import (
    Manifest,
    Progress,
    broken_values,
    check_files,
    check_hashes,
    items_of,
    read_manifest,
    steps,
)
from fsdp2.checkpoint.items import file_of, index_of
from fsdp2.checkpoint.state import Reader, kept_values
from fsdp2.checkpoint.stores import (
    INDEX,
    MANIFEST,
    DiskStore,
    PathLike,
    local_path,
    saving_folder,
    step_folder,
)
from fsdp2.checkpoint.tensors import SUFFIX, About, catalogue, plan
from fsdp2.checkpoint.values import packed, unpacked
from fsdp2.core.errors import CheckpointError, coded, resaid
from fsdp2.core.layout.layout import default_cut
from fsdp2.xla.files import check_models, check_ranks
from fsdp2.xla.shards import FORMAT, check_metadata, rows_of

KINDS = ("steps", "dcp", "torch", "fsdp1", "ranks", "xla", "safetensors")
_FILES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_OLDER = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # what files of torch.save began with

Nested = dict[str, Any]
T = TypeVar("T")


@dataclass
class Converted:
    """The result of `convert`.

    Attributes:
        from_kind: the kind of the source.
        to_kind: the kind of the target.
        step: of the source or the target, if one of them is a folder of steps.
        left: parts that the target's kind does not support: "optimizer", "rng", "extra", "states",
            "rank_extra", and names of the model's entries that are not tensors.
    """

    from_kind: str
    to_kind: str
    step: int | None = None
    left: list[str] = field(default_factory=list)


def convert(
    source: PathLike,
    target: PathLike,
    *,
    from_kind: str | None = None,
    to_kind: str | None = None,
    step: int | None = None,
    ranks: int = 1,
    strip_prefix: str = "",
    progress: Progress | None = None,
) -> Converted:
    """Change a checkpoint into another kind, in one process, without a process group or a model.

    Kinds: "steps", of `save`; "dcp", a folder of `torch.distributed.checkpoint`, also with sharded
    state dicts of torch's FSDP1 and FSDP2; "torch", one file of ``torch.save`` with {"model": …,
    "optimizer": …}, the optimizer's parameters by number, as without sharding; "fsdp1", the same
    file by name, as with FSDP1's FULL_STATE_DICT; both may also be a folder of weights in several
    files with ``pytorch_model.bin.index.json``; "ranks", SHARDED_STATE_DICT in one file of
    ``torch.save`` per rank; "xla", files of `fsdp2.xla`; "safetensors". "ranks" can only be read.

    Memory holds 1 MiB of a tensor at a time; or one tensor, if ranks have sharded it on a dim other
    than the first. No code from a file runs. The hashes of a step are compared first.

    Args:
        source: a file, a folder, or a pattern of files of ranks ("run/ckpt_rank-*.pth").
        target: a file or a folder that does not exist yet; for kind "steps" also a folder with
            other steps. It exists only when it is complete and durable.
        from_kind: the kind of the source. Default ``None``: recognized from its files.
        to_kind: the kind of the target. Default ``None``: "steps" if it is such a folder,
            "safetensors" and "torch" by the suffix of its name.
        step: of the source, by default the newest; for a target of kind "steps" also the step to
            create, which is required if the source is of another kind.
        ranks: the number of files of an "xla" target. Default 1.
        strip_prefix: what names of the source begin with, and names of the target do not, as
            "module." of DistributedDataParallel. Default: nothing.
        progress: called repeatedly with bytes done and total bytes. Default ``None``.

    Returns:
        Kinds, step, and the parts that the target does not support.

    Raises:
        CheckpointError: the source is of no kind or of several, is broken, does not assign states
            to names, or has no name with the prefix; or the target exists. Nothing was written in
            this case.

    Example::

        >>> fsdp2.checkpoint.convert("run", "model.safetensors").left
        ['optimizer']
    """
    origin, place = local_path(source), local_path(target)
    for kind in (from_kind, to_kind):
        if kind is not None and kind not in KINDS:
            raise coded(
                CheckpointError,
                "ckpt-kind",
                f"convert() does not know the kind '{kind}'; pass one of {list(KINDS)}",
            )
    found = Converted(from_kind or kind_of(origin), to_kind or _kind_to_be(place), step)
    if found.to_kind == "ranks":
        raise coded(
            CheckpointError,
            "ckpt-kind-ranks",
            "convert() does not write kind 'ranks'; pass to_kind='dcp', which FSDP1's sharded "
            "state dicts load from",
        )
    with _one_sentence(origin, place):
        contents = _read(origin, found)
        if strip_prefix:
            contents.strip(strip_prefix, origin)
        _write(place, contents, found, ranks, progress)
    return found


@contextmanager
def _one_sentence(source: Path, target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise coded(
            CheckpointError,
            "ckpt-convert-failed",
            f"convert('{source}', '{target}') failed ({type(error).__name__}: "
            f"{error.strerror or error}); existing files are unchanged, so correct the cause and "
            f"call it again",
        ) from error


# ---- which kind


def kind_of(path: Path) -> str:
    """The kind of the checkpoint at a path.

    Raises:
        CheckpointError: it is of none or of several.
    """
    if path.is_file():
        found = _kinds_of_file(path)
    elif path.is_dir():
        found = _kinds_of_folder(path)
    else:
        found = _kinds_of_files(_matching(path))
    if not found:
        raise coded(
            CheckpointError,
            "ckpt-kind-none",
            f"'{path}' is not a checkpoint that convert() knows; pass a folder of steps, a DCP "
            f"folder, or files of torch.save or safetensors",
        )
    if len(found) > 1:
        raise coded(
            CheckpointError,
            "ckpt-kind-several",
            f"'{path}' may have any of the kinds {found}; pass from_kind=, or the path of one of "
            f"them",
        )
    return found[0]


def _kinds_of_file(path: Path) -> list[str]:
    with path.open("rb") as file:
        begin = file.read(len(_OLDER))
    if begin == _OLDER:
        raise coded(
            CheckpointError,
            "ckpt-file-older",
            f"'{path}' has the format of torch.save before torch 1.6; load it with torch.load, "
            f"and save it again",
        )
    if begin[8:9] == b"{":  # behind the length of the header
        return ["safetensors"]
    return ["torch"] if begin[:2] == b"PK" and path.suffix != ".distcp" else []


def _kinds_of_folder(path: Path) -> list[str]:
    found = []
    if steps(path) or ((path / MANIFEST).is_file() and steps(path.parent)):
        found.append("steps")
    elif (path / ".metadata").is_file():
        found.append("dcp")
    if any(path.glob(f"*{SUFFIX}")):
        found.append("safetensors")
    if (path / binaries.INDEX).is_file():
        return [*found, "torch"]
    return found + _kinds_of_files(_matching(path))


def _kinds_of_files(paths: Sequence[Path]) -> list[str]:
    """The kinds of files of ranks."""
    kinds = {"xla" if _is_xla(read_file(path)) else "ranks" for path in paths}
    return sorted(kinds)


def _is_xla(tree: Tree) -> bool:
    return isinstance(tree, dict) and "shard_metadata" in tree


def _matching(path: Path) -> list[Path]:
    """Files of torch.save in a folder, or of a pattern."""
    if path.is_dir():
        return sorted(each for each in path.iterdir() if each.suffix in _FILES)
    return sorted(path.parent.glob(path.name)) if path.parent.is_dir() else []


def _kind_to_be(path: Path) -> str:
    if path.is_dir() and steps(path):
        return "steps"
    kind = "torch" if path.suffix in _FILES else "safetensors" if path.suffix == SUFFIX else None
    if kind is None:
        raise coded(
            CheckpointError,
            "ckpt-kind-to-be",
            f"the name '{path}' does not tell which kind to write; pass to_kind=, one of "
            f"{list(KINDS)}",
        )
    return kind


# ---- reading


def _read(path: Path, found: Converted) -> Contents:
    if found.from_kind == "steps":
        return _read_step(path, found)
    if found.from_kind == "dcp":
        return contents_of(_read_dcp(path)[0], path)
    if found.from_kind == "safetensors":
        return _read_safetensors(path)
    if found.from_kind == "xla":
        return _read_xla(path)
    if (path / binaries.INDEX).is_file():
        return _read_binaries(path)
    paths = [path] if path.is_file() else _matching(path)
    if found.from_kind != "ranks" and len(paths) != 1:
        raise coded(
            CheckpointError,
            "ckpt-one-file",
            f"'{path}' is not one file of torch.save; pass the file, or from_kind='ranks'",
        )
    return contents_of(joined([read_file(each) for each in paths], path), path)


def _read_step(path: Path, found: Converted) -> Contents:
    root, step = path, found.step
    if (path / MANIFEST).is_file():  # a step of a folder
        root, step = path.parent, int(path.name.rpartition("-")[2])
    store = DiskStore(root)
    manifest = read_manifest(store, step)
    check_files(store, manifest)
    check_hashes(store, manifest, list(manifest.files))
    tree, flat = _read_dcp(Path(items_of(store, manifest)))
    with broken_values(store.folder(manifest.step)):
        for text in tree.pop("values", {}).values():
            if not isinstance(text, Entry):
                _put_value(tree, flat, json.loads(text))
        extra = unpacked(manifest.extra, tree.pop("extra", {}))
    contents = contents_of_step(tree, path)
    contents.extra = extra
    if found.step is None or found.to_kind != "steps":
        found.step = manifest.step
    return contents


def _put_value(tree: Nested, flat: Nested, written: list[Any]) -> None:
    """A value with its types, in the place of what DCP's items have of it."""
    path, content = written
    at: Any = tree
    for part in path[:-1]:
        at = at.setdefault(part, {}) if isinstance(at, dict) else at[part]
    at[path[-1]] = unpacked(content, flat)


def _read_dcp(folder: Path) -> tuple[Nested, Nested]:
    """The state dict, nested as it was; and by items."""
    metadata = Reader(folder).read_metadata()
    with broken_values(folder):
        return _nested(folder, metadata)


def _nested(folder: Path, metadata: Metadata) -> tuple[Nested, Nested]:
    stored, mapped = metadata.storage_data, dict[str, MappedFile]()

    def slice_of(index: MetadataIndex) -> tuple[Tree, MappedFile]:
        info = stored[index]
        path = folder / info.relative_path
        if not path.is_file():
            raise coded(
                CheckpointError,
                "ckpt-file-missing",
                f"'{path}' is missing; load another step, or copy all files of this one",
            )
        if getattr(info, "transform_descriptors", None):
            raise coded(
                CheckpointError,
                "ckpt-compressed",
                f"'{path}' is compressed; load it with torch.distributed.checkpoint, and save it "
                f"without extensions",
            )
        file = mapped.setdefault(info.relative_path, MappedFile(path))
        return read_archive(file, info.offset, info.offset + info.length), file

    found, flat = Nested(), Nested()
    paths = metadata.planner_data or {}
    for name, about in metadata.state_dict_metadata.items():
        value: Tree
        path = paths.get(name, (name,))
        unit = ".".join(map(str, path[: 4 if path[0] == "optimizer" else 2]))
        if isinstance(about, TensorStorageMetadata):
            pieces = []
            for chunk in about.chunks:
                entry, _ = slice_of(MetadataIndex(name, chunk.offsets))
                (piece,) = entry.pieces
                pieces.append(Piece(piece.tensor, tuple(chunk.offsets), piece.file))
            value = whole_of(name, about.size, about.properties.dtype, pieces, folder)
        elif f"values.{unit}" in metadata.state_dict_metadata:
            continue  # of any class; its types are there
        else:
            value, _ = slice_of(MetadataIndex(name))
        flat[name] = value
        set_element(found, path, value)
    return found, flat


def _read_binaries(path: Path) -> Contents:
    """Weights in several files."""
    folder, names = binaries.files_of(path)
    model: Nested = {}
    for name in names:
        model |= contents_of(read_file(folder / name), folder / name).model
    return contents_of(model, path)


def _read_xla(path: Path) -> Contents:
    paths = _matching(path)
    trees = {str(each): read_file(each) for each in paths}
    try:
        metadata = {
            name: check_metadata(tree["shard_metadata"], name) for name, tree in trees.items()
        }
        check_ranks(metadata, str(path))
        ordered = sorted(trees, key=lambda name: metadata[name]["rank"])
        models = [trees[name]["model"] for name in ordered]
        about = metadata[ordered[0]]
        tensors = [
            {k: v.pieces[0].tensor if isinstance(v, Entry) else v for k, v in model.items()}
            for model in models
        ]
        check_models(tensors, ordered, [metadata[name] for name in ordered])
    except (ValueError, FileNotFoundError) as error:
        raise resaid(CheckpointError, str(error)) from error
    found: Nested = {}
    made: dict[object, Entry] = {}
    for name, value in models[0].items():
        info = about["shard_info"].get(name)
        if info is None:
            before = about["buffer_info"].get(name)
            found[name] = value if before is None else _as_dtype(value, getattr(torch, before))
            continue
        same = tuple(model[name] for model in models)
        if same not in made:  # tied parameters are one entry of each rank
            pieces = []
            for rank, model in enumerate(models):
                (piece,) = model[name].pieces
                start, _ = rows_of(info["shape"], info["dim"], len(models), rank)
                offsets = tuple(start * (d == info["dim"]) for d in range(len(info["shape"])))
                pieces.append(Piece(piece.tensor, offsets, piece.file))
            dtype = pieces[0].tensor.dtype
            made[same] = whole_of(name, info["shape"], dtype, pieces, path)
        found[name] = made[same]
    return contents_of({"model": found}, path)


def _as_dtype(value: object, dtype: torch.dtype) -> object:
    return Entry.of(value.whole().to(dtype)) if isinstance(value, Entry) else value


def _read_safetensors(path: Path) -> Contents:
    listed = catalogue(path)
    mapped = {name: MappedFile(Path(listed.folder / name)) for name in listed.lengths}
    model: Nested = {}
    for name, place in listed.places.items():
        count, dtype, file = (
            torch.Size(place.about.shape).numel(),
            place.about.dtype,
            mapped[place.file],
        )
        if count:
            values = file.values(place.offset, count, dtype).view(place.about.shape)
            model[name] = Entry.of(values, file)
        else:
            model[name] = Entry.of(torch.empty(place.about.shape, dtype=dtype))
    for other, name in listed.tied.items():
        model[other] = model[name]
    return contents_of(model, path)


# ---- writing


class _Stream:
    """Passes bytes on, and says how many there were."""

    def __init__(self, write: Write, progress: Progress | None, total: int) -> None:
        self._write, self._progress, self._total = write, progress, total
        self.done = 0

    def write(self, data: Bytes) -> int:
        self._write(data)
        self.done += len(data)
        if self._progress is not None:
            self._progress(min(self.done, self._total), self._total)
        return len(data)


def _write(
    place: Path, contents: Contents, found: Converted, ranks: int, progress: Progress | None
) -> None:
    kind = found.to_kind
    if kind != "steps":
        contents.beside.pop("about", None)
    if kind != "steps" and place.exists():
        raise coded(
            CheckpointError,
            "ckpt-target-there",
            f"'{place}' already exists; pass another target, or remove it first",
        )
    if kind in ("xla", "safetensors"):
        rest = {"optimizer": contents.optimizer, "rng": contents.rng, "extra": contents.extra}
        rest |= contents.beside
        found.left = [name for name, value in rest.items() if value]
        found.left += [n for n, value in contents.model.items() if not isinstance(value, Entry)]
    if kind == "steps":
        _write_step(place, contents, found, progress)
    elif kind == "dcp":
        with _beside_folder(place) as folder:
            _write_dcp(folder, contents.tree(), files.DurableFiles(), progress)
    elif kind == "xla":
        with _beside_folder(place) as folder:
            _write_xla(folder, contents, ranks, progress)
    elif kind == "safetensors":
        _write_safetensors(place, contents, progress)
    else:
        with _beside_file(place) as path:
            _write_file(path, contents.tree(numbered=kind == "torch"), progress)


def _saving(place: Path) -> Path:
    """The path where a target is written; removes the remains of a crash there."""
    path = place.with_name(f".saving-{place.name}")
    files.discard(path)
    files.make_folders(place.parent)
    return path


@contextmanager
def _beside_file(place: Path) -> Iterator[Path]:
    path = _saving(place)
    try:
        yield path
    except BaseException:
        files.discard(path)
        raise
    files.DISK.rename(path, place)
    files.DISK.sync_folder(place.parent)


@contextmanager
def _beside_folder(place: Path) -> Iterator[Path]:
    path = _saving(place)
    files.DISK.make_folder(path)
    try:
        yield path
        files.DISK.sync_folder(path)
    except BaseException:
        files.discard(path)
        raise
    files.DISK.rename(path, place)
    files.DISK.sync_folder(place.parent)


def _total(tree: Tree) -> int:
    return sum(entry.nbytes for entry in entries_of(tree))


def _write_file(path: Path, tree: Tree, progress: Progress | None) -> None:
    with files.DurableFile(path) as stream:
        write_archive(_Stream(stream.write, progress, _total(tree)).write, tree)


def _write_step(
    root: Path, contents: Contents, found: Converted, progress: Progress | None
) -> None:
    step = _step_to_write(root, found)
    entries: dict[int, Entry] = {}

    def entry(value: Tree) -> Tree:
        """For a tensor without memory, its entry; otherwise the bytes of a numpy array."""
        found = entries.get(id(value), value)
        return Entry.of(found) if isinstance(found, torch.Tensor) else found

    extra = _metas(contents.extra, entries)
    held = packed(extra)
    if held.wrong:
        raise coded(
            CheckpointError,
            "ckpt-convert-value",
            f"convert() found {held.wrong[0]}, which cannot be loaded without running code; "
            f"remove it before you convert to steps",
        )
    tree = contents.tree()
    tree.pop("extra", None)
    tree["extra"] = {name: entry(value) for name, value in held.tensors.items()}
    metas = _metas(tree, entries)  # alive, so that no other tensor has their ids
    values = kept_values(metas)
    tree["values"] = {name: entry(value) for name, value in values.items()}
    files.make_folders(root)
    saving, disk = saving_folder(root, step), files.DurableFiles()
    for left in (saving, step_folder(root, step)):
        files.discard(left)
    files.DISK.make_folder(saving)
    try:
        _write_dcp(saving, tree, disk, progress)
        manifest = Manifest(
            step=step,
            ranks=1,
            files=dict(sorted(disk.written.items())),
            extra=held.content,
            has_optimizer=contents.optimizer is not None,
            torch=torch.__version__,
        )
        files.write_durably({saving / MANIFEST: manifest.encoded()})
        files.DISK.sync_folder(saving)
    except BaseException:
        files.discard(saving)
        raise
    files.DISK.rename(saving, step_folder(root, step))
    files.DISK.sync_folder(root)


def _step_to_write(root: Path, found: Converted) -> int:
    """The number of the step, of which the folder has none yet."""
    step = found.step
    if step is None:
        raise coded(
            CheckpointError,
            "ckpt-convert-step",
            "convert() to kind 'steps' needs the number of the step; pass step=",
        )
    if root.exists() and not root.is_dir():
        raise coded(CheckpointError, "ckpt-is-file", f"'{root}' is a file; pass a folder")
    if DiskStore(root).has(step):
        raise coded(
            CheckpointError,
            "ckpt-step-there",
            f"'{root}' already has step {step}; save another step, or call "
            f"fsdp2.checkpoint.remove(folder, {step}) first",
        )
    return step


def _metas(tree: Tree, entries: dict[int, Entry]) -> Tree:
    """The same, with a tensor without memory for each entry; which, by the tensor's ``id``."""

    def meta(value: Tree) -> Tree:
        if not isinstance(value, Entry):
            return value
        made = torch.empty(value.shape, dtype=value.dtype, device="meta")
        entries[id(made)] = value
        return made

    return _mapped(tree, meta)


def _mapped(tree: Tree, change: Callable[[Tree], Tree]) -> Tree:
    """The same nesting of other leaves."""
    if isinstance(tree, dict):
        found = copy.copy(tree)  # of its class
        for key, value in tree.items():
            found[key] = _mapped(value, change)
        return found
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(value, change) for value in tree)
    return change(tree)


def _write_dcp(
    folder: Path, tree: Nested, disk: files.DurableFiles, progress: Progress | None
) -> None:
    """One file, and the index."""
    entries: dict[int, Entry] = {}
    metas = _metas(tree, entries)  # alive, so that nothing else has their ids
    flat, paths = flatten_state_dict(metas)
    about: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, object] = {}
    with disk.create(folder / file_of(0)) as stream:
        counted = _Stream(stream.write, progress, _total(tree))
        for name, value in flat.items():
            begin = counted.done
            if isinstance(value, torch.Tensor):
                zeros = torch.Size([0] * value.dim())
                index = MetadataIndex(name, zeros)
                chunk = ChunkStorageMetadata(zeros, value.shape)
                properties = TensorProperties(dtype=value.dtype)
                about[name] = TensorStorageMetadata(properties, value.shape, [chunk])
                write_archive(counted.write, entries[id(value)])
            else:
                index = MetadataIndex(name)
                about[name] = BytesStorageMetadata()
                write_archive(counted.write, _mapped(value, lambda v: entries.get(id(v), v)))
            info = filesystem._StorageInfo(file_of(0), begin, counted.done - begin)
            stored[index] = info
    with disk.create(folder / INDEX) as stream:
        stream.write(index_of(Metadata(about, paths), stored))


def _write_xla(folder: Path, contents: Contents, ranks: int, progress: Progress | None) -> None:
    """One file per rank, sharded on the dims that wrappers shard."""
    if not isinstance(ranks, int) or ranks < 1:
        raise coded(
            CheckpointError,
            "ckpt-xla-ranks",
            f"convert(ranks=…) takes a number of ranks from 1, not {ranks!r}",
        )
    model = {name: value for name, value in contents.model.items() if isinstance(value, Entry)}
    params = set(model)
    if contents.optimizer is not None:
        params = {n for group in contents.optimizer["param_groups"] for n in group["params"]}
    infos = {
        name: {
            "shape": list(value.shape),
            "dim": default_cut(value.shape, ranks, value.dtype.itemsize).dim,
        }
        for name, value in model.items()
        if name in params and value.shape
    }
    for rank in range(ranks):
        tree = {
            "model": _rows(model, infos, ranks, rank),
            "shard_metadata": {
                "format": FORMAT,
                "rank": rank,
                "world_size": ranks,
                "shard_info": infos,
                "buffer_info": {},
                "flatten_info": {},
            },
        }
        _write_file(folder / f"rank-{rank}-of-{ranks}.pth", tree, progress)


def _rows(
    model: Mapping[str, Entry], infos: Mapping[str, Any], ranks: int, rank: int
) -> dict[str, Entry]:
    """One rank's rows of each; tied ones stay tied."""
    made: dict[Entry, Entry] = {}
    for name, value in model.items():
        info = infos.get(name)
        if value not in made and info is not None:
            start, rows = rows_of(value.shape, info["dim"], ranks, rank)
            made[value] = value.narrow(info["dim"], start, rows)
        made.setdefault(value, value)
    return {name: made[value] for name, value in model.items()}


def _write_safetensors(place: Path, contents: Contents, progress: Progress | None) -> None:
    """One file; tied tensors once, their other names in its metadata."""
    names: dict[Entry, str] = {}
    tied: dict[str, str] = {}
    for name, value in contents.model.items():
        if isinstance(value, Entry) and names.setdefault(value, name) != name:
            tied[name] = names[value]
    layout = plan({n: About(e.shape, e.dtype) for e, n in names.items()}, tied=tied)
    (header,) = layout.headers.values()
    by_name = {name: entry for entry, name in names.items()}
    with _beside_file(place) as path, files.DurableFile(path) as stream:
        counted = _Stream(stream.write, progress, _total(by_name))
        counted.write(header)
        for name in sorted(
            by_name, key=lambda name: (layout.places[name].offset, by_name[name].nbytes)
        ):
            for block in by_name[name].blocks():
                counted.write(block)
