"""deploy/ray_train.py on a local cluster of two workers: one is killed, and the run goes on."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from fsdp2 import checkpoint
from tests.common import jobs

pytestmark = pytest.mark.clients

STEPS = 12
ARGUMENTS = (*jobs.TINY, "--steps", str(STEPS), "--checkpoint-every", "4")
STEP = re.compile(r"^\(RayTrainWorker[^)]*\) step +(\d+)/.*?loss (\d\.\d{4}) ", re.M)


def _job(storage: Path, **environment: str) -> jobs.Run:
    command = (sys.executable, "deploy/ray_train.py", "--workers", "2", "--storage", str(storage))
    return jobs.Run(*command, "--", *ARGUMENTS, RAY_COLOR_PREFIX="0", NO_COLOR="1", **environment)


def _losses(out: str) -> dict[int, str]:
    plain = re.sub(r"\x1b\[[\d;]*m", "", out)
    return {int(number): loss for number, loss in STEP.findall(plain)}


def test_a_worker_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    code, out, err = jobs.Run(*jobs.TRAIN_LM, "--nproc", "2", *jobs.TINY, "--steps", "12").finish()
    assert code == 0, err
    expected = dict(jobs.losses_of(out))

    run = _job(tmp_path)
    steps = tmp_path / "train_lm" / "steps"
    run.wait_until(lambda: steps.is_dir() and checkpoint.steps(steps)[:1] == [4])
    workers = [pid for pid in run.processes() if b"RayTrainWorker" in _command(pid)]
    os.kill(max(workers), signal.SIGKILL)
    code, out, err = run.finish()
    assert code == 0, err
    assert "resumed from" in out + err
    assert checkpoint.steps(steps)[-1] == STEPS
    losses = _losses(out + err)
    assert losses == {number: expected[number] for number in losses}
    assert STEPS in losses


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
