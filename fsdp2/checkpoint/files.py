"""Every file operation that writes, in one place, and what is found of files.

`DISK` makes, writes, syncs, renames and removes; nobody else in the room does. Tests put one in its
place that writes down what is done, so that a crash can be played after each operation.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from torch.distributed.checkpoint.filesystem import FileSystem

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

HASH = "sha256"
_CHUNK = 1 << 22  # bytes that are read at once


class Disk:
    """What is done to files."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> BinaryIO:
        return path.open("xb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)

    def start_writing(self, file: BinaryIO, start: int, length: int) -> None:
        """Let the system bring bytes to the disk while others are made; promises nothing."""
        file.flush()
        if hasattr(os, "posix_fadvise"):  # on Linux, what is dirty is written at once
            os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_DONTNEED)

    def sync(self, file: BinaryIO) -> None:
        """Return when all that was written is on the disk."""
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder are on the disk."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def open(self, path: Path) -> BinaryIO:
        """A file that is there, to write into it."""
        return path.open("r+b", buffering=0)

    def resize(self, file: BinaryIO, length: int) -> None:
        """Give a new file its length; what is not written reads as zeros."""
        os.ftruncate(file.fileno(), length)

    def write_at(self, file: BinaryIO, data: bytes | memoryview, offset: int) -> None:
        """Write at a place of a file; others may write elsewhere at the same time."""
        view = memoryview(data)
        while len(view):
            written = os.pwrite(file.fileno(), view, offset)
            view, offset = view[written:], offset + written

    def rename(self, path: Path, other: Path) -> None:
        os.rename(path, other)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


DISK = Disk()


class _HashedFile(io.RawIOBase):
    """A file that is hashed while it is written, and on the disk when it is closed."""

    def __init__(self, path: Path, hashing: ThreadPoolExecutor) -> None:
        self._file = DISK.create(path)
        self._hashing = hashing
        self._hash = hashlib.new(HASH)
        self._bytes = 0

    def write(self, data: object) -> int:
        piece = memoryview(data).cast("B")  # type: ignore[arg-type]  # anything with a buffer
        if len(piece) < _CHUNK:
            DISK.write(self._file, piece)
            self._hash.update(piece)
        else:  # both let go of the interpreter; the buffer is the caller's again afterwards
            hashed = self._hashing.submit(self._hash.update, piece)
            try:
                DISK.write(self._file, piece)
            finally:
                hashed.result()
            DISK.start_writing(self._file, self._bytes, len(piece))
        self._bytes += len(piece)
        return len(piece)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def close(self) -> None:
        if not self._file.closed:
            with self._file:
                DISK.sync(self._file)
        super().close()

    def facts(self) -> tuple[int, str]:
        """Bytes, and their hash."""
        return self._bytes, self._hash.hexdigest()


class DurableFiles(FileSystem):
    """What DCP's writer writes to.

    Attributes:
        written: by name, the bytes and the hash of each file.
    """

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with ThreadPoolExecutor(1) as hashing, _HashedFile(Path(path), hashing) as stream:
            yield stream
        self.written[Path(path).name] = stream.facts()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        DISK.rename(Path(path), Path(new_path))
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Nothing: the folder is there."""


def write_durably(path: Path, data: bytes) -> None:
    """Make a file, and return when its bytes are on the disk."""
    with DISK.create(path) as file:
        DISK.write(file, data)
        DISK.sync(file)


def read_at(file: BinaryIO, into: memoryview, offset: int) -> int:
    """Fill memory with a file's bytes from a place on; how many there were."""
    done = 0
    while done < len(into):
        read = os.preadv(file.fileno(), [into[done:]], offset + done)
        if not read:
            break
        done += read
    return done


def free_bytes(path: Path) -> int:
    """What the disk below a folder that is there takes of this user."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are not there, durably."""
    if path.is_dir():
        return
    make_folders(path.parent)
    make_folder(path)
    DISK.sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder, if another rank has not."""
    with suppress(FileExistsError):
        DISK.make_folder(path)


def remove_tree(path: Path) -> None:
    """Remove a folder and all below."""
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry)
        else:
            DISK.remove(entry)
    DISK.remove_folder(path)


def hash_of(path: Path) -> str:
    """The hash of a file's bytes."""
    found = hashlib.new(HASH)
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            found.update(piece)
    return found.hexdigest()


# ---- one job at a time


@contextmanager
def owned(path: Path, about: str) -> Iterator[None]:
    """Hold the file ``path`` while inside; it is gone afterwards.

    The system lets go of it when the process ends, however it does. Where the file system knows no
    locks, the file alone says that it is held.

    Args:
        path: the file.
        about: what is written into it, of who holds it.

    Raises:
        BlockingIOError: somebody else does; its text is what they wrote.
    """
    held = _hold(path)
    try:
        held.write(about.encode())
        held.flush()
        yield
    finally:
        with suppress(OSError):  # not there any more: the folder was removed
            os.unlink(path)
        held.close()


def _hold(path: Path) -> BinaryIO:
    while True:
        try:
            made, file = True, path.open("x+b")
        except FileExistsError:
            try:
                made, file = False, path.open("r+b")
            except FileNotFoundError:
                continue
        try:
            locked = _lock(file)
            if not locked and not made:
                raise BlockingIOError(file.read().decode(errors="replace"))
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate()  # what one that has died had written
                return file
        except FileNotFoundError:
            pass  # removed between the two by who held it: it is free
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(file: BinaryIO) -> bool:
    """Whether it is locked now; not where the file system knows no locks.

    Raises:
        BlockingIOError: somebody else has locked it; its text is what they wrote.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(file.read().decode(errors="replace")) from None
    except OSError:
        return False
    return True
