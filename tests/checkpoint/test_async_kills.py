"""SIGKILL at random points of asynchronous saves of 4 ranks: resumed, the run ends the same.

    python -m tests.checkpoint.test_async_kills RANK FOLDER KILL     one rank; KILL: "", or RANK:N

A rank kills itself at its N-th operation on files or exchange with others. Points are drawn from
seeds, which failures print.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp2 import checkpoint
from fsdp2.checkpoint import files
from fsdp2.core.device.channels import SideChannel
from tests.checkpoint.shared import everything, train
from tests.checkpoint.test_checkpoints import made
from tests.common import jobs
from tests.common.combinations import seldom

pytestmark = pytest.mark.ranks

RANKS, STEPS, POINTS = 4, 4, 50


class Killer:
    """Counts moments, in whatever thread, and ends this process at the chosen one."""

    def __init__(self, at: int) -> None:
        self.passed = 0
        self._at = at
        self._lock = threading.Lock()

    def watch(self, owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if self.passed == self._at:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.passed += 1
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)


def run_rank(rank: int, folder: Path, kill: str, attempt: str) -> None:
    """Train to the end from the newest step; save beside training, every step."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{attempt}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model, optimizer = made()
    run, start = folder / "run", 0
    if checkpoint.steps(run):
        assert checkpoint.verify(run) == []
        start = checkpoint.load(run, model, optimizer).step
    victim, _, at = kill.partition(":")
    killer = Killer(int(at) if victim == str(rank) else -1)
    names = ("make_folder", "create", "write", "sync", "sync_folder", "rename", "remove")
    patches = [killer.watch(files.Disk, name) for name in names]
    patches += [killer.watch(SideChannel, name) for name in ("collect", "spread")]
    for patch in patches:
        patch.start()
    for step in range(start, STEPS):
        train(model, optimizer, seed=step, steps=1)
        saving = checkpoint.async_save(run, model, optimizer, step=step + 1, keep=2)
    if start < STEPS:
        saving.result()
    found = hashlib.sha256()
    for name, value in sorted(everything(model, optimizer).items()):
        found.update(name.encode() + value.numpy().tobytes())
    (folder / f"end-{attempt}-{rank}").write_text(f"{found.hexdigest()} {killer.passed}")
    dist.barrier()
    dist.destroy_process_group()


def _run(folder: Path, kill: str, attempt: str) -> list[int]:
    """Exit codes; all end by themselves, whoever was killed."""
    command = [sys.executable, "-m", "tests.checkpoint.test_async_kills"]
    runs = [jobs.Run(*command, str(n), str(folder), kill, attempt) for n in range(RANKS)]
    try:
        return [run.finish()[0] for run in runs]
    finally:
        for run in runs:
            run.kill()


def _ends(folder: Path, attempt: str) -> list[tuple[str, int]]:
    ends = [(folder / f"end-{attempt}-{rank}").read_text().split() for rank in range(RANKS)]
    return [(digest, int(passed)) for digest, passed in ends]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert _run(folder, "", "0") == [0] * RANKS
    return _ends(folder, "0")


@pytest.mark.parametrize("seed", seldom(range(POINTS), extended=1))
def test_resumed_as_if_never_killed(
    undisturbed: list[tuple[str, int]], tmp_path: Path, seed: int
) -> None:
    choose = random.Random(seed)
    victim = choose.randrange(RANKS)
    kill = f"{victim}:{choose.randrange(undisturbed[victim][1])}"
    codes = _run(tmp_path, kill, "killed")
    assert codes[victim] == -signal.SIGKILL, f"seed {seed}, killed at {kill}: {codes}"
    assert _run(tmp_path, "", "again") == [0] * RANKS, f"seed {seed}, killed at {kill}"
    expected = [digest for digest, _ in undisturbed]
    assert [digest for digest, _ in _ends(tmp_path, "again")] == expected, f"seed {seed}: {kill}"
    assert checkpoint.steps(tmp_path / "run")[-1] == STEPS


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
