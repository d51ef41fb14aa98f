"""`fsdp2 checkpoint`: removing, and folders that are none."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from torch import nn

from fsdp2 import checkpoint
from fsdp2.command.checkpoint import main

pytestmark = pytest.mark.alone


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1, 2 and 3, and what a crash has left of step 4."""
    for step in (1, 2, 3):
        checkpoint.save(tmp_path / "run", nn.Linear(2, 2), step=step)
    (tmp_path / "run" / ".saving-step-00000004").mkdir()
    return tmp_path / "run"


class Answer(io.StringIO):
    """Somebody at a terminal."""

    def isatty(self) -> bool:
        return True


def test_steps_are_removed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", str(run), "--step", "1", "--step", "3", "--yes"]) == 0
    assert capsys.readouterr().out == "removed step-00000001\nremoved step-00000003\n"
    assert checkpoint.steps(run) == [2]
    assert main(["rm", str(run), "--unfinished", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": [".saving-step-00000004"]}
    assert checkpoint.unfinished(run) == []
    assert main(["rm", str(run), "--unfinished", "--yes"]) == 2
    assert "has no unfinished data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "left"), [("y\n", [2, 3]), ("YES\n", [2, 3]), ("n\n", [1, 2, 3]), ("", [1, 2, 3])]
)
def test_it_asks_before(
    answer: str,
    left: list[int],
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", Answer(answer))
    assert main(["rm", str(run), "--step", "1"]) == (0 if left == [2, 3] else 2)
    assert checkpoint.steps(run) == left
    asked = capsys.readouterr().err
    assert asked.startswith("remove step 1 (")
    assert f" kB) of '{run}'? [y/N] " in asked


def test_all_that_is_named_is_there_or_nothing_goes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rm", str(run), "--step", "1", "--step", "9", "--yes"]) == 2
    assert "has no complete step 9; load one of [1, 2, 3]" in capsys.readouterr().err
    assert checkpoint.steps(run) == [1, 2, 3]


@pytest.mark.parametrize("command", ["ls", "show", "verify", "rm"])
@pytest.mark.parametrize("there", [False, True])
def test_what_is_no_checkpoint_is_refused(
    command: str, there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence on stderr, and 2; also where there is a folder of other things."""
    folder = tmp_path / "photos"
    if there:
        folder.mkdir()
        (folder / "me.png").write_bytes(b"")
    more = ["--step", "1", "--yes"] if command == "rm" else []
    assert main([command, str(folder), *more]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"fsdp2 checkpoint {command}: '{folder}' has no complete step; pass the folder that "
        f"save() was given [ckpt-none]\n"
    )
    assert not there or (folder / "me.png").is_file()


def test_ls_goes_on_after_a_broken_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "step-00000002" / "manifest.json").write_text("{}")
    assert main(["ls", str(run)]) == 1
    said = capsys.readouterr().out
    assert "\n1 " in said
    assert "\n3 " in said
    path = run / "step-00000002" / "manifest.json"
    assert f"\nbroken: step 2, '{path}' is not the manifest of a step; " in said
    assert main(["ls", str(run), "--json"]) == 1
    assert list(json.loads(capsys.readouterr().out)["broken"]) == ["2"]


def test_verify_in_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out == "3 steps, every byte is unchanged\n"
    (run / "step-00000002" / "__0_0.distcp").unlink()
    assert main(["verify", str(run), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [1, 2, 3]
    assert found["wrong"] == [f"{run}/step-00000002/__0_0.distcp: it is missing"]


def test_export_and_convert_in_json(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == ["model.safetensors"]
    assert main(["convert", str(run), str(tmp_path / "one.pt"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["from_kind"], found["to_kind"], found["step"]) == ("steps", "torch", 3)
