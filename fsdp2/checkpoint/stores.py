"""Where steps are kept: what a store does, and the one on a disk.

FOLDER/step-00000100/manifest.json   what the step consists of; a step is one that has it
FOLDER/step-00000100/.metadata       DCP's index
FOLDER/step-00000100/__0_0.distcp    what rank 0 wrote
FOLDER/.saving-step-00000200-TOKEN/  half-written: never read, removed on request
FOLDER/.removing-step-00000050/      half-removed: the same
FOLDER/.owner                        who saves into FOLDER just now

`remote` has the other store, which knows neither renames nor syncs.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from fsdp2.checkpoint import files
from fsdp2.core.config import CheckpointError

MANIFEST = "manifest.json"
OWNER = ".owner"
INDEX = ".metadata"
STEP = "step-"
_SAVING, _REMOVING = ".saving-", ".removing-"

PathLike = str | os.PathLike[str]

_URL = re.compile(r"[A-Za-z][\w+.:-]+:/")  # one slash: a `Path` keeps no more
_LOCAL = re.compile(r"(file|local):(//)?(?=/)|(file|local)://")


class AnyPath(Protocol):
    """A file or folder that is read: a `Path`, or what a store has in its place."""

    @property
    def name(self) -> str: ...
    @property
    def suffix(self) -> str: ...
    @property
    def parent(self) -> AnyPath: ...
    def __truediv__(self, name: str, /) -> AnyPath: ...
    def __fspath__(self) -> str: ...
    def is_file(self) -> bool: ...
    def glob(self, pattern: str, /) -> Iterable[AnyPath]: ...
    def open(self, mode: Literal["rb"]) -> BinaryIO: ...
    def read_bytes(self) -> bytes: ...


class Stream(Protocol):
    """A new file while it is written."""

    def write(self, data: object, /) -> int: ...
    def tell(self) -> int: ...


class Attempt(Protocol):
    """A step that is written, and not there yet.

    Attributes:
        folder: where DCP's files will be in the step's folder; "" if in itself.
        path: the same, as a path; DCP alone reads the step there when it is complete.
        written: by name, the facts of files that this rank has made.
    """

    folder: str
    path: AnyPath
    written: dict[str, files.Fact]

    def begin(self) -> None:
        """Make room for files."""

    def create(self, name: str) -> AbstractContextManager[Stream]:
        """A new file, which is durable when it is closed."""

    def commit(self, index: bytes, manifest: bytes) -> None:
        """Let the step be there: all of it is durable when this returns."""

    def clear(self, rank: int) -> None:
        """Remove what ``rank`` has left of it, as far as that works; nobody commits it."""

    def give_up(self, rank: int) -> None:
        """The same behind a failure, where rank 0 alone knows whether it was committed."""


class Store(Protocol):
    """A folder of steps; ``str`` of it is its name in messages."""

    def steps(self) -> list[int]:
        """The complete steps, oldest first; none where there is no folder."""

    def has(self, step: int) -> bool:
        """Whether a step is complete."""

    def unfinished(self) -> list[str]:
        """Names of what is half-done."""

    def folder(self, step: int) -> AnyPath:
        """Where a complete step is."""

    def lengths(self, step: int, names: Iterable[str]) -> dict[str, int]:
        """Bytes of those files of a step that are there."""

    def prepare(self) -> None:
        """Make the folder if it is not there.

        Raises:
            CheckpointError: it is a file.
        """

    def hold(self) -> AbstractContextManager[None]:
        """Let no other job save into it while inside, where the store knows how.

        Raises:
            CheckpointError: another one does.
        """

    def sweep(self, step: int, own: tuple[str, ...]) -> None:
        """Remove old tries of a step, but those of tokens ``own``, if nobody else can be at one."""

    def attempt(self, step: int, token: str) -> Attempt:
        """A step to write; all ranks pass the same token, which no other try has."""

    def remove_steps(self, doomed: list[int]) -> None:
        """Remove complete steps: each is gone at once, and then its files."""

    def remove_unfinished(self, names: list[str]) -> None:
        """Remove what `unfinished` has named."""


def is_url(path: PathLike) -> bool:
    """Whether it is of a store, as "s3://bucket/run"; "file://" is a disk's."""
    text = os.fspath(path)
    return bool(_URL.match(text)) and not _LOCAL.match(text) and not os.path.exists(text)


def local_path(path: PathLike) -> Path:
    """A path of this machine's file system.

    Raises:
        CheckpointError: it is a URL of a store.
    """
    if is_url(path):
        raise CheckpointError(
            f"'{path}' is on a store, where steps are saved and loaded, and weights are read by "
            f"load_pretrained() alone; name a path of a disk, and copy from there or to there"
        )
    return disk_path(path)


def disk_path(path: PathLike) -> Path:
    """The path of a "file://", or the path itself."""
    return Path(_LOCAL.sub("", os.fspath(path), count=1))


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"{STEP}{step:08d}"


def step_folder(folder: Path, step: int) -> Path:
    """Where a complete step is."""
    return folder / step_name(step)


def saving_folder(folder: Path, step: int, token: str = "") -> Path:
    """Where a step is written; ``token`` tells it from what another run has left there."""
    return folder / f"{_SAVING}{step_name(step)}{token and '-'}{token}"


class DiskStore:
    """A folder on a disk: files are synced, and one rename makes a step."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def steps(self) -> list[int]:
        found = []
        for path in self.root.glob(f"{STEP}*") if self.root.is_dir() else ():
            number = path.name.removeprefix(STEP)
            if number.isdecimal() and (path / MANIFEST).is_file():
                found.append(int(number))
        return sorted(found)

    def has(self, step: int) -> bool:
        return step in self.steps()

    def unfinished(self) -> list[str]:
        root = self.root
        found = [path.name for kind in (_SAVING, _REMOVING) for path in root.glob(f"{kind}*")]
        steps = (path for path in root.glob(f"{STEP}*") if path.is_dir())
        headless = (path for path in steps if not (path / MANIFEST).is_file())
        return sorted([*found, *(path.name for path in headless)])

    def folder(self, step: int) -> Path:
        return step_folder(self.root, step)

    def lengths(self, step: int, names: Iterable[str]) -> dict[str, int]:
        paths = ((name, self.folder(step) / name) for name in names)
        return {name: path.stat().st_size for name, path in paths if path.is_file()}

    def prepare(self) -> None:
        if self.root.exists() and not self.root.is_dir():
            raise CheckpointError(f"'{self.root}' is a file; pass a folder")
        files.make_folders(self.root)

    @contextmanager
    def hold(self) -> Iterator[None]:
        path = self.root / OWNER
        about = f"process {os.getpid()} on {socket.gethostname()}"
        with ExitStack() as held:
            try:
                held.enter_context(files.owned(path, about))
            except BlockingIOError as error:
                raise CheckpointError(
                    f"another job saves into '{self.root}' just now ({error}); pass a folder of "
                    f"its own, or, if that job is gone, remove '{path}'"
                ) from error
            yield

    def sweep(self, step: int, own: tuple[str, ...]) -> None:
        name, headless = saving_folder(self.root, step).name, self.folder(step)
        kin = [p for p in self.root.iterdir() if p.name == name or p.name.startswith(f"{name}-")]
        for left in [*kin, headless] if headless.exists() else kin:
            if not left.name.endswith(own):
                files.remove_tree(left)

    def attempt(self, step: int, token: str) -> DiskAttempt:
        return DiskAttempt(self, step, token)

    def remove_steps(self, doomed: list[int]) -> None:
        moved = []
        for step in doomed:
            path = self.folder(step)
            other = self.root / f"{_REMOVING}{path.name}"
            if other.exists():
                files.remove_tree(other)
            files.DISK.rename(path, other)
            moved.append(other)
        if moved:
            # Before a file goes: a step whose old name comes back after a crash must have all.
            files.DISK.sync_folder(self.root)
        for other in moved:
            files.remove_tree(other)

    def remove_unfinished(self, names: list[str]) -> None:
        for name in names:
            files.remove_tree(self.root / name)


class DiskAttempt:
    """Written beside, and renamed."""

    folder = ""

    def __init__(self, store: DiskStore, step: int, token: str) -> None:
        self._root = store.root
        self._saving = saving_folder(store.root, step, token)
        self._disk = files.DurableFiles()
        self.path: AnyPath = store.folder(step)
        self.written = self._disk.written

    def begin(self) -> None:
        files.make_folder(self._saving)

    def create(self, name: str) -> AbstractContextManager[files.DurableFile]:
        return self._disk.create(self._saving / name)

    def commit(self, index: bytes, manifest: bytes) -> None:
        """The index, the manifest, and the one rename."""
        files.write_durably({self._saving / INDEX: index, self._saving / MANIFEST: manifest})
        files.DISK.sync_folder(self._saving)
        files.DISK.rename(self._saving, self._root / self.path.name)
        files.DISK.sync_folder(self._root)

    def clear(self, rank: int) -> None:
        """Each rank its own files, and rank 0 all: ranks clear at their own pace."""
        prefix = f"__{rank}_"
        found: list[Path] = []
        with suppress(OSError):  # another rank has removed it
            found = list(self._saving.iterdir())
        for path in found:
            if rank == 0 or path.name.startswith(prefix):
                with suppress(OSError):
                    files.DISK.remove(path)
        with suppress(OSError):  # others have files in it: the last removes it
            files.DISK.remove_folder(self._saving)

    def give_up(self, rank: int) -> None:
        """The same: what was committed has another name."""
        self.clear(rank)


def items_folder(names: Mapping[str, object]) -> str:
    """Where DCP's files are in a step's folder, of the names of all of its files.

    Raises:
        ValueError: none is an index, or several are.
    """
    (index,) = (name for name in names if name.rpartition("/")[2] == INDEX)
    return index.rpartition("/")[0]
