"""One job at a time: who holds a folder, by a lock, or by a lease where the file system has none.

    lock      the system lets go of it when the holder ends, however it does
    lease     .owner grows older than a beat: a holder writes a number into it at each; who waits
              for it takes it over when no number came for `LEASE` seconds of its own clock

A holder that was taken over, as it stood still, finds so before it commits.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOG = logging.getLogger("fsdp2.checkpoint")

BEAT = 5
"""Seconds from one number to the next."""

LEASE = 30
"""Seconds without a number, after which a lease is over."""

sleep: Callable[[float], object] = time.sleep
"""Tests put a clock of their own in its place."""


@contextmanager
def owned(path: Path, about: str) -> Iterator[Callable[[], bool]]:
    """Hold the file ``path`` while inside; it is removed afterwards."""
    held, is_locked = _hold(path)
    ended = threading.Event()

    def beat() -> None:
        number = 0
        while not ended.wait(BEAT):
            number += 1
            with suppress(OSError, ValueError):  # closed
                _write(held, f"{about}\n{number}")

    try:
        _write(held, about)
        if not is_locked:
            with suppress(RuntimeError):  # no thread is left: the lease holds for its time
                threading.Thread(target=beat, name="fsdp2 holds a folder", daemon=True).start()
        yield partial(_is_at, path, held)
    finally:
        ended.set()
        if _is_at(path, held):
            with suppress(OSError):
                os.unlink(path)
        held.close()


def _write(held: BinaryIO, text: str) -> None:
    held.seek(0)
    held.write(text.encode())
    held.truncate()
    held.flush()


def _said(content: bytes) -> str:
    return content.decode(errors="replace").partition("\n")[0]


def _hold(path: Path) -> tuple[BinaryIO, bool]:
    """The file, open, and whether it is locked."""
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
        except BlockingIOError:
            file.close()
            raise
        if (locked or made) and _is_at(path, file):
            return file, locked
        file.close()  # if it was removed between the two by who held it, the path is free
        if not locked and not made:
            _take_over(path)


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(file: BinaryIO) -> bool:
    """Whether it is locked now; false if the file system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(_said(file.read())) from None
    except OSError:
        return False
    return True


def _take_over(path: Path) -> None:
    """Return when the file is free: its holder is done, or has given no sign of life."""
    try:
        before = path.read_bytes()
        LOG.warning(
            "'%s' says that %s saves here, and its file system knows no locks; waiting %d seconds "
            "for a sign of life",
            *(path, _said(before), LEASE),
        )
        for _ in range(LEASE // BEAT):
            sleep(BEAT)
            if path.read_bytes() != before:
                raise BlockingIOError(_said(before))
        taken = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
        os.rename(path, taken)
    except FileNotFoundError:
        return  # it is free
    found = taken.read_bytes()
    if found != before:  # of one that was quicker: it is given back, as long as nobody is there
        with suppress(OSError):
            os.link(taken, path)
        os.unlink(taken)
        raise BlockingIOError(_said(found))
    os.unlink(taken)
    LOG.warning(
        "%s has not been seen for %d seconds; '%s' is taken over", _said(before), LEASE, path
    )
