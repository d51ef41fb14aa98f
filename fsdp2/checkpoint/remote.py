"""Steps on a store that `fsspec` reaches: S3, Google's, Azure's, or any other URL.

URL/step-00000100/TOKEN/__0_0.distcp   rank 0's file of the attempt TOKEN
URL/step-00000100/TOKEN/.metadata      DCP's index: DCP can read the step from this folder
URL/step-00000100/manifest.json        written last, as one object: a step is one that has it

Stores have neither renames nor syncs, but show an object completely or not at all, and keep it.
Attempts of two jobs, or after a failure, share only the manifest's name; the manifest lists the
files of the step. A removal deletes the manifest first. A store cannot be locked, so a save removes
nothing that another job may be writing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from fsdp2.checkpoint import files
from fsdp2.checkpoint.stores import (
    INDEX,
    MANIFEST,
    STEP,
    AnyPath,
    Attempt,
    Failures,
    Store,
    mark_of,
    step_name,
)
from fsdp2.core.errors import checkpoint_error

_PART = 1 << 26  # bytes that an upload sends at once, and holds: S3 takes 10,000 parts of an object


FileSystem = Any
"""An ``fsspec.AbstractFileSystem``."""


def reach(url: str) -> tuple[FileSystem, str]:
    """The file system of a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise checkpoint_error(
            "ckpt-no-fsspec",
            f"'{url}' is on an object store, which fsdp2 reaches through the package fsspec; pip "
            f"install fsspec and the package for that store",
        ) from error
    try:
        found, path = url_to_fs(url)
    except Exception as error:  # of each store's own classes
        raise checkpoint_error(
            "ckpt-not-reached",
            f"'{url}' cannot be reached ({type(error).__name__}: {error}); install the package "
            f"for that store, or correct the URL",
        ) from error
    return found, str(path)


@dataclass(frozen=True)
class RemotePath:
    """A file or folder of a store; ``str`` and ``os.fspath`` give its URL."""

    fs: FileSystem
    path: str
    url: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.fs, self.path.rpartition("/")[0], self.url.rpartition("/")[0])

    def __truediv__(self, name: str) -> RemotePath:
        if not name:
            return self
        return RemotePath(self.fs, f"{self.path}/{name}", f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    def is_file(self) -> bool:
        return self.fs.isfile(self.path)

    def inside(self) -> dict[str, bool]:
        """Names in the folder, and which of them are folders."""
        self.fs.invalidate_cache()
        try:
            listed = self.fs.ls(self.path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = ((str(each["name"]).rstrip("/"), each["type"] == "directory") for each in listed)
        return {
            each.rpartition("/")[2]: is_folder for each, is_folder in found if each != self.path
        }

    def open(self, mode: str = "rb") -> BinaryIO:
        return self.fs.open(self.path, mode)

    def read_bytes(self) -> bytes:
        return self.fs.cat_file(self.path)


def remote_path(url: str) -> RemotePath:
    """The path of a URL; `reach` describes its errors."""
    scheme, _, rest = url.partition(":/")  # a `Path` has one slash of the two
    url = f"{scheme}://{rest.lstrip('/')}".rstrip("/")
    fs, path = reach(url)
    return RemotePath(fs, path.rstrip("/"), url)


class RemoteStore(Store):
    """A folder of steps on a store."""

    def __init__(self, url: str) -> None:
        self.root: RemotePath = remote_path(url)
        self.fs = self.root.fs

    def names(self) -> dict[str, bool]:
        return self.root.inside()

    def has(self, step: int) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists((self.root / step_name(step) / MANIFEST).path))

    def unfinished(self) -> list[str]:
        found = []
        for name, is_folder in self.root.inside().items():
            if not is_folder or not name.startswith(STEP):
                continue
            inside = (self.root / name).inside()
            if MANIFEST not in inside:
                found.append(name)
            else:
                used = self.used(name)
                found += [
                    f"{name}/{each}"
                    for each, is_folder in inside.items()
                    if is_folder and used is not None and each not in used
                ]
        # A store that has real folders may keep them when they are empty.
        return sorted(name for name in found if self.fs.find((self.root / name).path, detail=False))

    def lengths(self, step: int, names: Iterable[str]) -> dict[str, int]:
        """In one listing: each of many ranks asks for the files of all."""
        self.fs.invalidate_cache()
        begin = f"{(self.root / step_name(step)).path}/"
        there = self.fs.find(begin, detail=True)
        return {name: int(there[begin + name]["size"]) for name in names if begin + name in there}

    def used(self, name: str) -> set[str] | None:
        """First parts of the names that a step's manifest has; ``None``: it tells nothing."""
        try:
            content = json.loads((self.root / name / MANIFEST).read_bytes())
            return {file.partition("/")[0] for file in content["files"]}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def attempt(self, step: int, token: str) -> RemoteAttempt:
        return RemoteAttempt(self, step, token)

    def replace(self, why: Mapping[int, str]) -> None:
        for step, text in why.items():
            self.fs.pipe_file((self.root / mark_of(step)).path, text.encode())

    def reinstate(self, steps: Iterable[int]) -> None:
        for step in steps:
            self.fs.invalidate_cache()
            mark = self.root / mark_of(step)
            if mark.is_file():
                self.fs.rm_file(mark.path)

    def remove_steps(self, doomed: list[int]) -> None:
        with Failures() as failures:
            for step in doomed:
                with failures.noted():
                    self.fs.rm_file((self.root / step_name(step) / MANIFEST).path)
                    self.remove_unfinished([step_name(step)])
                    self.reinstate([step])

    def _remove(self, name: str) -> None:
        self.fs.invalidate_cache()
        with suppress(FileNotFoundError):  # the manifest was all
            self.fs.rm((self.root / name).path, recursive=True)


class RemoteAttempt(Attempt):
    """Put under a name of its own; the manifest says that it is the step."""

    def __init__(self, store: RemoteStore, step: int, token: str) -> None:
        self._fs = store.fs
        self._store, self._step = store, step
        self._decided = False  # whether the manifest may be there
        self._manifest = store.root / step_name(step) / MANIFEST
        self._own = store.root / step_name(step) / token
        self.folder = token
        self.path: AnyPath = self._own
        self.written: dict[str, files.Fact] = {}

    def begin(self) -> None:
        self._fs.makedirs(self._own.path, exist_ok=True)  # stores without folders do nothing

    @contextmanager
    def create(self, name: str) -> Iterator[files.Summed]:
        path = (self._own / name).path
        with self._fs.open(path, "wb", block_size=_PART) as file:
            upload = files.Summed(file)
            yield upload
        self.written[name] = upload.facts()

    def commit(self, index: bytes, manifest: bytes) -> None:
        """The index, and the manifest in one piece."""
        fs = self._fs
        fs.pipe_file((self._own / INDEX).path, index)
        before: list[str] = []
        if self._store.has(self._step):  # replaced: its mark goes when it is no step any more
            name = step_name(self._step)
            before = [f"{name}/{each}" for each in self._store.used(name) or () if each]
            fs.rm_file(self._manifest.path)
        self._store.reinstate([self._step])
        self._decided = True
        try:
            fs.pipe_file(self._manifest.path, manifest)
        except BaseException:
            # It may be there all the same, or come yet: its files stay, so that it is whole then.
            with suppress(Exception):
                fs.rm_file(self._manifest.path)
            raise
        with suppress(Exception):  # `unfinished` has them
            self._store.remove_unfinished(before)

    def clear(self, rank: int) -> None:
        """Each rank its own files."""
        fs = self._fs
        with suppress(Exception):  # of each store's own classes
            fs.invalidate_cache()
            for path in fs.find(self._own.path, detail=False):
                if path.rpartition("/")[2].startswith(f"__{rank}_"):
                    fs.rm_file(path)

    def give_up(self, rank: int) -> None:
        """By rank 0, all files, if the manifest was not put; what is left is `unfinished`."""
        if rank == 0 and not self._decided:
            with suppress(Exception):
                self._fs.invalidate_cache()
                self._fs.rm(self._own.path, recursive=True)
