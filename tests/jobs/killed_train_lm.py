"""`fsdp2.examples.train_lm` in a process that something happens to, in its first attempt.

    FSDP2_TEST_KILL=RANK:PHASE:N   rank RANK sends itself SIGKILL at the N-th moment of PHASE
                  …:@N             at the third one from the N-th step of training on
                  …:N:memory       raises there that its device has no memory left
                  …:N:slow         stands still there for `SLOW` seconds
    FSDP2_TEST_COUNTS=DIR          each rank writes how many moments each phase had: DIR/rank0.json
    FSDP2_TEST_CLOCK=RANK:SECONDS  rank RANK's clock is ahead by so much, in all attempts
    FSDP2_TEST_STEP=SECONDS        every step takes so much longer, so that there is time for faults

Moments lie before and after every call in `MOMENTS`; "fault" is printed at the one that was chosen.
Under torchrun a worker that was restarted lives. Started without a launcher, it is the launcher's
parent process and starts itself as workers.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdp2.checkpoint import files, saving
from fsdp2.core.device.collectives import GroupCollectives
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.examples import checkpointing, train_lm

MOMENTS: dict[str, list[tuple[Any, str]]] = {
    "forward": [
        (Scheduler, "enter_forward"),
        (Scheduler, "exit_forward"),
        (train_lm, "held_out_loss"),
    ],
    "backward": [
        (Scheduler, "enter_backward"),
        (Scheduler, "exit_backward"),
        (Scheduler, "end_backward"),
        (ParamGroup, "reduce"),
    ],
    "all-reduce": [(GroupCollectives, "all_reduce")],
    "step": [
        (torch.optim.AdamW, "step"),
        (torch.nn.utils, "clip_grad_norm_"),
        (train_lm, "_sum_over_ranks"),
    ],
    "save": [
        (checkpointing.Saves, "save"),
        (saving._Save, "_take"),
        (saving._Save, "_begin"),
        (saving._Save, "_attempt"),
        (saving._Save, "_decide"),
        (saving._Save, "_plan_for"),
        (saving._Save, "_commit"),
        (saving, "prune"),
        (files.Disk, "make_folder"),
        (files.Disk, "create"),
        (files.Disk, "sync"),
        (files.Disk, "sync_folder"),
        (files.Disk, "rename"),
        (files.Disk, "remove"),
        (saving, "write_items"),
        (saving, "index_of"),
    ],
}


SLOW = 5.0


class Killer:
    """Counts moments, and ends this process, or what was asked for, at the one that was chosen."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.step = 0
        self._phase, self._at, self._how, self._from = "", -1, "", -1
        chosen = os.environ.get("FSDP2_TEST_KILL")
        if chosen and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            rank, phase, number, *how = chosen.split(":")
            if rank == os.environ["RANK"]:
                self._phase, self._how = phase, "".join(how)
                if number.startswith("@"):
                    self._from = int(number[1:])
                else:
                    self._at = int(number)

    def moment(self, phase: str) -> None:
        number = self.passed[phase]
        self.passed[phase] += 1
        if phase != self._phase:
            return
        if 0 < self._from <= self.step:  # from now on, moments are known by their numbers
            self._from, self._at = -1, number + 2
        if number == self._at:
            self._fault()

    def _fault(self) -> None:
        print("fault", flush=True)
        if self._how == "memory":
            raise torch.OutOfMemoryError("a device has no memory left")
        if self._how == "slow":
            time.sleep(SLOW)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, owner: Any, name: str, phase: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.moment(phase)
            result = original(*args, **kwargs)
            self.moment(phase)
            return result

        setattr(owner, name, call)


def _train(original: Any, killer: Killer, *args: Any) -> int:
    code: int = original(*args)
    folder = os.environ.get("FSDP2_TEST_COUNTS")
    if folder is not None:
        file = Path(folder) / f"rank{os.environ['RANK']}.json"
        file.write_text(json.dumps(killer.passed))
    return code


def _skew() -> None:
    rank, seconds = os.environ["FSDP2_TEST_CLOCK"].split(":")
    if rank == os.environ["RANK"]:
        time.time = functools.partial(_ahead, time.time, float(seconds))


def _ahead(clock: Callable[[], float], seconds: float) -> float:
    return clock() + seconds


def _train_step(original: Callable[..., Any], killer: Killer, run: Any, step: int) -> Any:
    killer.step = step + 1
    time.sleep(float(os.environ.get("FSDP2_TEST_STEP", "0")))
    return original(run, step)


def main() -> int:
    train_lm.MODULE = "tests.jobs.killed_train_lm"
    if "RANK" in os.environ:
        killer = Killer()
        for phase, calls in MOMENTS.items():
            for owner, name in calls:
                killer.watch(owner, name, phase)
        train_lm._train = functools.partial(_train, train_lm._train, killer)
        train_lm.train_step = functools.partial(_train_step, train_lm.train_step, killer)
        if "FSDP2_TEST_CLOCK" in os.environ:
            _skew()
    return train_lm.main()


if __name__ == "__main__":
    sys.exit(main())
