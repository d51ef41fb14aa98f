"""benchmarks/gpu_day: what it runs where, that it goes on, and that nothing of a stage is left."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_day, harness
from benchmarks.gpu_day import Machine, Stage, digest, stages_for

CPU = Machine("cpu", 0, {"torch": "2.13.0", "sources": "1234", "commit": "abc"})
GPU = replace(CPU, kind="cuda", gpus=1)
GPUS = replace(GPU, gpus=2)
STAND_IN = replace(CPU, kind="stand-in")

PLAYED = '''
"""Plays a stage: ``python -m played HOW … --json FILE``."""
import json, os, signal, subprocess, sys, time
how, *_, file = sys.argv[1:]
with open(os.environ["RAN"], "a") as ran:
    ran.write(how + "\\n")
print("this is", how, flush=True)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "fails":
    sys.exit(3)
if how == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with open(os.environ["CHILD"] + ".new", "w") as written:
        written.write(str(child.pid))
    os.rename(os.environ["CHILD"] + ".new", os.environ["CHILD"])
    time.sleep(1000)
with open(file, "w") as written:
    json.dump({"environment": {}, "results": {"ratios": {}}}, written)
'''


def stage(how: str, seconds: int = 1, absent: str = "") -> Stage:
    return Stage(how, f"A stage that {how}", ("played", how), seconds, {}, absent)


class Play:
    """A day of played stages."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.out, self._ran, self.child = folder / "out", folder / "ran", folder / "child"
        (folder / "played.py").write_text(PLAYED)
        self._patch = patch
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("RAN", str(self._ran))
        patch.setenv("CHILD", str(self.child))
        # A busy machine is slow: no played stage but the one that hangs is out of time.
        patch.setattr(gpu_day, "LEAST", 10_000)

    def run(self, *stages: Stage, machine: Machine = CPU, minutes: float = 60) -> int:
        self._ran.write_text("")
        self._patch.setattr(gpu_day, "found", lambda kind: machine)
        self._patch.setattr(gpu_day, "stages_for", lambda machine: list(stages))
        return gpu_day.main(["--out", str(self.out), "--minutes", str(minutes)])

    @property
    def ran(self) -> list[str]:
        return self._ran.read_text().split()

    @property
    def index(self) -> dict[str, Any]:
        rows = json.loads((self.out / "index.json").read_text())["stages"]
        return {row["name"]: row for row in rows}

    @property
    def page(self) -> str:
        return (self.out / "page.md").read_text()


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    return Play(tmp_path, monkeypatch)


def test_a_stage_that_is_killed_is_told_and_the_rest_goes_on(play: Play) -> None:
    assert play.run(stage("killed"), stage("fails"), stage("works")) == 1
    assert play.ran == ["killed", "fails", "works"]
    statuses = {name: (row["status"], row["why"]) for name, row in play.index.items()}
    assert statuses == {
        "killed": (gpu_day.FAILED, "it was ended by signal 9 (SIGKILL)"),
        "fails": (gpu_day.FAILED, "it ended with exit status 3"),
        "works": (gpu_day.DONE, ""),
    }
    assert "this is killed" in play.page
    assert "ended with exit status 3" in play.page
    assert "this is works" in play.page


@pytest.mark.extended
def test_what_is_done_is_kept_and_what_failed_runs_again(play: Play) -> None:
    stages = stage("works"), stage("fails")
    play.run(*stages)
    play.run(*stages)
    assert play.ran == ["fails"]
    assert play.index["works"]["kept"]
    assert "this is works" in play.page
    for changed in (
        replace(CPU, facts={**CPU.facts, "sources": "5678"}),
        replace(CPU, facts={**CPU.facts, "torch": "2.15.0"}),
    ):
        play.run(*stages, machine=changed)
        assert play.ran == ["works", "fails"]
    longer = replace(stage("works"), command=("played", "works", "--rounds", "9"))
    play.run(longer, machine=changed)
    assert play.ran == ["works"]
    play.run(longer, machine=replace(changed, facts={**changed.facts, "commit": "later"}))
    assert play.ran == []


def test_what_does_not_fit_or_is_not_there_is_not_run_and_named(play: Play) -> None:
    assert play.run(stage("works", seconds=10_000), stage("fails", absent="no such thing")) == 0
    assert play.ran == []
    assert "it takes about 10000 s" in play.page
    assert "| A stage that fails | not run: no such thing | `python -m played fails` |" in play.page


def _once_it_hangs(play: Play, pids: list[int], then: Callable[[], object]) -> Any:
    """`_has_ended`, which calls ``then`` when the first stage that it is asked of hangs."""
    has_ended = gpu_day._has_ended

    def ended(pid: int, seconds: float) -> bool:
        pids.append(pid)
        if len(pids) == 1:
            while not play.child.exists():
                assert not has_ended(pid, 0.0)
            then()
        return has_ended(pid, 0.0 if pid == pids[0] else seconds)

    return ended


def test_a_stage_that_hangs_is_ended_with_all_that_it_started(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    monkeypatch.setattr(gpu_day, "_has_ended", _once_it_hangs(play, pids, lambda: None))
    assert play.run(stage("hangs"), stage("works")) == 0
    assert play.index["hangs"]["status"] == gpu_day.LATE
    assert "this is hangs" in play.index["hangs"]["tail"]
    assert play.index["works"]["status"] == gpu_day.DONE
    assert all(_is_gone(pid) for pid in (pids[0], int(play.child.read_text())))


def test_an_interrupt_ends_the_stage_and_leaves_a_page(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    play.run(stage("works"))
    interrupt = _once_it_hangs(play, pids, lambda: signal.raise_signal(signal.SIGHUP))
    monkeypatch.setattr(gpu_day, "_has_ended", interrupt)
    before = signal.getsignal(signal.SIGHUP)
    with pytest.raises(SystemExit):
        play.run(stage("works"), stage("hangs"), stage("fails"))
    assert signal.getsignal(signal.SIGHUP) is before
    assert all(_is_gone(pid) for pid in (pids[0], int(play.child.read_text())))
    assert [row["status"] for row in play.index.values()] == [gpu_day.DONE, *[gpu_day.WAITING] * 2]
    assert "this is works" in play.page


def test_a_stage_does_not_outlive_a_day_that_is_killed(play: Play) -> None:
    code = "import sys; from benchmarks import gpu_day; gpu_day.run_whole("
    code += "[sys.executable, '-m', 'played', 'hangs', '-'], {}, sys.stderr, 1000.0)"
    day = subprocess.Popen([sys.executable, "-c", code], cwd=harness.ROOT)
    while not play.child.exists():
        assert day.poll() is None
        time.sleep(0.01)
    child = int(play.child.read_text())
    stage = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    day.kill()
    day.wait()
    assert _is_gone(stage)
    assert _is_gone(child)


def _is_gone(pid: int) -> bool:
    """Whether it runs no more; nobody may have waited for it."""
    end = time.monotonic() + 60  # it has been sent a signal
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_a_digest_is_of_what_is_written(tmp_path: Path) -> None:
    source = tmp_path / "fsdp2" / "a.py"
    source.parent.mkdir()
    source.write_text("1")
    (tmp_path / "fsdp2" / "a.json").write_text("1")
    first = digest(tmp_path)
    (tmp_path / "fsdp2" / "a.json").write_text("2")
    assert digest(tmp_path) == first
    source.write_text("2")
    assert digest(tmp_path) != first


@pytest.mark.parametrize("machine", [CPU, STAND_IN, GPU, GPUS])
def test_every_stage_is_a_command_that_its_script_takes(machine: Machine) -> None:
    stages = stages_for(machine)
    assert len({each.name for each in stages}) == len(stages)
    for each in stages:
        module, *arguments = each.command
        if each.is_tests:
            assert (harness.ROOT / arguments[0]).exists()
        elif not each.absent:
            options = importlib.import_module(module).parse(arguments)
            wanted = "standin" if machine.kind == "stand-in" else machine.kind
            assert options.device == wanted


def test_nccl_needs_two_gpus() -> None:
    absent = {each.name: each.absent for each in stages_for(GPU)}
    assert "a GPU of its own" in absent["ranks-1.1b"]
    named = {each.name: each for each in stages_for(GPUS)}
    assert not named["ranks-1.1b"].absent
    assert "--ranks 2" in named["ranks-1.1b"].line
    assert named["step-2.8b-expandable"].line.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable")


@pytest.mark.extended
def test_a_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    """It ends with 0 whatever fits into the time, and goes on until all is done."""
    chosen = ["tests", "step-tiny-moe"]
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--device", "cpu", "--minutes", "2"]
    command += ["--out", str(tmp_path), "--only", ",".join(chosen)]
    done: list[str] = []
    for _ in range(5):  # on a machine that others use
        ran = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        index = json.loads((tmp_path / "index.json").read_text())
        done = [row["name"] for row in index["stages"] if row["status"] == gpu_day.DONE]
        if done == chosen:
            break
    assert done == chosen
    for name in done:
        content = json.loads((tmp_path / f"{name}.json").read_text())
        assert content["results"]
    assert ran.stdout.split()[-1] == os.fspath(tmp_path / "page.md")
