"""`fsdp2.elastic` on torchft: groups as simulated, and the example with a rank that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT = 300.0  # seconds

pytest.importorskip("torchft")
pytestmark = pytest.mark.clients

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "RUST_LOG": "error"}


@pytest.mark.parametrize(
    ("case", "again"),
    [
        ("wrapper", "[[], []]"),  # which fails in no step
        ("steps", "[[], [3]]"),  # the other group had its gradients, and committed
        ("async", "[[4], [3]]"),  # one of two groups heals beside the next step: too few are left
    ],
)
def test_groups_are_as_simulated(case: str, again: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "groups_in_step.py"), case],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.stdout.endswith(f"2 groups are as simulated; tried again: {again}\n"), done.stderr


def _processes(run: int) -> dict[int, set[str]]:
    """The environments of the processes that the example has started, and of itself."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            words = folder.joinpath("environ").read_bytes().decode(errors="replace")
            if f"RUN_OF_TEST={run}" in words.split("\0"):
                found[int(folder.name)] = {*words.split("\0")}
    return found


def _rank_of(group: int, rank: int, run: int) -> int:
    wanted = {f"FSDP2_EXAMPLE_GROUP={group}", f"RANK={rank}"}
    (found,) = (pid for pid, words in _processes(run).items() if wanted <= words)
    return found


def _example(steps: int) -> subprocess.Popen[str]:
    run = os.getpid()
    command = ["-m", "fsdp2.examples.train_lm", "--elastic", "2", "--preset", "tiny"]
    return subprocess.Popen(
        [sys.executable, *command, "--data", "docs", "--steps", str(steps)],
        cwd=ROOT,
        env={**ENVIRONMENT, "RUN_OF_TEST": str(run)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_killed_rank_and_a_signal() -> None:
    """A rank is killed, its group comes back and heals; then SIGTERM ends everything."""
    run = os.getpid()
    example = _example(100_000)
    end = threading.Timer(TIMEOUT, example.kill)
    end.start()
    seen: list[str] = []
    killed = 0
    assert example.stdout is not None
    for line in example.stdout:
        seen.append(line)
        if line.startswith("step 10: loss"):
            killed = _rank_of(1, 1, run)
            os.kill(killed, signal.SIGKILL)
        if killed and line.startswith("group 1: has healed"):
            example.terminate()
    text = "".join(seen)
    assert example.wait() == 128 + signal.SIGTERM, text
    end.cancel()
    assert "train_lm: group 1 is started again" in text
    assert "group 1: has healed, and goes on behind step" in text
    assert not _processes(run)


def test_groups_end_alike() -> None:
    example = _example(20)
    text, _ = example.communicate(timeout=TIMEOUT)
    assert example.returncode == 0, text
    assert text.endswith("2 of 2 groups end with the same weights\n")
