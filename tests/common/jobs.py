"""Jobs as their users start them: a command, what it prints, and every process that comes of it.

run = jobs.Run(*jobs.TRAIN_LM, "--nproc", "2", *jobs.TINY)
run.wait_for("step +3/")
code, out, err = run.finish()
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 600
MARK = "FSDP2_TEST_RUN"  # in the environment of every process that a test starts
TRAIN_LM = (sys.executable, "-m", "fsdp2.examples.train_lm")
TINY = (
    *("--preset", "tiny", "--device", "cpu", "--threads", "1", "--seed", "1"),
    *("--seq-len", "16"),
)


class Run:
    """One command, and the processes that it starts, wherever they are in the process tree."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.id = uuid.uuid4().hex
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        given = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path, MARK: self.id}
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**given, **environment},
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def finish(self) -> tuple[int, str, str]:
        """Exit code, output and errors; fails where it takes too long or leaves a process."""
        try:
            self.process.wait(TIMEOUT_SECONDS)
            deadline = time.monotonic() + 30
            while left := self.processes():
                assert time.monotonic() < deadline, f"processes {left} were left behind"
                time.sleep(0.1)
        finally:
            self.kill()
        return self.process.returncode, self.out(), _text(self._err)

    def kill(self) -> None:
        """End all of them at once, as a machine that is gone."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(TIMEOUT_SECONDS)

    def out(self) -> str:
        """What they have printed up to now."""
        return _text(self._out)

    def wait_for(self, pattern: str) -> None:
        """Return when a line that they print begins with it; fails if they end before."""
        self.wait_until(lambda: re.search(f"^{pattern}", self.out(), re.M) is not None)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return when ``is_so`` says so; fails if they end before."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not is_so():
            running = self.process.poll() is None and time.monotonic() < deadline
            assert running, f"it has not come to that: {self.out()}\n{_text(self._err)}"
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """Those that run still."""
        mark = f"{MARK}={self.id}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in entry.read_bytes():  # empty where the process has ended
                    found.append(int(entry.parent.name))
            except OSError:
                continue  # it ended meanwhile, or is somebody else's
        return found

    def ranks(self) -> dict[int, int]:
        """Process ids of ranks, by rank."""
        found = {}
        for pid in self.processes():
            with open(f"/proc/{pid}/environ", "rb") as file:
                rank = re.search(rb"\0RANK=(\d+)\0", b"\0" + file.read())
            if rank:
                found[int(rank[1])] = pid
        return found


def losses_of(out: str) -> list[tuple[int, str]]:
    """(step, loss as printed), in the order of printing."""
    found = re.findall(r"^(?:\[\w+\]:)?step +(\d+)/.*?loss (\d\.\d{4}) ", out, re.M)
    return [(int(number), loss) for number, loss in found]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _text(file: object) -> str:
    """All of a file that is written elsewhere."""
    fd = file.fileno()  # type: ignore[attr-defined]
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
