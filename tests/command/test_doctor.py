"""`fsdp2 doctor`: its table, and self-tests that pass, fail, and do not end."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdp2.command import doctor, selftest
from fsdp2.tracing import Timeline

WELL = selftest.SelfTest("cpu", "gloo", 2, 1.5, "", 2e-8, "packed", 4160, 2040)
ILL = selftest.SelfTest("cpu", "gloo", 2, 1.5, "rank 1 was to shard a model: it broke")


@pytest.mark.alone
@pytest.mark.parametrize("outcome", [WELL, ILL])
def test_the_table(
    outcome: selftest.SelfTest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run(*given: object) -> selftest.SelfTest:
        asked.append(given)
        return outcome

    monkeypatch.setattr(selftest, "run", run)
    monkeypatch.setattr(doctor, "_accelerator", lambda: None)
    code = 1 if outcome.problem else 0
    assert doctor.main(["--ranks", "3", "--timeout", "9"]) == code
    assert asked == [("cpu", "gloo", 3, 9.0)]
    said = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in said.splitlines()[2:9] if line)
    assert rows["python"].startswith("pass")
    assert rows["torch"].startswith("pass")
    if outcome.problem:
        assert "2 ranks on cpu over gloo  fail    rank 1 was to shard a model: it broke" in said
        assert "A first step" not in said
    else:
        assert "2 ranks on cpu over gloo  pass    parameters differ by 2e-08 from" in said
        assert "each unit takes one all-gather and one copy" in said
        assert "gathered 4.16 kB and reduced 2.04 kB per rank" in said
    assert doctor.main(["--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (not outcome.problem)
    assert found["first_steps"][0]["transport"] == outcome.transport


@pytest.mark.alone
def test_nothing_is_started_on_request_or_where_a_part_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> selftest.SelfTest:
        raise AssertionError

    monkeypatch.setattr(selftest, "run", run)
    assert doctor.main(["--skip-self-test"]) == 0
    monkeypatch.setattr(doctor, "TORCH", (99, 0))
    assert doctor.main([]) == 1
    assert "fsdp2 needs 99.0 or newer" in capsys.readouterr().out


WITHOUT_TORCH = """if True:
    import sys
    sys.modules["torch"] = None
    from fsdp2.command.main import main
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.alone
def test_without_torch(tmp_path: Path) -> None:
    """The table is there all the same, and so are timelines."""
    Timeline().write(tmp_path / "step.json")
    for given, code, said in (
        (["doctor"], 1, "torch   fail    it is not installed; pip install torch"),
        (["trace", "summary", str(tmp_path / "step.json")], 0, "0 µs in all"),
        (["trace", "view", str(tmp_path / "step.json")], 0, "step.html"),
    ):
        command = [sys.executable, "-c", WITHOUT_TORCH, *given]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (code, ""), given
        assert said in done.stdout


@pytest.mark.ranks
def test_ranks_train_as_one_process_does() -> None:
    found = selftest.run("cpu", "gloo", 2, 120.0)
    assert found.problem == ""
    assert found.difference <= selftest.TOLERANCE
    assert found.transport == "packed"
    assert found.gathered_bytes > found.reduced_bytes > 0


def _fail(rank: int, folder: Path, *_: object) -> None:
    if rank:
        time.sleep(600)
    (folder / "0.stage").write_text("join the process group")
    raise RuntimeError("no such backend")


def _die(rank: int, *_: object) -> None:
    os.kill(os.getpid(), 9)


def _sleep(rank: int, *_: object) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("work", "ranks", "seconds", "said"),
    [
        (_fail, 2, 120.0, "rank 0 was to join the process group: RuntimeError: no such backend"),
        (_die, 1, 120.0, "rank 0 was to start Python: process 0 terminated with signal SIGKILL"),
        (
            *(_sleep, 2, 0.0),
            "the time was over: rank 0 was to start Python, rank 1 was to start Python",
        ),
    ],
)
@pytest.mark.ranks
def test_a_rank_that_does_not_end_well(work: Any, ranks: int, seconds: float, said: str) -> None:
    """Its problem is told, and the others are ended."""
    before = multiprocessing.active_children()
    assert selftest.run("cpu", "gloo", ranks, seconds, work).problem == said
    assert {*multiprocessing.active_children()} <= {*before}


@pytest.mark.alone
def test_parameters_that_differ_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's figure decides, also where it is no number."""
    for difference in (1e-3, float("nan")):
        facts = {"difference": difference, "transport": "packed"}
        monkeypatch.setattr(selftest, "start_processes", lambda *_, **__: mock.Mock(processes=[]))
        monkeypatch.setattr(selftest, "_wait", lambda *_: "")
        monkeypatch.setattr(selftest.json, "loads", lambda _, facts=facts: facts)
        monkeypatch.setattr(selftest.Path, "read_text", lambda _: "")
        found = selftest.run("cpu", "gloo", 1, 1.0)
        assert "from unsharded ones; 1e-05 is allowed" in found.problem
