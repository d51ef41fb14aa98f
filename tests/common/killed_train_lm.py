"""`fsdp2.examples.train_lm` in a process that kills itself at a chosen moment of its first attempt.

    FSDP2_TEST_KILL=RANK:PHASE:N   rank RANK sends itself SIGKILL at the N-th moment of PHASE
    FSDP2_TEST_COUNTS=DIR          each rank writes how many moments each phase had: DIR/rank0.json

Moments lie before and after every call in `MOMENTS`. Under torchrun a worker that was restarted
lives. Started without a launcher, it is the launcher's parent process and starts itself as workers.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fsdp2.checkpoint import files, retention, saving
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
        (retention.Pruner, "prune"),
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


class Killer:
    """Counts moments, and ends this process at the one that was chosen."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self._phase, self._at = "", -1
        chosen = os.environ.get("FSDP2_TEST_KILL")
        if chosen and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            rank, phase, number = chosen.split(":")
            if rank == os.environ["RANK"]:
                self._phase, self._at = phase, int(number)

    def moment(self, phase: str) -> None:
        if phase == self._phase and self.passed[phase] == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed[phase] += 1

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


def main() -> int:
    train_lm.MODULE = "tests.common.killed_train_lm"
    if "RANK" in os.environ:
        killer = Killer()
        for phase, calls in MOMENTS.items():
            for owner, name in calls:
                killer.watch(owner, name, phase)
        train_lm._train = functools.partial(_train, train_lm._train, killer)
    return train_lm.main()


if __name__ == "__main__":
    sys.exit(main())
