"""Fetches a peer's image into host memory: piece by piece, checked, on after a broken connection.

head ── compared ──> memory ── frames from byte 0 on ──┐
                                 <── broken at N ──────┤  again, from N on: N is the end of the
                                     frames from N on ─┘  last piece that was whole
"""

from __future__ import annotations

import bisect
import http.client
import logging
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from io import BufferedIOBase
from urllib.parse import urlsplit

from torch import Tensor

from fsdp2.core.errors import CommunicationError, coded
from fsdp2.elastic.image import Head, memory_of
from fsdp2.elastic.serving import FRAME

LOG = logging.getLogger("fsdp2.elastic")

ATTEMPTS = 5
"""Connections in a row that bring no piece, after which a peer counts as lost."""

sleep: Callable[[float], object] = time.sleep
"""Tests put a clock of their own in its place."""


class _BrokenError(OSError):
    """A connection that brought something other than a frame of the image."""

    def __str__(self) -> str:
        return "a piece is incomplete, or its checksum differs"


class _EarlyError(Exception):
    """The peer has nothing of this step, yet."""


class Fetch:
    """The image of a step at a peer's address; all of it takes at most `timeout` seconds."""

    def __init__(self, address: str, step: int, timeout: float) -> None:
        self._url = urlsplit(address)
        self._step = step
        self._end = time.monotonic() + timeout
        self._read = 0  # bytes that are here, up to the end of a piece

    def head(self) -> Head:
        """Fetch the head."""
        return Head.decoded(self._until_done(self._read_head))

    def tensors(self, head: Head) -> list[Tensor]:
        """Host memory with the bytes of each tensor."""
        memories = [part.memory() for part in head.parts]
        starts = head.starts()
        self._until_done(lambda: self._read_frames(head.token, memories, starts))
        return memories

    def _until_done(self, job: Callable[[], bytes]) -> bytes:
        """Try again, as long as the tries bring something."""
        failures = 0
        while True:
            before = self._read
            try:
                return job()
            except _EarlyError as error:
                if time.monotonic() > self._end:
                    raise self._wrong() from error
                sleep(0.02)
            except (OSError, http.client.HTTPException) as error:
                failures = 1 if self._read > before else failures + 1
                if failures >= ATTEMPTS or time.monotonic() > self._end:
                    raise coded(
                        CommunicationError,
                        "elastic-not-fetched",
                        f"step {self._step} could not be fetched from the peer at "
                        f"{self._url.netloc}: {self._read} bytes have arrived ({error}); this "
                        f"group heals in a later step",
                    ) from error
                LOG.info("a connection to %s broke: %s", self._url.netloc, error)
                sleep(0.02 * 2**failures)

    @contextmanager
    def _ask(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request, on a connection of its own."""
        left = max(0.1, self._end - time.monotonic())
        host, port = self._url.hostname or "", self._url.port
        with closing(http.client.HTTPConnection(host, port, timeout=left)) as connection:
            connection.request("GET", f"{self._url.path}/{self._step}{path}")
            with connection.getresponse() as answer:
                if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
                    raise _EarlyError()
                if answer.status != HTTPStatus.OK:
                    raise self._wrong()
                yield answer

    def _wrong(self) -> CommunicationError:
        return coded(
            CommunicationError,
            "elastic-gone-on",
            f"the peer at {self._url.netloc} does not serve step {self._step}, because it was not "
            f"ready in time or has continued; this group heals in a later step",
        )

    def _read_head(self) -> bytes:
        with self._ask("") as answer:
            return answer.read()

    def _read_frames(self, token: str, memories: list[Tensor], starts: list[int]) -> bytes:
        with self._ask(f"/{token}/{self._read}") as answer:
            while self._read < starts[-1]:
                self._read_frame(answer, memories, starts)
        return b""

    def _read_frame(
        self, answer: BufferedIOBase, memories: list[Tensor], starts: list[int]
    ) -> None:
        frame = bytearray(FRAME.size)
        _fill(answer, memoryview(frame))
        begin, length, checksum = FRAME.unpack(frame)
        which = bisect.bisect_right(starts, self._read) - 1
        if begin != self._read or not 0 < length <= starts[which + 1] - begin:
            raise _BrokenError()
        at = begin - starts[which]
        target = memory_of(memories[which])[at : at + length]
        _fill(answer, target)
        if zlib.crc32(target) != checksum:
            raise _BrokenError()
        self._read = begin + length


def _fill(source: BufferedIOBase, target: memoryview) -> None:
    """Read as many bytes as ``target`` has."""
    while target:
        count = source.readinto(target)
        if not count:
            raise _BrokenError()
        target = target[count:]
