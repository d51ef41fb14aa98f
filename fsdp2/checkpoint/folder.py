"""A folder of steps: which are complete, their contents, whether their bytes are unchanged.

`stores` and `remote` define the positions of files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from fsdp2.checkpoint import files
from fsdp2.checkpoint.files import HASH, BrokenError
from fsdp2.checkpoint.items import read_index
from fsdp2.checkpoint.remote import RemoteStore
from fsdp2.checkpoint.stores import (
    MANIFEST,
    AnyPath,
    DiskStore,
    PathLike,
    Store,
    hash_of,
    is_inside,
    is_url,
    items_folder,
    local_path,
    step_name,
)
from fsdp2.core.errors import CheckpointError, checkpoint_error

LOG = logging.getLogger("fsdp2.checkpoint")

FORMAT = 1

Progress = Callable[[int, int], object]
"""Called with bytes done and total bytes."""

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True)
class Manifest:
    """The contents of a step."""

    step: int
    ranks: int
    files: Mapping[str, tuple[int, str]]  # bytes and checksum of every file but this one
    extra: Json  # a tensor in it is {"tensor": position}
    has_optimizer: bool
    torch: str
    metric: float | None = None
    hash: str = HASH  # of the checksums
    digest: str = ""  # SHA-256 of all other fields
    format: int = FORMAT

    def encoded(self) -> bytes:
        """The bytes of the manifest's file, the digest set."""
        whole = replace(self, digest=self._digest())
        return (json.dumps(whole._content(), indent=1) + "\n").encode()

    def _digest(self) -> str:
        text = json.dumps(replace(self, digest="")._content(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _content(self) -> dict[str, Json]:
        """Without what is younger than the format and not given: such steps read as before."""
        content = asdict(self)
        return {key: content[key] for key in content if key != "metric" or content[key] is not None}

    @property
    def is_whole(self) -> bool:
        """Whether it is unchanged since it was written."""
        return self.digest == self._digest()


def store_of(path: PathLike) -> Store:
    """The store of a folder's steps: on a disk, or at a URL."""
    return RemoteStore(os.fspath(path)) if is_url(path) else DiskStore(local_path(path))


def steps(folder: PathLike) -> list[int]:
    """Return the complete steps of a folder, oldest first; an empty list if there is no folder.

    It does not contain steps that a branch has replaced: see `replaced`.

    Example::

        >>> fsdp2.checkpoint.steps("run")
        [100, 200]
    """
    return store_of(folder).steps()


def replaced(folder: PathLike) -> dict[int, str]:
    """Return the complete steps that a branch has replaced, and the reason.

    After ``load(step=200)``, the next save of that model replaces all steps after 200: it is then
    the newest. A replaced step is loaded only by its number, is the first that ``keep`` removes,
    and is overwritten by a save with its number.

    Example::

        >>> fsdp2.checkpoint.replaced("run")
        {300: 'by step 230, which continues from step 200'}
    """
    return store_of(folder).replaced()


def unfinished(folder: PathLike) -> list[str]:
    """Return the names of incomplete saves and removals; `remove` removes them.

    Do not call `remove` for them while a save into the folder runs.
    """
    return store_of(folder).unfinished()


def read_manifest(store: Store, step: int | None) -> Manifest:
    """The manifest of a complete step; without ``step``, of the newest."""
    known = store.steps()
    there = step is not None and store.has(step)  # also one that a branch has replaced
    if not known and not there:
        raise checkpoint_error(
            "ckpt-none", f"'{store}' has no complete step; pass the folder that save() was given"
        )
    if step is not None and not there:
        raise checkpoint_error(
            "ckpt-unknown-step", f"'{store}' has no complete step {step}; load one of {known}"
        )
    number = known[-1] if step is None else step
    path = store.folder(number) / MANIFEST
    try:
        content = json.loads(path.read_bytes().decode())
        version, kind = content["format"], content.get("hash", HASH)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise checkpoint_error(
            "ckpt-no-manifest",
            f"'{path}' is not the manifest of a step; load another step, or use a copy of the "
            f"folder",
        ) from error
    if version != FORMAT or kind != HASH:
        about = version if kind == HASH else f"{version} with {kind}"
        raise checkpoint_error(
            "ckpt-format",
            f"'{path}' has format {about}, but this version of fsdp2 reads format {FORMAT}; load "
            f"it with the version that wrote it",
        )
    try:
        manifest = Manifest(**content)
        items_folder(manifest.files)
        _check_types(manifest)
        whole = manifest.is_whole and step_name(manifest.step) == store.folder(number).name
    except (TypeError, ValueError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise checkpoint_error(
            "ckpt-manifest-changed",
            f"'{path}' has changed since save() wrote it; load another step, or use a copy of the "
            f"folder",
        )
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Raise unless all is of its type and files are below the step's folder."""
    numbers = [manifest.step, manifest.ranks]
    for name, (length, checksum) in manifest.files.items():
        if not is_inside(name) or not isinstance(checksum, str):
            raise BrokenError()
        numbers.append(length)
    if any(type(each) is not int or each < 0 for each in numbers):
        raise BrokenError()
    if not isinstance(manifest.has_optimizer, bool) or not isinstance(manifest.torch, str):
        raise BrokenError()
    if type(manifest.metric) not in (float, int, type(None)):
        raise BrokenError()


@contextmanager
def broken_values(place: AnyPath) -> Iterator[None]:
    """Say in a sentence whatever is raised where values of a checkpoint are read."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # files may be broken in any way
        raise checkpoint_error(
            "ckpt-value-broken",
            f"'{os.fspath(place)}' holds a value that save() never writes "
            f"({type(error).__name__}); load another step, or copy its files again",
        ) from error


def items_of(store: Store, manifest: Manifest) -> AnyPath:
    """The folder of DCP's files in a complete step."""
    inside = items_folder(manifest.files)
    place = store.folder(manifest.step)
    return place / inside if inside else place


def check_files(store: Store, manifest: Manifest) -> None:
    """Raise unless every file of a step is there and of its length."""
    place, there = store.folder(manifest.step), store.lengths(manifest.step, manifest.files)
    for name, (length, _) in manifest.files.items():
        path = place / name
        if name not in there:
            raise checkpoint_error(
                "ckpt-file-missing",
                f"'{path}' is missing; load another step, or copy all files of this one",
            )
        if there[name] != length:
            raise checkpoint_error(
                "ckpt-file-short",
                f"'{path}' has only {there[name]} of {length} bytes; load another step, or copy "
                f"the file again",
            )


def check_hashes(store: Store, manifest: Manifest, names: Iterable[str]) -> None:
    """Read every byte of some files of a step, and raise unless it is what was saved."""
    for name in names:
        path = store.folder(manifest.step) / name
        if hash_of(path) != manifest.files[name][1]:
            raise checkpoint_error(
                "ckpt-file-changed",
                f"'{path}' has changed since it was saved; load another step, or copy the file "
                f"again",
            )


def newest_readable(store: Store, verify: bool) -> Manifest:
    """The manifest of the newest step whose files exist, with a complete index."""
    known = store.steps()
    for step in reversed(known):
        try:
            manifest = read_manifest(store, step)
            check_files(store, manifest)
            if verify:
                check_hashes(store, manifest, manifest.files)
            read_index(items_of(store, manifest))
        except (CheckpointError, OSError) as error:
            LOG.warning("step %d of '%s' cannot be read (%s); an older one is", step, store, error)
        else:
            return manifest
    raise checkpoint_error(
        "ckpt-none-readable",
        f"'{store}' has the complete steps {known}, but none of them can be read; pass the folder "
        f"that save() was given, or a copy of it",
    )


def verify(
    folder: PathLike, step: int | None = None, *, progress: Progress | None = None
) -> list[str]:
    """Read every byte of a step, and return the files that differ from what was saved.

    Local: call it on one rank, or without a job.

    Args:
        folder: as for `save`.
        step: the step. Default ``None``: all complete ones.
        progress: called with bytes read and total bytes. Default ``None``.

    Returns:
        One line for each file that is missing, truncated or changed, which begins with its path;
        empty if all files are unchanged.

    Raises:
        CheckpointError: there is no such step.

    Example::

        >>> fsdp2.checkpoint.verify("run")
        ['run/step-00000100/__1_0.distcp: its bytes have changed']
    """
    store = store_of(folder)
    wrong, manifests = [], []
    for each in store.steps() if step is None else [step]:
        try:
            manifests.append(read_manifest(store, each))
        except CheckpointError as error:
            if each not in store.steps():
                raise
            wrong.append(f"{store.folder(each) / MANIFEST}: {error}")
    total, done = sum(length for m in manifests for length, _ in m.files.values()), 0
    for manifest in manifests:
        there = store.lengths(manifest.step, manifest.files)
        for name, fact in manifest.files.items():
            path = store.folder(manifest.step) / name

            def read(count: int, before: int = done) -> None:
                if progress is not None:
                    progress(min(before + count, total), total)

            about = _changed(path, there.get(name), fact, read)
            if about is not None:
                wrong.append(f"{path}: {about}")
            done += fact[0]
    return wrong


def _changed(
    path: AnyPath, found: int | None, fact: files.Fact, read: Callable[[int], None]
) -> str | None:
    """How a file, of which ``found`` bytes are there, differs from what was saved."""
    length, checksum = fact
    if found is None:
        return "it is missing"
    if found != length:
        return f"it has {found} bytes of {length}"
    return None if hash_of(path, read) == checksum else "its bytes have changed"


def remove(folder: PathLike, step: int | None = None) -> list[str]:
    """Remove a complete step, or all incomplete data.

    Local: call it on one rank, while no job saves into the folder.

    Args:
        folder: as for `save`.
        step: the step to remove. Default ``None``: everything that `unfinished` returns, and no
            step.

    Returns:
        Names of the removed folders.

    Raises:
        CheckpointError: there is no such step.
    """
    store = store_of(folder)
    if step is None:
        names = store.unfinished()
        store.remove_unfinished(names)
        return names
    if not store.has(step):
        known = store.steps()
        raise checkpoint_error(
            "ckpt-remove", f"'{store}' has no complete step {step}; pass one of {known}"
        )
    store.remove_steps([step])
    return [step_name(step)]
