"""docs/guides/command.md shows what the command prints."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
from torch import nn

from fsdp2 import checkpoint
from fsdp2.command import plan
from fsdp2.command.main import NAMES, main

pytestmark = pytest.mark.alone

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "command.md"

SHOWN = re.compile(r"^\$ fsdp2 (.+)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
"""A command and its output, which a line of "…" may end."""


def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    for step, loss in ((100, 3.21), (200, 2.87), (300, 2.75)):
        checkpoint.save("run", model, step=step, metric=loss)
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    shown = [found for block in blocks for found in SHOWN.findall(block)]
    assert len(shown) == text.count("\n$ ") == 12
    for given, expected in shown:
        with contextlib.suppress(SystemExit):  # as of --help
            main(given.split())
        printed = capsys.readouterr()
        head, cut, _ = expected.partition("…\n")
        said = printed.out + printed.err
        assert said[: len(head)] == head if cut else said == head, given


def test_pages_name_commands_and_options_that_exist() -> None:
    for page in (*PAGE.parents[1].rglob("*.md"), *PAGE.parents[2].glob("*.md")):
        text = page.read_text(encoding="utf-8").replace("\\\n", "")
        assert {*re.findall(r"(?:`|-m |\$ )fsdp2 ([a-z]+)", text)} <= {*NAMES}, page
        for given in re.findall(r"(?:`|^)fsdp2 plan ([^`#\n…]*)(?=`|#|\n)", text, re.MULTILINE):
            plan.parser().parse_args(given.split())
