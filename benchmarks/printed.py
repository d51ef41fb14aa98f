"""A command, and when it printed which line: what benchmarks of faults watch."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from benchmarks.files import ROOT

PATIENCE = 300.0  # seconds, after which a run that has not ended hangs


class Printed:
    """A process in a session of its own, whose lines are read as it prints them.

    Args:
        command: what runs, in the repository's folder.
        environment: what is added to this process's.

    Attributes:
        process: it.
        lines: (seconds, line).
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [*command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        atexit.register(self._end)  # also after Ctrl-C, which does not reach another session

    def _end(self) -> None:
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def wait_for(self, pattern: str) -> float:
        """When a line was printed that has ``pattern`` in it."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            is_over = self.process.poll() is not None and not self.reader.is_alive()
            for at, line in list(self.lines):
                if re.search(pattern, line):
                    return at
            if is_over:
                break
            time.sleep(0.01)
        raise SystemExit(f"no {pattern!r} was printed:\n{self.text()}")

    def text(self) -> str:
        """The last lines."""
        return "\n".join(line for _, line in self.lines[-60:])
