"""A signal ahead of the end: the run is saved at the end of a step, leaves, and is resumed."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from fsdp2 import checkpoint
from tests.common import jobs

pytestmark = [pytest.mark.ranks, pytest.mark.extended]

STEPS = 80
RUN = (*jobs.TINY, "--steps", str(STEPS))
TORCHRUN = (
    *(sys.executable, "deploy/torchrun.py", "--standalone", "--nproc-per-node=2"),
    *("-m", "fsdp2.examples.train_lm"),
)
OURS = (*jobs.TRAIN_LM, "--nproc", "2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], bytes]:
    """Losses, and the file of weights that it exports."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, out, err = jobs.Run(*OURS, *RUN, "--export", str(folder / "out")).finish()
    assert code == 0, err
    return dict(jobs.losses_of(out)), (folder / "out" / "model.safetensors").read_bytes()


CASES = [
    pytest.param(*case[:-1], id=case[-1])
    for case in (
        (OURS, "rank", signal.SIGUSR1, (), 143, "a rank"),
        (OURS, "command", signal.SIGTERM, (), 143, "the command"),
        (OURS, "command", signal.SIGINT, (), 143, "Ctrl-C"),
        (OURS, "rank", signal.SIGTERM, ("--preempted-exit-code", "75"), 75, "another code"),
        (OURS, "rank", signal.SIGTERM, ("--checkpoint-async",), 143, "saved beside"),
        (TORCHRUN, "command", signal.SIGTERM, (), 143, "an agent"),
        (TORCHRUN, "command", signal.SIGUSR1, (), 143, "an agent, SIGUSR1"),
        (TORCHRUN, "rank", signal.SIGTERM, (), 143, "a rank of an agent"),
    )
]


@pytest.mark.parametrize(("command", "whom", "number", "more", "expected"), CASES)
def test_saved_and_resumed_to_the_bit(
    undisturbed: tuple[dict[int, str], bytes],
    tmp_path: Path,
    command: tuple[str, ...],
    whom: str,
    number: int,
    more: tuple[str, ...],
    expected: int,
) -> None:
    losses, weights = undisturbed
    run, out = tmp_path / "run", tmp_path / "out"
    saving = ("--checkpoint", str(run), "--checkpoint-every", "1000", "--resume")
    arguments = (*RUN, *more, *saving)
    job = jobs.Run(*command, *arguments)
    job.wait_for(r"step +10/")
    os.kill(job.ranks()[1] if whom == "rank" else job.process.pid, number)
    code, printed, err = job.finish()
    assert code == expected, err
    assert f"ended by a signal; saved in {run}: --resume goes on" in printed
    (saved,) = checkpoint.steps(run)
    assert 10 <= saved < STEPS
    assert all(loss == losses[step] for step, loss in jobs.losses_of(printed) if step % 10 == 0)

    code, printed, err = jobs.Run(*command, *arguments, "--export", str(out)).finish()
    assert code == 0, err
    assert re.search(rf"resumed from \S+ at step {saved};", printed)
    assert dict(jobs.losses_of(printed)) == {s: x for s, x in losses.items() if s > saved}
    assert (out / "model.safetensors").read_bytes() == weights
