"""Serves one image at a time to peers, from a thread, and never while its tensors are written.

    open(image)    readers come:   GET /SECRET/STEP            the head
                                   GET /SECRET/STEP/TOKEN/N    bytes from N on: frames
    close()        no new readers; others get `patience` seconds, then their connections end

    frame   [ begin: 8 | length: 4 | CRC-32: 4 | bytes ]

A group that joins may ask before this one knows of it, so a question waits for `open`, or is asked
again. A connection that ends breaks a frame off, and who reads has no use for part of a frame. So
what was read is of the image, whole pieces of it, however `close` ended.
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fsdp2.elastic.image import Image

LOG = logging.getLogger("fsdp2.elastic")

FRAME = struct.Struct(">QII")
"""The offset of a piece, its length, its CRC-32."""

PIECE = 1 << 22
"""Bytes of a piece."""

_IDLE = 60.0  # seconds that a peer may be silent in the middle of a request
_WAIT = 1.0  # seconds that a question waits for an answer other than "not yet"


class ShardServer(ThreadingHTTPServer):
    """Serves images at `address`, a URL that ends in a secret; `close` waits `patience` seconds.

    A thread per connection, in IPv6 and IPv4 where the machine has both.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, patience: float, piece: int = PIECE) -> None:
        self.patience = patience
        self.piece = piece
        self.secret = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._image: Image | None = None
        self._readers: set[socket.socket] = set()
        self._dual = socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if self._dual else socket.AF_INET
        super().__init__(("", port), _Handler)
        self.address = f"http://{host}:{self.server_port}/{self.secret}"
        self._thread = threading.Thread(
            target=self.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="fsdp2 serves shards",
            daemon=True,
        )
        self._thread.start()

    def server_bind(self) -> None:
        """Without a look-up of this machine's name, which may take long."""
        if self._dual:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "", self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """A peer that has gone is not an error of this rank."""
        LOG.info("a peer at %s has gone", client_address, exc_info=True)

    def open(self, image: Image) -> None:
        """Serve an image until `close`."""
        with self._changed:
            self._image = image
            self._changed.notify_all()

    def close(self) -> None:
        """Serve nothing; return when the image is not read any more."""
        with self._changed:
            self._image = None
            if self._changed.wait_for(lambda: not self._readers, self.patience):
                return
            LOG.warning(
                "%d peers were still reading this rank's shards after %g seconds; their "
                "connections are closed, and they heal in a later step",
                *(len(self._readers), self.patience),
            )
            for connection in self._readers:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def reading(self, connection: socket.socket, step: int, token: str) -> Iterator[Image | None]:
        """The image, if it is of ``step`` and has ``token``, if one is given; `close` waits."""
        with self._changed:
            image = self._image
            if image is not None and (
                image.head.step != step or token not in ("", image.head.token)
            ):
                image = None
            if image is not None:
                self._readers.add(connection)
        try:
            yield image
        finally:
            with self._changed:
                self._readers.discard(connection)
                self._changed.notify_all()

    def is_early(self, step: int) -> bool:
        """Whether an image of ``step`` may still come, which is waited for a little."""
        with self._changed:
            return not self._changed.wait_for(
                lambda: self._image is not None and self._image.head.step >= step, _WAIT
            )

    def shutdown(self) -> None:
        """End the thread and free the port."""
        self.close()
        super().shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    """One connection of a peer's."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE
    server: ShardServer

    def do_GET(self) -> None:
        """Answer with the head or with frames."""
        shards = self.server
        match self.path.split("/"):
            case ["", secret, step] if secret == shards.secret and step.isdecimal():
                token, start = "", -1
            case ["", secret, step, token, at] if secret == shards.secret and (
                step.isdecimal() and token and at.isdecimal()
            ):
                start = int(at)
            case _:
                self._answer(HTTPStatus.NOT_FOUND, b"")
                return
        if not token and shards.is_early(int(step)):
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"")
            return
        with shards.reading(self.connection, int(step), token) as image:
            if image is None:
                self._answer(HTTPStatus.GONE, b"")
            elif start < 0:
                self._answer(HTTPStatus.OK, image.head.encoded())
            else:
                self._send(image, start)

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, image: Image, start: int) -> None:
        """Frames up to the end of the image; what follows is another request."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Connection", "close")
        self.end_headers()
        for begin, data in image.pieces(start, self.server.piece):
            self.wfile.write(FRAME.pack(begin, len(data), zlib.crc32(data)))
            self.wfile.write(data)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Requests are nothing to tell users."""
        LOG.debug(format, *args)
