"""The benchmarks' own arithmetic, their tables, and that they take what a command line says."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness

pytestmark = pytest.mark.alone

BENCHMARKS = sorted(
    path.stem
    for path in (harness.ROOT / "benchmarks").glob("*.py")
    if "make_parser(" in path.read_text() and path.stem != "harness"
)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_says_how_it_is_called(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    with pytest.raises(SystemExit) as ended:
        module.parse(["--help"])
    assert ended.value.code == 0
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out
    assert module.parse([]).json is None


def test_ratio_is_taken_round_by_round() -> None:
    # the machine was twice as slow in the second round
    ours, torchs, none = [3.0, 6.0, 3.0], [5.0, 10.0, 7.0], [1.0, 2.0, 1.0]
    found = harness.ratio(harness.added(ours, none), harness.added(torchs, none))
    assert (found.min, found.median, found.max) == (2 / 6, 0.5, 0.5)
    rounds: harness.Rounds = {"none": {"step": none}, "ours": {"step": ours}}
    assert harness.over(rounds, "step", "none")["ours / none"].median == 3.0
    assert harness.over(rounds, "step", "torch") == {}


class Dies(harness.Ranks):
    """A variant that answers so often, and is then lost."""

    def __init__(self, after: int) -> None:
        self.left = after

    def ask(self, **request: Any) -> dict[str, Any]:
        self.left -= 1
        if self.left < 0:
            raise harness.Lost("it is gone")
        return {"left": self.left}


def test_a_lost_variant_leaves_the_others_their_turns() -> None:
    lost: dict[str, str] = {}
    pool = {"none": Dies(9), "fsdp1": Dies(1)}
    assert harness.take_turns(pool, 3, lost) == {"none": {"left": [8, 7, 6]}}
    assert lost == {"fsdp1": "it is gone"}
    assert list(harness.take_turns(pool, 1, lost)) == ["none"]
    with pytest.raises(harness.Lost):
        harness.take_turns(pool, 1)


# ---- whether the machine was quiet


def test_what_others_took_is_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_START", (10.0, 1.0, 2.0, 100.0))
    monkeypatch.setattr(harness, "_now", lambda: (25.0, 2.0, 12.0, 110.0))
    found = harness.taken()
    assert found is not None
    assert (found.others, found.stolen, found.quiet) == (0.5, 0.1, False)
    assert str(found).startswith("busy, repeat this run: other processes used 0.50 processors")
    monkeypatch.setattr(harness, "_now", lambda: (20.0, 1.0, 12.0, 110.0))
    found = harness.taken()
    assert found is not None
    assert found.quiet


def test_processors_are_read_as_linux_writes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 4000 500 6 7 80 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    monkeypatch.setattr(harness, "_STAT", stat)
    monkeypatch.setattr(harness.os, "sysconf", lambda name: 100)
    found = harness._now()
    assert found is not None
    assert found[:2] == (1.63, 0.8)
    monkeypatch.setattr(harness, "_STAT", tmp_path / "none")
    assert harness._now() is None


def test_files_and_output_say_whether_it_was_quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "taken", lambda: harness.Taken(1.5, 0.0))
    harness.write_json(str(tmp_path / "a.json"), {})
    assert "machine: busy, repeat this run" in capsys.readouterr().out
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["environment"]["taken"] == {"others": 1.5, "stolen": 0.0}


# ---- that they run


def _seldom(*command: str) -> Any:
    return pytest.param(" ".join(command), marks=[pytest.mark.exhaustive])


_BURST = "--rounds 1 --steps 1"


@pytest.mark.extended
@pytest.mark.parametrize(
    "command",
    [
        f"step --models 32x9+128x9,tiny --shrink 16 --precision fp32,mixed {_BURST}",
        f"step --models tiny-moe --ranks 2 --variants torch,fsdp2 --recompute {_BURST}",
        f"step --models tiny --variants none,fsdp2 --compiled --compiler aot_eager {_BURST}",
        "startup --shrink 50 --rounds 1",
        f"optimizer --blocks 1 --variants none,fsdp2,flat,flat-offload,ema {_BURST}",
        f"optimizer --muon --blocks 1 --dim 32 {_BURST}",
        f"network --preset tiny --data docs {_BURST}",
        "checkpoint --sizes 12 --rounds 1",
        "memory --whole --blocks 4",
        _seldom(f"step --models tall --shrink 8 --world-size 8,16 {_BURST}"),
        _seldom("instructions --models 32x9 --shrink 16 --steps 1 --variants none,fsdp2"),
        _seldom("checkpoint --parameters 200 --rounds 1 --variants save,dcp,export,dcp-export"),
        _seldom("memory --presets tiny --shrink 1"),
        _seldom(f"planned --presets tiny --device cpu --ranks 2 {_BURST}"),
    ],
)
def test_scripts_run(command: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    module, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(file)],
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    assert content["environment"]["torch"]
    assert content["results"]
