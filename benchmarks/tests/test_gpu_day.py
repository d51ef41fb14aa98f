"""benchmarks/gpu_day: what it runs where, that it goes on, and that nothing of a stage is left."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import block_collectives, step, variants, workers
from benchmarks.gpu_day import __main__ as command_line
from benchmarks.gpu_day import page, runner
from benchmarks.gpu_day.machine import Machine, digest
from benchmarks.gpu_day.stages import Stage, stages_for
from benchmarks.models import PRESETS, Llama
from tests.common.workers import ranks

CPU = Machine("cpu", "a processor", 0, "", "", "", (), "2.13.0", "3.11.7", "abc", "1234")
GPU = replace(
    CPU, kind="cuda", device="NVIDIA H200", gpus=1, driver="580.1", cuda="13.0", nccl="2.28.3"
)
GPUS = replace(GPU, gpus=2, backends=("nccl2", "legacy"))
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
        patch.setattr(runner, "LEAST", 10_000)

    def run(self, *stages: Stage, machine: Machine = CPU, minutes: float = 60) -> int:
        self._ran.write_text("")
        self._patch.setattr(command_line.machine, "found", lambda kind: machine)
        self._patch.setattr(command_line, "stages_for", lambda machine: list(stages))
        return command_line.main(["--out", str(self.out), "--minutes", str(minutes)])

    @property
    def ran(self) -> list[str]:
        return self._ran.read_text().split()

    @property
    def index(self) -> dict[str, Any]:
        rows = json.loads((self.out / "index.json").read_text())["stages"]
        return {row["name"]: row for row in rows}

    @property
    def page(self) -> str:
        return (self.out / page.NAME).read_text()


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    return Play(tmp_path, monkeypatch)


def test_a_stage_that_is_killed_is_told_and_the_rest_goes_on(play: Play) -> None:
    assert play.run(stage("killed"), stage("fails"), stage("works")) == 1
    assert play.ran == ["killed", "fails", "works"]
    statuses = {name: (row["status"], row["why"]) for name, row in play.index.items()}
    assert statuses == {
        "killed": (runner.FAILED, "it was ended by signal 9 (SIGKILL)"),
        "fails": (runner.FAILED, "it ended with exit status 3"),
        "works": (runner.DONE, ""),
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
        replace(CPU, sources="5678"),
        replace(CPU, torch="2.15.0"),
        replace(CPU, device="another"),
    ):
        play.run(*stages, machine=changed)
        assert play.ran == ["works", "fails"]
    longer = replace(stage("works"), command=("played", "works", "--rounds", "9"))
    play.run(longer, machine=changed)
    assert play.ran == ["works"]
    play.run(longer, machine=replace(changed, commit="a page of docs later"))
    assert play.ran == []


def test_what_does_not_fit_or_is_not_there_is_not_run_and_named(play: Play) -> None:
    assert play.run(stage("works", seconds=10_000), stage("fails", absent="no such thing")) == 0
    assert play.ran == []
    assert "it takes about 10000 s" in play.page
    assert "| A stage that fails | no such thing | `python -m played fails` |" in play.page


def test_a_stage_that_hangs_is_ended_with_all_that_it_started(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ended = runner._has_ended
    asked: list[int] = []

    def until_it_hangs(pid: int, seconds: float) -> bool:
        asked.append(pid)
        while len(asked) == 1 and not play.child.exists():
            assert not has_ended(pid, 0.0)
        return has_ended(pid, 0.0 if len(asked) < 3 else seconds)

    monkeypatch.setattr(runner, "_has_ended", until_it_hangs)
    assert play.run(stage("hangs"), stage("works")) == 0
    assert play.index["hangs"]["status"] == runner.LATE
    assert "this is hangs" in play.index["hangs"]["tail"]
    assert play.index["works"]["status"] == runner.DONE
    for process in (asked[0], int(play.child.read_text())):
        assert _is_gone(process)


def test_an_interrupt_ends_the_stage_and_leaves_a_page(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ended = runner._has_ended
    asked: list[int] = []

    def interrupted(pid: int, seconds: float) -> bool:
        asked.append(pid)
        if len(asked) == 1:
            while not play.child.exists():
                assert not has_ended(pid, 0.0)
            signal.raise_signal(signal.SIGHUP)
        return has_ended(pid, 0.0)

    play.run(stage("works"))
    monkeypatch.setattr(runner, "_has_ended", interrupted)
    before = signal.getsignal(signal.SIGHUP)
    with pytest.raises(SystemExit):
        play.run(stage("works"), stage("hangs"), stage("fails"))
    assert signal.getsignal(signal.SIGHUP) is before
    assert _is_gone(asked[0])
    assert _is_gone(int(play.child.read_text()))
    assert [row["status"] for row in play.index.values()] == [runner.DONE, *[runner.WAITING] * 2]
    assert "this is works" in play.page


def test_a_stage_does_not_outlive_a_day_that_is_killed(play: Play) -> None:
    code = "import sys; from benchmarks.gpu_day import runner; runner.run_whole("
    code += "[sys.executable, '-m', 'played', 'hangs', '-'], {}, sys.stderr, 1000.0)"
    day = subprocess.Popen([sys.executable, "-c", code], cwd=workers.ROOT)
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


def test_tests_are_counted() -> None:
    text = """<testsuites><testsuite>
      <testcase classname="tests.gpu.test_a" name="test_1"/>
      <testcase classname="tests.gpu.test_a" name="test_2"><failure message="no"/></testcase>
      <testcase classname="tests.gpu.test_b" name="test_3"><skipped message="one GPU"/></testcase>
    </testsuite></testsuites>"""
    assert runner.counted(ElementTree.fromstring(text)) == {
        "passed": 1,
        "failed": ["tests.gpu.test_a::test_2"],
        "skipped": {"one GPU": 1},
    }


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
            assert (workers.ROOT / arguments[0]).exists()
        elif not each.absent:
            script = importlib.import_module(module)
            if arguments:
                options = script.parse(arguments)
                wanted = "standin" if machine.kind == "stand-in" else machine.kind
                assert options.device == wanted


def test_nccl_needs_two_gpus() -> None:
    absent = {each.name: each.absent for each in stages_for(GPU)}
    assert "a GPU of its own" in absent["ranks-1.1b"]
    named = {each.name: each for each in stages_for(GPUS)}
    assert not named["ranks-1.1b"].absent
    assert "--ranks 2" in named["ranks-1.1b"].line
    assert named["step-moe-expandable"].line.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable")


def test_both_backends_of_nccl_are_found_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 has no "nccl2" in its list until somebody asks for it."""
    monkeypatch.setattr(dist.Backend, "backend_list", ["gloo", "nccl"])
    monkeypatch.delattr(dist, "ProcessGroupNCCL2", raising=False)
    assert variants.nccl_backends() == ("nccl",)
    monkeypatch.setattr(dist, "ProcessGroupNCCL2", object, raising=False)
    assert variants.nccl_backends() == ("nccl2", "legacy")
    chosen = [each["TORCH_DIST_USE_NCCL2"] for each in block_collectives.backends("cuda").values()]
    assert chosen == ["1", "0"]


def test_experts_have_the_parameters_they_are_counted_for() -> None:
    model = Llama(PRESETS["tiny-moe"])
    assert sum(p.numel() for p in model.parameters()) == PRESETS["tiny-moe"].parameters
    assert round(PRESETS["moe"].parameters / 1e9, 2) == 1.92
    model.reset_parameters()
    logits = model(torch.zeros(1, 16, dtype=torch.long))
    logits.sum().backward()
    assert all(param.grad is not None for param in model.parameters())


class _Dies:
    def __init__(self, after: int) -> None:
        self.left = after

    def ask(self, **request: Any) -> dict[str, Any]:
        self.left -= 1
        if self.left < 0:
            raise workers.Lost("it is gone")
        return {"left": self.left}


def test_a_lost_variant_leaves_the_others_their_turns() -> None:
    lost: dict[str, str] = {}
    pool = {"none": _Dies(9), "fsdp1": _Dies(1)}
    answers = workers.take_turns(pool, 3, lost)
    assert [each["left"] for each in answers["none"]] == [8, 7, 6]
    assert list(answers) == ["none"]
    assert lost == {"fsdp1": "it is gone"}
    assert list(workers.take_turns(pool, 1, lost)) == ["none"]
    with pytest.raises(workers.Lost):
        workers.take_turns(pool, 1)


def test_own_kernels_are_told_of_each_variant() -> None:
    none = {"sgemm": {"count": 4, "ms": 8.0}}
    fsdp2 = {"sgemm": {"count": 4, "ms": 8.0}, "copy": {"count": 3, "ms": 1.5}}
    found = step.own_kernels({"kernels": {"none": none, "fsdp2": fsdp2}})
    assert found == ["fsdp2: 3 kernels beyond none's, 1.50 ms"]


@ranks(2)
@pytest.mark.parametrize("small", [0, 4096, 10**9])
def test_all_layouts_of_a_block_give_the_same(small: int) -> None:
    """With all parameters large, some, and none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    block = block_collectives.Block(64, torch.device("cpu"), small)
    for number, (shard, grad) in enumerate(zip(block.shards, block.grads, strict=True)):
        shard.fill_(10 * rank + number)
        grad.view(size, -1).copy_(torch.arange(size).view(size, 1) + rank + number)
    launches = block.launches()
    for layout in ("coalesced", "packed", "hybrid"):
        for tensor in (*block.params, *block.reduced):
            tensor.fill_(-1)
        launches["all-gather"][layout]()
        launches["reduce-scatter"][layout]()
        for number, (param, part) in enumerate(zip(block.params, block.reduced, strict=True)):
            rows = param.view(size, -1)
            assert all(bool((rows[r] == 10 * r + number).all()) for r in range(size)), layout
            assert bool((part == sum(range(size)) + size * (rank + number)).all()), layout


@pytest.mark.extended
def test_a_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    """It ends with 0 whatever fits into the time, and goes on until all is done."""
    chosen = ["tests", "collectives", "step-tiny-moe"]
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--device", "cpu", "--minutes", "2"]
    command += ["--out", str(tmp_path), "--only", ",".join(chosen)]

    def run() -> str:
        done = subprocess.run(command, cwd=workers.ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    done: list[str] = []
    for _ in range(5):  # on a machine that others use
        run()
        index = json.loads((tmp_path / "index.json").read_text())
        done = [row["name"] for row in index["stages"] if row["status"] == runner.DONE]
        if done == chosen:
            break
    assert done == chosen
    for name in done:
        content = json.loads((tmp_path / "stages" / f"{name}.json").read_text())
        assert content["results"]
        assert content["stage"]["key"]["torch"] == torch.__version__
    text = (tmp_path / page.NAME).read_text()
    assert all(f"`{row['command']}`" in text for row in index["stages"])
    assert run().split() == [os.fspath(tmp_path / page.NAME)]
