"""A rank that dies at any moment: the run ends, or is restarted and goes on as if it had not.

`tests.jobs.killed_train_lm` is the example with a worker that sends itself SIGKILL at a chosen
moment of forward, backward, step or save.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp2 import checkpoint
from tests.common import jobs
from tests.common.combinations import seldom

pytestmark = pytest.mark.ranks

STEPS = 8
RUN = (*jobs.TINY, "--steps", str(STEPS), "--checkpoint-every", "3")
KILLED = "tests.jobs.killed_train_lm"
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("--max-restarts", "3", "-m", KILLED),
)
PHASES = ("forward", "backward", "step", "save")
KILLS = 8


class Yardstick:
    """A run that nobody disturbed: its losses, and how many moments each rank's phases have."""

    def __init__(self, folder: Path) -> None:
        checkpoint = folder / "checkpoint"
        code, out, err = jobs.Run(
            *(sys.executable, "-m", KILLED, "--nproc", "2"),
            *(*RUN, "--checkpoint", str(checkpoint), "--resume"),
            FSDP2_TEST_COUNTS=str(folder),
        ).finish()
        assert code == 0, err
        self.losses = dict(jobs.losses_of(out))
        assert list(self.losses) == list(range(1, STEPS + 1))
        self.moments = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
        assert all(moments[phase] > 10 for moments in self.moments for phase in PHASES)

    def kill_at(self, number: int) -> str:
        """The ``number``-th random moment, as the killer takes it."""
        choose = random.Random(number)
        phase = PHASES[number % len(PHASES)]
        rank = choose.randrange(2)
        return f"{rank}:{phase}:{choose.randrange(self.moments[rank][phase])}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Yardstick:
    return Yardstick(tmp_path_factory.mktemp("undisturbed"))


def _check_restarted(undisturbed: Yardstick, folder: Path, kill: str) -> None:
    code, out, err = jobs.Run(
        *(*TORCHRUN, *RUN, "--checkpoint", str(folder), "--resume"),
        FSDP2_TEST_KILL=kill,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    ).finish()
    assert code == 0, f"killed at {kill}: {err}"
    attempts = re.split(r"^tiny: .* parameters", out, flags=re.M)[1:]
    assert len(attempts) == 2, f"killed at {kill}: {len(attempts)} attempts"
    for attempt in attempts:
        for step, loss in jobs.losses_of(attempt):
            assert loss == undisturbed.losses[step], f"killed at {kill}: step {step}"
    resumed = re.search(r"resumed from \S+ at step (\d+);", attempts[1])
    start = int(resumed[1]) if resumed else 0
    assert start % 3 == 0 or start == STEPS
    done = [step for step, _ in jobs.losses_of(attempts[0])]
    # The last complete checkpoint: of the step printed last, or of the save before.
    assert start >= max([step for step in done[:-1] if step % 3 == 0], default=0)
    assert [step for step, _ in jobs.losses_of(attempts[1])] == list(range(start + 1, STEPS + 1))
    names = sorted(path.name for path in folder.iterdir())
    assert checkpoint.steps(folder)[-1] == STEPS
    if start < STEPS:
        assert names == ["step-00000006", "step-00000008"]


@pytest.mark.extended
def test_restarted_by_the_elastic_agent(undisturbed: Yardstick, tmp_path: Path) -> None:
    """Killed in the middle of its second save, the run goes on from the first."""
    moments = undisturbed.moments[1]["save"]
    _check_restarted(undisturbed, tmp_path, f"1:save:{moments // 2}")


@pytest.mark.parametrize("number", seldom(range(KILLS), extended=1))
def test_restarted_wherever_it_is_killed(
    undisturbed: Yardstick, tmp_path: Path, number: int
) -> None:
    _check_restarted(undisturbed, tmp_path, undisturbed.kill_at(number))


@pytest.mark.parametrize("phase", seldom(PHASES, extended=1))
def test_the_parent_ends_the_run_and_says_which_worker_died(
    undisturbed: Yardstick, tmp_path: Path, phase: str
) -> None:
    """Without an elastic agent; the same command takes it up again."""
    command = (*RUN, "--checkpoint", str(tmp_path), "--resume")
    middle = undisturbed.moments[1][phase] // 2
    code, out, err = jobs.Run(
        *(sys.executable, "-m", KILLED, "--nproc", "2", *command),
        FSDP2_TEST_KILL=f"1:{phase}:{middle}",
    ).finish()
    assert code == 1
    assert "Signal 9 (SIGKILL) received" in err
    before = jobs.losses_of(out)
    code, out, err = jobs.Run(sys.executable, "-m", KILLED, "--nproc", "2", *command).finish()
    assert code == 0, err
    losses = before + jobs.losses_of(out)
    assert {step for step, _ in losses} == set(range(1, STEPS + 1))
    assert all(loss == undisturbed.losses[step] for step, loss in losses)


@pytest.mark.parametrize("phase", seldom(PHASES, extended=1))
@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_end_by_themselves(
    undisturbed: Yardstick, tmp_path: Path, phase: str, victim: int
) -> None:
    """Nobody ends them here: the connection that closes does, with an error.

    Where they waited for a unit's parameters or gradients, it says which, and when.
    """
    middle = undisturbed.moments[victim][phase] // 2
    common: dict[str, Any] = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(jobs.free_port()),
        "FSDP2_TEST_KILL": f"{victim}:{phase}:{middle}",
    }
    runs = [
        jobs.Run(
            *(sys.executable, "-m", KILLED, *RUN, "--checkpoint", str(tmp_path), "--resume"),
            **common,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
        )
        for rank in range(2)
    ]
    ended = [run.finish() for run in runs]
    assert ended[victim][0] == -signal.SIGKILL
    code, _, err = ended[1 - victim]
    assert code == 1
    assert re.search(r"^\S*(Error|Exception)\b", err, re.M), err
    if phase in ("forward", "backward"):
        where = r"CommunicationError: the [\w-]+ of unit '\S+' failed in \w+, iteration \d+, most "
        assert re.search(where, err), err
