"""Tables, colours and the line of progress."""

from __future__ import annotations

import io
import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from fsdp2.command import output
from fsdp2.tracing import summaries

pytestmark = pytest.mark.alone

TABLE = "name  bytes\n----  -----\na         1\n\nname again\n"


class Terminal(io.StringIO):
    """A stream that somebody looks at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def _colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has set."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("_colours")
def test_heads_of_tables_are_bold_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    output.tell(False, None, TABLE)
    assert terminal.getvalue() == TABLE.replace("name  bytes", "\x1b[1mname  bytes\x1b[0m")


@pytest.mark.usefixtures("_colours")
@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_are_left_out_on_request(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv(name, value)
    output.tell(False, None, TABLE)
    assert output.paint("pass", "pass") == "pass"
    assert terminal.getvalue() == TABLE


def test_a_file_has_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    output.tell(False, None, TABLE)
    assert capsys.readouterr().out == TABLE


def test_columns_of_words_are_to_the_left() -> None:
    rows = [["a", "long word", "1"], ["bb", "x", "10"]]
    assert summaries.table(["n", "text", "count"], rows, left=2) == [
        *("n   text       count", "--  ---------  -----"),
        *("a   long word      1", "bb  x             10"),
    ]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass
    class Facts:
        path: Path
        sizes: tuple[int, ...]

    output.tell(True, {"facts": Facts(Path("a"), (1, 2))}, "words")
    assert json.loads(capsys.readouterr().out) == {"facts": {"path": "a", "sizes": [1, 2]}}


# ---- progress


@pytest.mark.usefixtures("_colours")
def test_progress_is_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    line = output.ProgressLine("verify run", stream)
    line.bytes(0, 0)
    line.bytes(500_000, 1_000_000)
    line.draw()
    bar = "#" * 12 + "." * 12
    assert stream.getvalue() == f"\r\x1b[Kverify run  0 s  [{bar}]  50%  500.00 kB of 1.00 MB"
    with line:
        pass
    assert stream.getvalue().endswith("\r\x1b[K")


def test_progress_is_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    stream = Terminal()
    line = output.ProgressLine("a title that is long", stream)
    line.draw()
    assert stream.getvalue() == "\r\x1b[Ka title tha"


@pytest.mark.usefixtures("_colours")
def test_progress_is_drawn_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread, after `PATIENCE`; it ends with the block."""
    monkeypatch.setattr(output, "PATIENCE", 0.0)
    drawn, stream = threading.Event(), Terminal()
    line = output.ProgressLine("plan", stream)
    monkeypatch.setattr(line, "draw", drawn.set)
    before = threading.active_count()
    with line:
        assert drawn.wait(60)
    assert threading.active_count() == before


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_short_work_and_files_see_none(kind: type[io.StringIO]) -> None:
    stream = kind()
    with output.ProgressLine("plan", stream) as line:
        line.say("soon done")
    assert stream.getvalue() == ""
