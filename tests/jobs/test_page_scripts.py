"""Whole scripts of README and of the guides print what their page says.

A comment right before a block of Python says that it is a script, under which name, and on how many
ranks; the next block of text is its output:

    <!-- script: train.py, 2 ranks -->
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 150

_SCRIPT = re.compile(
    r"^<!-- script: (?P<name>\w+\.py), (?P<ranks>\d(?: then \d)*) ranks? -->\n"
    r"```python\n(?P<code>.*?)^```\n(?P<between>.*?)^```text\n(?P<output>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class Script:
    """A script of a page, the commands that the page gives for it, and what they print."""

    page: str
    name: str
    ranks: tuple[int, ...]
    code: str
    command: str
    output: str


def _scripts(page: Path) -> list[Script]:
    text = page.read_text(encoding="utf-8")
    marks = text.count("\n<!-- script:")
    name = page.relative_to(ROOT).as_posix()
    found = [
        Script(name, *(kind(part) for kind, part in zip(KINDS, match.groups(), strict=True)))
        for match in _SCRIPT.finditer(text)
    ]
    assert len(found) == marks, f"{name} has {marks} marks of scripts, and {len(found)} scripts"
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(" then "))


KINDS = (str, _numbers, str, str, str)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = {f"{script.page}:{script.name}": script for page in PAGES for script in _scripts(page)}


@pytest.mark.alone
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_has_the_command(name: str) -> None:
    script = SCRIPTS[name]
    for ranks in script.ranks:
        assert f"torchrun --nproc-per-node {ranks} {script.name}" in script.command


@pytest.mark.extended
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    (tmp_path / script.name).write_text(script.code, encoding="utf-8")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    stdout = ""
    for ranks in script.ranks:
        command = [*launcher, "--nproc-per-node", str(ranks), script.name]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
        assert done.returncode == 0, done.stderr
        stdout += done.stdout
    assert _NUMBER.sub("#", stdout) == _NUMBER.sub("#", script.output)
    # Processors round differently, and training enlarges that.
    expected = [float(number) for number in _NUMBER.findall(script.output)]
    printed = [float(number) for number in _NUMBER.findall(stdout)]
    assert printed == pytest.approx(expected, abs=0.1, rel=0.05)
