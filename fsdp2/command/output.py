"""Output of commands: tables and JSON on stdout, and one line of progress on stderr.

Text is plain, and the same with and without a terminal. On a terminal, heads of tables are bold and
verdicts are coloured, unless ``NO_COLOR`` is set (https://no-color.org). Amounts of bytes are in
powers of ten everywhere: kB, MB, GB.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from dataclasses import asdict, is_dataclass
from typing import TextIO

PATIENCE = 2.0
"""Seconds for which a command says nothing of its progress."""

INTERVAL = 0.5
"""Seconds between two lines of progress."""

WIDTH = 24
"""Characters of the bar."""

_STYLES = {"bold": "1", "pass": "32", "fail": "31", "skip": "33"}
"""Codes of the terminal (ECMA-48, SGR)."""


def is_live(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can rewrite a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str) -> str:
    """``text`` in a style, where stdout has colours."""
    if not is_live(sys.stdout) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def tell(as_json: bool, facts: object, text: object) -> None:
    """Print facts as JSON, or else text whose tables have a line of dashes below each head.

    JSON has a dataclass as its fields, and all that it does not know as words.
    """
    if as_json:
        print(json.dumps(facts, indent=1, default=_plain))
        return
    lines = str(text).splitlines()
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        is_head = below != "" and not below.strip("- ")
        print(paint(line, "bold") if is_head else line)


def _plain(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


class ProgressLine:
    """Shows the progress of a command on one line of stderr, if it is a terminal, after a while."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = sys.stderr if stream is None else stream
        self._text = ""
        self._begin = time.monotonic()
        self._over = threading.Event()
        self._drawn = False
        self._thread: threading.Thread | None = None

    def bytes(self, done: int, total: int) -> None:
        """Tell how many bytes are done."""
        from fsdp2.tracing.summaries import amount

        part = done / total if total else 1.0
        bar = ("#" * round(WIDTH * part)).ljust(WIDTH, ".")
        self._text = f"[{bar}] {part:4.0%}  {amount(done)} of {amount(total)}"

    def say(self, text: str) -> None:
        """Tell what was done last."""
        self._text = text

    def draw(self) -> None:
        """Show what was told last, in the place of the line before."""
        seconds = f"{time.monotonic() - self._begin:.0f} s"
        told = "  ".join(part for part in (self._title, seconds, self._text) if part)
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r\x1b[K{told[:width]}")
        self._stream.flush()
        self._drawn = True

    def __enter__(self) -> ProgressLine:
        if is_live(self._stream):
            self._thread = threading.Thread(target=self._keep_drawing, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _keep_drawing(self) -> None:
        wait = PATIENCE
        while not self._over.wait(wait):
            self.draw()
            wait = INTERVAL
