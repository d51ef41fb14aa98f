"""`fsdp2.elastic` on torchft: groups as simulated, and the example with a rank that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.clients.launch import finished
from tests.common import jobs

pytest.importorskip("torchft")
pytestmark = pytest.mark.clients


@pytest.mark.parametrize("case", ["wrapper", "steps", "async"])
def test_groups_are_as_simulated(case: str) -> None:
    """The script compares parameters with a simulation, and knows which steps are tried again."""
    finished("with_torchft.py", case, ranks=4, alone=True)


def _example(steps: int) -> jobs.Run:
    options = ("--elastic", "2", "--preset", "tiny", "--data", "docs", "--steps", str(steps))
    return jobs.Run(*jobs.TRAIN_LM, *options, RUST_LOG="error")


def _rank_of(group: int, rank: int, run: jobs.Run) -> int:
    wanted = {f"FSDP2_EXAMPLE_GROUP={group}".encode(), f"RANK={rank}".encode()}
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in run.processes()}
    (found,) = (pid for pid, words in environments.items() if wanted <= {*words.split(b"\0")})
    return found


def test_a_killed_rank_and_a_signal() -> None:
    """A rank is killed, its group comes back and heals; then SIGTERM ends everything."""
    run = _example(100_000)
    try:
        run.wait_for("step 10: loss")
        os.kill(_rank_of(1, 1, run), signal.SIGKILL)
        run.wait_for("group 1: has healed, and goes on behind step")
    finally:
        run.process.terminate()
        code, out, err = run.finish()  # nothing is left behind
    assert code == 128 + signal.SIGTERM, out + err
    assert "train_lm: group 1 is started again" in out + err


def test_groups_end_alike() -> None:
    code, out, err = _example(20).finish()
    assert code == 0, out + err
    assert out.endswith("2 of 2 groups end with the same weights\n")
