"""`convert`: from one kind of checkpoint to another, in one process, one tensor after another.

    steps          a folder of steps, or one step of it        ┐            ┌─> steps
    dcp            a folder of torch.distributed.checkpoint    ├─ Contents ─┼─> dcp
    torch, fsdp1   a file of torch.save; or weights in         │            ├─> torch, fsdp1
                   several, with Hugging Face's index          │            │
    safetensors    a file, or a folder of Hugging Face's       ┘            └─> safetensors

Tensors of files are mapped; those of a step or of DCP are `archives.lazy`: read when they are
written. The target is written next to its final path until it is complete and durable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from fsdp2.checkpoint import files
from fsdp2.checkpoint.archives import (
    mapped,
    read_file,
    values_of,
    write_archive,
)
from fsdp2.checkpoint.contents import (
    BINARY_INDEX,
    Contents,
    TensorFolder,
    contents_of,
    contents_of_step,
    is_safetensors,
)
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
from fsdp2.checkpoint.items import file_of, index_of, write_items
from fsdp2.checkpoint.reading import Step
from fsdp2.checkpoint.snapshots import Nested
from fsdp2.checkpoint.state import kept_values
from fsdp2.checkpoint.stores import INDEX, MANIFEST, DiskStore, PathLike, local_path
from fsdp2.checkpoint.tensors import SUFFIX, About, bytes_of, plan
from fsdp2.checkpoint.values import Packed, unpacked
from fsdp2.core.errors import checkpoint_error

KINDS = ("steps", "dcp", "torch", "fsdp1", "safetensors")
_FILES = (".pt", ".pth", ".bin", ".ckpt", ".tar")


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
    strip_prefix: str = "",
    progress: Progress | None = None,
) -> Converted:
    """Change a checkpoint into another kind, in one process, without a process group or a model.

    Kinds: "steps", of `save`; "dcp", a folder of `torch.distributed.checkpoint`, also with sharded
    state dicts of torch's FSDP1 and FSDP2; "torch", one file of ``torch.save`` with {"model": …,
    "optimizer": …}, the optimizer's parameters by number, as without sharding; "fsdp1", the same
    file by name, as with FSDP1's FULL_STATE_DICT; both may also be a folder of weights in several
    files with ``pytorch_model.bin.index.json``; "safetensors".

    Memory holds one tensor at a time, and one of its saved chunks if torch wrote the DCP folder;
    files are mapped. No code from a file runs. The hashes of a step are compared first. Reading
    "safetensors" needs ``pip install safetensors``.

    Args:
        source: a file or a folder.
        target: a file or a folder that does not exist yet; for kind "steps" also a folder with
            other steps. It exists only when it is complete and durable.
        from_kind: the kind of the source. Default ``None``: recognized from its files.
        to_kind: the kind of the target. Default ``None``: "steps" if it is such a folder,
            "safetensors" and "torch" by the suffix of its name.
        step: of the source, by default the newest; for a target of kind "steps" also the step to
            create, which is required if the source is of another kind.
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
            raise checkpoint_error(
                "ckpt-kind", f"convert() does not know the kind '{kind}'; pass one of {list(KINDS)}"
            )
    found = Converted(from_kind or kind_of(origin), to_kind or _kind_to_be(place), step)
    try:
        contents = _read(origin, found)
        if strip_prefix:
            contents.strip(strip_prefix, origin)
        _write(place, contents, found, progress)
    except OSError as error:
        raise checkpoint_error(
            "ckpt-convert-failed",
            f"convert('{origin}', '{place}') failed ({type(error).__name__}: "
            f"{error.strerror or error}); existing files are unchanged, so correct the cause and "
            f"call it again",
        ) from error
    return found


# ---- which kind


def kind_of(path: Path) -> str:
    """The kind of the checkpoint at a path."""
    found = _kinds_of_file(path) if path.is_file() else _kinds_of_folder(path)
    if not found:
        raise checkpoint_error(
            "ckpt-kind-none",
            f"'{path}' is not a checkpoint that convert() knows; pass a folder of steps, a DCP "
            f"folder, or files of torch.save or safetensors",
        )
    if len(found) > 1:
        raise checkpoint_error(
            "ckpt-kind-several",
            f"'{path}' may have any of the kinds {found}; pass from_kind=, or the path of one of "
            f"them",
        )
    return found[0]


def _kinds_of_file(path: Path) -> list[str]:
    if is_safetensors(path):
        return ["safetensors"]
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    return ["torch"] if is_zip and path.suffix != ".distcp" else []


def _kinds_of_folder(path: Path) -> list[str]:
    found = []
    if steps(path) or ((path / MANIFEST).is_file() and steps(path.parent)):
        found.append("steps")
    elif (path / INDEX).is_file():
        found.append("dcp")
    if any(path.glob(f"*{SUFFIX}")):
        found.append("safetensors")
    if (path / BINARY_INDEX).is_file() or any(path.glob("pytorch_model*.bin")):
        found.append("torch")
    return found


def _kind_to_be(path: Path) -> str:
    if path.is_dir() and steps(path):
        return "steps"
    kind = "torch" if path.suffix in _FILES else "safetensors" if path.suffix == SUFFIX else None
    if kind is None:
        raise checkpoint_error(
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
        return contents_of(Step(path, typed=False).tree(), path)
    if found.from_kind == "safetensors" or path.is_dir():
        folder = TensorFolder(path)
        model = {name: folder.values(name) for name in folder.abouts}
        model |= {other: model[name] for other, name in folder.tied.items()}
        return contents_of(model, path)
    tree = read_file(path)
    if isinstance(tree, dict) and "shard_metadata" in tree:
        raise checkpoint_error(
            "ckpt-file-xla",
            f"'{path}' has the shards of one rank; join the files of all ranks with "
            f"fsdp2.xla.consolidate_sharded_model_checkpoints() first",
        )
    return contents_of(tree, path)


def _read_step(path: Path, found: Converted) -> Contents:
    root, step = path, found.step
    if (path / MANIFEST).is_file():  # a step of a folder
        root, step = path.parent, int(path.name.rpartition("-")[2])
    store = DiskStore(root)
    manifest = read_manifest(store, step)
    check_files(store, manifest)
    check_hashes(store, manifest, list(manifest.files))
    with broken_values(store.folder(manifest.step)):
        tree = Step(items_of(store, manifest)).tree()
        tree.pop("values", None)
        extra = unpacked(manifest.extra, tree.pop("extra", {}))
    contents = contents_of_step(tree, path)
    contents.extra = extra
    if found.step is None or found.to_kind != "steps":
        found.step = manifest.step
    return contents


# ---- writing


def _report(stream: files.Summed, progress: Progress | None, tree: object) -> None:
    """Let a file tell how many of the bytes of all tensors were written."""
    sizes: dict[int, int] = {}
    mapped(tree, lambda tensor: sizes.setdefault(id(tensor), tensor.nbytes))
    total = sum(sizes.values())
    if progress is not None:
        stream.told = lambda done: progress(min(done, total), total)


def _write(place: Path, contents: Contents, found: Converted, progress: Progress | None) -> None:
    kind = found.to_kind
    if kind == "steps":
        _write_step(place, contents, found, progress)
        return
    contents.beside.pop("about", None)
    if place.exists():
        raise checkpoint_error(
            "ckpt-target-there",
            f"'{place}' already exists; pass another target, or remove it first",
        )
    if kind == "safetensors":
        rest = {"optimizer": contents.optimizer, "rng": contents.rng, "extra": contents.extra}
        found.left = [name for name, value in (rest | contents.beside).items() if value]
        found.left += [n for n, value in contents.model.items() if not isinstance(value, Tensor)]
    files.make_folders(place.parent)
    path = place.with_name(f".saving-{place.name}")
    files.discard(path)
    try:
        _write_beside(path, kind, contents, progress)
    except BaseException:
        files.discard(path)
        raise
    files.publish(path, place)


def _write_beside(path: Path, kind: str, contents: Contents, progress: Progress | None) -> None:
    if kind == "dcp":
        files.DISK.make_folder(path)
        with files.DurableFile(path / file_of(0)) as stream:
            index = _write_items(stream, contents.tree(), progress)
        files.write_durably({path / INDEX: index})
    elif kind == "safetensors":
        _write_safetensors(path, contents, progress)
    else:
        tree = contents.tree(numbered=kind == "torch")
        with files.DurableFile(path) as stream:
            _report(stream, progress, tree)
            write_archive(stream.write, tree)


def _write_step(
    root: Path, contents: Contents, found: Converted, progress: Progress | None
) -> None:
    step, store = found.step, DiskStore(root)
    if step is None:
        raise checkpoint_error(
            "ckpt-convert-step",
            "convert() to kind 'steps' needs the number of the step; pass step=",
        )
    store.require_free(step)
    held = Packed(contents.extra)
    if held.wrong:
        raise checkpoint_error(
            "ckpt-convert-value",
            f"convert() found {held.wrong[0]}, which cannot be loaded without running code; "
            f"remove it before you convert to steps",
        )
    tree = contents.tree() | {"extra": held.tensors}
    tree["values"] = kept_values(tree)
    store.prepare()
    attempt = store.attempt(step, "")
    attempt.clear(0)
    try:
        attempt.begin()
        with attempt.create(file_of(0)) as stream:
            index = _write_items(stream, tree, progress)
        manifest = Manifest(
            step=step,
            ranks=1,
            files={INDEX: files.fact_of(index), **attempt.written},
            extra=held.content,
            has_optimizer=contents.optimizer is not None,
            torch=torch.__version__,
        )
        attempt.commit(index, manifest.encoded())
    except BaseException:
        attempt.clear(0)
        raise


def _write_items(stream: files.Summed, tree: Nested, progress: Progress | None) -> bytes:
    """Write all of a state dict into DCP's one file, and return the index."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(tree, is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    _report(stream, progress, tree)
    results = write_items(stream, file_of(0), plan, planner)
    return index_of(metadata, {each.index: each.storage_data for each in results})


def _write_safetensors(path: Path, contents: Contents, progress: Progress | None) -> None:
    """Write one file; tied tensors once, their other names in its metadata."""
    names: dict[Tensor, str] = {}
    tied: dict[str, str] = {}
    for name, value in contents.model.items():
        if isinstance(value, Tensor) and names.setdefault(value, name) != name:
            tied[name] = names[value]
    tensors = {name: tensor for tensor, name in names.items()}
    layout = plan({n: About(tuple(t.shape), t.dtype) for n, t in tensors.items()}, tied=tied)
    (header,) = layout.headers.values()
    with files.DurableFile(path) as stream:
        _report(stream, progress, tensors)
        stream.write(header)
        for name in sorted(tensors, key=lambda n: (layout.places[n].offset, tensors[n].nbytes)):
            if tensors[name].numel():
                values = values_of(tensors[name])
                stream.write(bytes_of(values))
