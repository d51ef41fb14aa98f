"""Every file operation that writes, in one module, and facts about files.

`DISK` creates, writes, syncs, renames and removes; no other code in the room does. Tests replace it
by one that records operations, so that they can replay a crash after each.
"""

from __future__ import annotations

import ctypes
import errno
import io
import logging
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

LOG = logging.getLogger("fsdp2.checkpoint")

HASH = "crc32"
"""The type of checksum, as named in the manifest: CRC-32, as in gzip and zip files.

It differs for every flipped bit and for all damage within 32 consecutive bits; it misses one in
2**32 of other damage. It does not protect against deliberate changes, and neither would any hash
that is stored next to the data. It costs a seventh of SHA-256.
"""

CHUNK = 1 << 22  # bytes that are read at once
_BESIDE = 1 << 20  # bytes from which a checksum is computed beside the write


def _range_syncer() -> Any:
    """Linux's ``sync_file_range``, which Python's ``os`` does not have; else ``None``."""
    found = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


_sync_file_range = _range_syncer()
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE


_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""Error codes of file systems that cannot sync a folder, as some of FUSE, SMB and of virtual
machines.
"""


_unsynced: set[int] = set()
"""Devices whose users have been warned."""


def _warn_of_names(path: Path, error: OSError) -> None:
    """Once for each file system: what is not promised there."""
    device = os.stat(path).st_dev
    if device in _unsynced:
        return
    _unsynced.add(device)
    LOG.warning(
        "'%s' is on a file system that cannot sync a folder (%s): bytes of files are durable when "
        "a save returns, their names may not be; a crash of the machine, not of the job, may take "
        "the newest step back, after keep= has removed older ones",
        *(path, os.strerror(error.errno or 0)),
    )


class BrokenError(ValueError):
    """The contents of a file are invalid."""


class Disk:
    """The file operations."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> BinaryIO:
        return path.open("xb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)

    def start_writing(self, file: BinaryIO, start: int, length: int) -> None:
        """Let the system bring bytes to the disk while others are made; promises nothing."""
        if _sync_file_range is not None:
            _sync_file_range(file.fileno(), start, length, _START_WRITING)

    def sync(self, file: BinaryIO) -> None:
        """Return when all that was written is on the disk."""
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder are on the disk, where its file system can do that."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
            _warn_of_names(path, error)
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


Fact = tuple[int, str]
"""A file's number of bytes and checksum."""


class Summed(io.RawIOBase):
    """A new file, whose checksum is computed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.told: Callable[[int], object] | None = None  # of the bytes written
        self._file = file
        self._checksum = 0
        self._bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def write(self, data: object) -> int:
        piece = memoryview(data).cast("B")  # type: ignore[arg-type]  # anything with a buffer
        self._put(piece)
        self._bytes += len(piece)
        if self.told is not None:
            self.told(self._bytes)
        return len(piece)

    def _put(self, piece: memoryview) -> None:
        self._file.write(piece)
        self._add(piece)

    def _add(self, piece: memoryview) -> None:
        self._checksum = zlib.crc32(piece, self._checksum)

    def facts(self) -> Fact:
        return self._bytes, f"{self._checksum:08x}"


class DurableFile(Summed):
    """One on the disk, which is durable when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(DISK.create(path))
        self._pool: ThreadPoolExecutor | None = None

    def _put(self, piece: memoryview) -> None:
        is_large = len(piece) >= _BESIDE
        checked = self._start(self._add, piece) if is_large else None
        try:
            DISK.write(self._file, piece)
        finally:
            if checked is None:
                self._add(piece)
            else:  # both let go of the interpreter; the buffer is the caller's again afterwards
                checked.result()
        if is_large:
            self._file.flush()
            self._start(DISK.start_writing, self._file, self._bytes, len(piece))

    def _start(self, action: Callable[..., None], *args: object) -> Future[None] | None:
        """Run it in another thread; ``None`` where there can be none."""
        if self._pool is None:  # of two: the disk may keep one waiting
            self._pool = ThreadPoolExecutor(2, "fsdp2 writes")
        try:
            return self._pool.submit(action, *args)
        except RuntimeError:  # the process ends once this save is over, or has too many
            return None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        if not self._file.closed:
            with self._file:
                DISK.sync(self._file)
        super().close()


def fact_of(data: bytes) -> Fact:
    """The fact of a file with these bytes."""
    return len(data), f"{zlib.crc32(data):08x}"


def write_durably(contents: Mapping[Path, bytes]) -> None:
    """Make files, durably: all are on their way before the first is waited for."""
    with ExitStack() as opened:
        made = []
        for path, data in contents.items():
            file = opened.enter_context(DISK.create(path))
            DISK.write(file, data)
            file.flush()
            DISK.start_writing(file, 0, len(data))
            made.append(file)
        for file in made:
            DISK.sync(file)


def read_at(file: BinaryIO, into: memoryview, offset: int) -> int:
    """Fill memory with a file's bytes from a place on; how many there were."""
    try:
        number = file.fileno()
    except OSError:  # of a store
        number = None
        file.seek(offset)
    done = 0
    while done < len(into):
        if number is None:
            read = file.readinto(into[done:])  # type: ignore[attr-defined]  # fsspec's have it
        else:
            read = os.preadv(number, [into[done:]], offset + done)
        if not read:
            break
        done += read
    return done


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write below an existing folder."""
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


def publish(path: Path, place: Path) -> None:
    """Give what is complete its name, durably."""
    if path.is_dir():
        DISK.sync_folder(path)
    DISK.rename(path, place)
    DISK.sync_folder(place.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder and everything below; of a link only the link, never its target."""
    if path.is_symlink() or not path.is_dir():
        DISK.remove(path)
        return
    for entry in sorted(path.iterdir()):
        remove_tree(entry)
    DISK.remove_folder(path)


def discard(path: Path) -> None:
    """Remove what is there, if anything is: a folder, a file, or a link that leads nowhere."""
    if os.path.lexists(path):
        remove_tree(path)
