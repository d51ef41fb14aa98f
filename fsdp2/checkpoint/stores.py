"""The storage of steps: the operations of a store, and the store on a disk.

FOLDER/step-00000100/manifest.json   the contents of the step; a step is one that has it
FOLDER/step-00000100/.metadata       DCP's index
FOLDER/step-00000100/__0_0.distcp    rank 0's file
FOLDER/.saving-step-00000200-TOKEN/  incomplete: never read, removed on request
FOLDER/.removing-step-00000050/      partly removed: the same
FOLDER/.replaced-step-00000300       why step 300 is not loaded by default: see `retention`
FOLDER/.owner                        the job that saves into FOLDER now

`remote` has the other store, which has neither renames nor syncs.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import BinaryIO, Literal, Protocol

from fsdp2.checkpoint import files, owning
from fsdp2.core.errors import checkpoint_error

MANIFEST = "manifest.json"
OWNER = ".owner"
INDEX = ".metadata"
STEP = "step-"
REPLACED = ".replaced-"
_SAVING, _REMOVING = ".saving-", ".removing-"

PathLike = str | os.PathLike[str]

_URL = re.compile(r"[A-Za-z][\w+.:-]+:/")  # one slash: a `Path` keeps no more
_LOCAL = re.compile(r"(file|local):(//)?(?=/)|(file|local)://")


class AnyPath(Protocol):
    """A file or folder that is read: a `Path`, or what a store has in its place."""

    @property
    def name(self) -> str: ...
    @property
    def parent(self) -> AnyPath: ...
    def __truediv__(self, name: str, /) -> AnyPath: ...
    def __fspath__(self) -> str: ...
    def is_file(self) -> bool: ...
    def open(self, mode: Literal["rb"]) -> BinaryIO: ...
    def read_bytes(self) -> bytes: ...


def hash_of(path: AnyPath, read: Callable[[int], None] | None = None) -> str:
    """The checksum of a file's bytes; ``read`` is told how many of them were read."""
    found, done = 0, 0
    with path.open("rb") as file:
        while piece := file.read(files.CHUNK):
            found = zlib.crc32(piece, found)
            done += len(piece)
            if read is not None:
                read(done)
    return f"{found:08x}"


class Attempt(ABC):
    """A step that is being written, and does not exist yet."""

    folder = ""  # of DCP's files, in the step's folder; "" for itself
    path: AnyPath  # the same; DCP can read the step there when it is complete
    written: dict[str, files.Fact]  # of the files that this rank has created

    @abstractmethod
    def begin(self) -> None:
        """Make room for files."""

    @abstractmethod
    def create(self, name: str) -> AbstractContextManager[files.Summed]:
        """A new file, which is durable when it is closed."""

    @abstractmethod
    def commit(self, index: bytes, manifest: bytes) -> None:
        """Let the step be there, in the place of one that is replaced; durable on return."""

    @abstractmethod
    def clear(self, rank: int) -> None:
        """Remove the files of ``rank``, as far as possible; the attempt will not be committed."""

    def give_up(self, rank: int) -> None:
        """The same after a failure, when only rank 0 knows whether it was committed."""
        self.clear(rank)


class Store(ABC):
    """A folder of steps; ``str`` of it is its name in messages."""

    root: AnyPath

    def __str__(self) -> str:
        return str(self.root)

    @abstractmethod
    def names(self) -> Collection[str]:
        """Names of all that is in the folder; none without a folder."""

    def steps(self) -> list[int]:
        """The complete steps that no branch has replaced, oldest first; none without a folder."""
        names = self.names()
        found = (number_of(name) for name in names if f"{REPLACED}{name}" not in names)
        return sorted(step for step in found if step is not None and self.has(step))

    @abstractmethod
    def has(self, step: int) -> bool:
        """Whether a step is complete, replaced or not."""

    def require_free(self, step: int, but: Iterable[int] = ()) -> None:
        """Raise if a step is there, except those that a save overwrites."""
        if self.has(step) and step not in but:
            raise checkpoint_error(
                "ckpt-step-there",
                f"'{self}' already has step {step}; save another step, or call "
                f"fsdp2.checkpoint.remove(folder, {step}) first",
            )

    def replaced(self) -> dict[int, str]:
        """The complete steps that a branch has replaced, and the words that it left for each."""
        marks = sorted(name for name in self.names() if name.startswith(REPLACED))
        numbers = ((number_of(name.removeprefix(REPLACED)), name) for name in marks)
        return {
            step: (self.root / name).read_bytes().decode(errors="replace")
            for step, name in numbers
            if step is not None and self.has(step)
        }

    @abstractmethod
    def replace(self, why: Mapping[int, str]) -> None:
        """Let steps be replaced, durably; they stay, and `steps` does not have them."""

    @abstractmethod
    def reinstate(self, steps: Iterable[int]) -> None:
        """Take `replace` back."""

    def half_removed(self) -> list[str]:
        """Names of what removals have left here, where it is told from what is being written."""
        return []

    @abstractmethod
    def unfinished(self) -> list[str]:
        """Names of what is half-done."""

    def folder(self, step: int) -> AnyPath:
        """The folder of a complete step."""
        return self.root / step_name(step)

    @abstractmethod
    def lengths(self, step: int, names: Iterable[str]) -> dict[str, int]:
        """Bytes of those files of a step that are there."""

    def prepare(self) -> None:
        """Make the folder if it is not there."""
        if self.root.is_file():
            raise checkpoint_error("ckpt-is-file", f"'{self}' is a file; pass a folder")

    def hold(self) -> AbstractContextManager[Callable[[], bool]]:
        """Let no other job save into it, where the store knows how; yields whether it does."""
        return nullcontext(lambda: True)

    def sweep(self, step: int, own: tuple[str, ...]) -> None:  # noqa: B027  # nothing, on a store
        """Remove old attempts at a step but of tokens ``own``, if no other job can be at one."""

    @abstractmethod
    def attempt(self, step: int, token: str) -> Attempt:
        """A step to write; all ranks pass the same token, which no other try has."""

    @abstractmethod
    def remove_steps(self, doomed: list[int]) -> None:
        """Remove complete steps, of links only the link; raise the first error at the end."""

    def remove_unfinished(self, names: list[str]) -> None:
        """Remove what `unfinished` has named."""
        with Failures() as failures:
            for name in names:
                with failures.noted():
                    self._remove(name)

    @abstractmethod
    def _remove(self, name: str) -> None:
        """Remove a folder, if it is there, with all that is in it."""


def is_url(path: PathLike) -> bool:
    """Whether it is of a store, as "s3://bucket/run"; "file://" is a disk's."""
    text = os.fspath(path)
    return bool(_URL.match(text)) and not _LOCAL.match(text) and not os.path.exists(text)


def local_path(path: PathLike) -> Path:
    """A path of this machine's file system."""
    if is_url(path):
        raise checkpoint_error(
            "ckpt-not-local",
            f"'{path}' is on an object store, which supports only saving and "
            f"loading steps; pass a path on a disk, and copy the files",
        )
    return disk_path(path)


def disk_path(path: PathLike) -> Path:
    """The path of a "file://", or the path itself."""
    return Path(_LOCAL.sub("", os.fspath(path), count=1))


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"{STEP}{step:08d}"


def saving_folder(folder: Path, step: int, token: str = "") -> Path:
    """The folder in which a step is written; ``token`` distinguishes it from other attempts."""
    return folder / f"{_SAVING}{step_name(step)}{token and '-'}{token}"


def mark_of(step: int) -> str:
    """The name of the file that says why a step is replaced."""
    return f"{REPLACED}{step_name(step)}"


def number_of(name: str) -> int | None:
    """The step whose folder has this very name; ``None``: no step's has."""
    digits = name.removeprefix(STEP)
    number = int(digits) if digits.isascii() and digits.isdecimal() else None
    return number if number is not None and step_name(number) == name else None


class Failures:
    """Continues after a failure, and raises the first one at the end."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Continue after any exception inside, including a store's own classes."""
        try:
            yield
        except Exception as error:
            self._first = self._first or error

    def __enter__(self) -> Failures:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._first is not None:
            raise self._first


class DiskStore(Store):
    """A folder on a disk: files are synced, and one rename makes a step."""

    def __init__(self, root: Path) -> None:
        self.root: Path = root

    def names(self) -> set[str]:
        return {path.name for path in self.root.iterdir()} if self.root.is_dir() else set()

    def has(self, step: int) -> bool:
        return (self.root / step_name(step) / MANIFEST).is_file()

    def replace(self, why: Mapping[int, str]) -> None:
        if why:
            files.write_durably(
                {self.root / mark_of(step): text.encode() for step, text in why.items()}
            )
            files.DISK.sync_folder(self.root)

    def reinstate(self, steps: Iterable[int]) -> None:
        for step in steps:
            files.discard(self.root / mark_of(step))

    def half_removed(self) -> list[str]:
        return sorted(name for name in self.names() if name.startswith(_REMOVING))

    def unfinished(self) -> list[str]:
        return sorted(
            name
            for name in self.names()
            if name.startswith((_SAVING, _REMOVING))
            or (
                (name.startswith(STEP) and (path := self.root / name).is_dir())
                and not (path / MANIFEST).is_file()
            )
        )

    def lengths(self, step: int, names: Iterable[str]) -> dict[str, int]:
        paths = ((name, self.root / step_name(step) / name) for name in names)
        return {name: path.stat().st_size for name, path in paths if path.is_file()}

    def prepare(self) -> None:
        super().prepare()
        files.make_folders(self.root)

    @contextmanager
    def hold(self) -> Iterator[Callable[[], bool]]:
        path = self.root / OWNER
        about = f"process {os.getpid()} on {socket.gethostname()}"
        with ExitStack() as held:
            try:
                is_ours = held.enter_context(owning.owned(path, about))
            except BlockingIOError as error:
                raise checkpoint_error(
                    "ckpt-other-job",
                    f"another job is saving into '{self.root}' ({error}); pass another folder, "
                    f"or, if that job is gone, remove '{path}'",
                ) from error
            yield is_ours

    def sweep(self, step: int, own: tuple[str, ...]) -> None:
        name = saving_folder(self.root, step).name
        kin = [p for p in self.root.iterdir() if p.name == name or p.name.startswith(f"{name}-")]
        for left in kin if self.has(step) else [*kin, self.root / step_name(step)]:
            if not left.name.endswith(own):
                files.discard(left)

    def attempt(self, step: int, token: str) -> DiskAttempt:
        return DiskAttempt(self, step, token)

    def remove_steps(self, doomed: list[int]) -> None:
        moved = {}
        with Failures() as failures:
            for step in doomed:
                with failures.noted():
                    moved[step] = self.move_away(step)
            if moved:
                # Before a file goes: a step whose old name comes back after a crash must have all.
                files.DISK.sync_folder(self.root)
            for step, other in moved.items():
                with failures.noted():
                    files.remove_tree(other)
                    self.reinstate([step])

    def move_away(self, step: int) -> Path:
        """Let a step be half-removed, under a name that nothing else has; not durable yet."""
        path = self.root / step_name(step)
        names, number = {each.name for each in self.root.iterdir()}, 0
        other = f"{_REMOVING}{path.name}"
        while other in names:  # what another removal has left
            number += 1
            other = f"{_REMOVING}{path.name}-{number}"
        files.DISK.rename(path, self.root / other)
        return self.root / other

    def _remove(self, name: str) -> None:
        files.remove_tree(self.root / name)


class DiskAttempt(Attempt):
    """Written to a temporary folder, and renamed."""

    def __init__(self, store: DiskStore, step: int, token: str) -> None:
        self._store, self._step = store, step
        self._saving = saving_folder(store.root, step, token)
        self.path: AnyPath = store.folder(step)
        self.written = {}

    def begin(self) -> None:
        files.make_folder(self._saving)

    @contextmanager
    def create(self, name: str) -> Iterator[files.DurableFile]:
        with files.DurableFile(self._saving / name) as stream:
            yield stream
        self.written[name] = stream.facts()

    def commit(self, index: bytes, manifest: bytes) -> None:
        """The index, the manifest, and the one rename; taken back if it cannot be durable."""
        files.write_durably({self._saving / INDEX: index, self._saving / MANIFEST: manifest})
        files.DISK.sync_folder(self._saving)
        before = self._displaced()
        place = self._store.root / self.path.name
        files.DISK.rename(self._saving, place)
        try:
            files.DISK.sync_folder(self._store.root)
        except BaseException:
            with suppress(OSError):  # else `save` would say that it failed, and the step be there
                files.DISK.rename(place, self._saving)
            raise
        if before is not None:
            with suppress(OSError):  # `half_removed` has it
                files.remove_tree(before)

    def _displaced(self) -> Path | None:
        """Move a replaced step of this number away, and then take its mark, durably in this order.

        Else a crash between the two could leave the old step there as if nothing had replaced it.
        """
        before = None
        if os.path.lexists(self._store.folder(self._step)):
            before = self._store.move_away(self._step)
            files.DISK.sync_folder(self._store.root)
        self._store.reinstate([self._step])
        return before

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


@functools.cache  # an index names few files, for many tensors
def is_inside(name: str) -> bool:
    """Whether it names a file below a folder, in whatever system's way of writing."""
    paths = PurePosixPath(name), PureWindowsPath(name)
    named = bool(name) and "\0" not in name and bool(paths[0].parts)
    return named and not any(".." in path.parts or path.anchor for path in paths)


def items_folder(names: Mapping[str, object]) -> str:
    """The folder of DCP's files in a step's folder, from the names of all of its files."""
    (index,) = (name for name in names if name.rpartition("/")[2] == INDEX)
    return index.rpartition("/")[0]
