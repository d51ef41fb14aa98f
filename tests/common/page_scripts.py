"""Whole scripts of README and of the guides, and what their pages say that they print.

A comment right before a block of Python says that it is a script, under which name, on how many
ranks, and which library it needs besides; the next block of text is its output. It may run several
times in one folder:

    <!-- script: train.py, 2 ranks -->
    <!-- script: resume.py, 2 then 3 ranks -->
    <!-- script: qlora.py, 2 ranks, needs torchao -->

A page may include the script from a file, as the site does: ``--8<-- "recipes/fit.py"``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 150

_SCRIPT = re.compile(
    r"^<!-- script: (?P<name>\w+\.py), (?P<ranks>\d(?: then \d)*) ranks?"
    r"(?:, needs (?P<needs>\w+))? -->\n```(?:python| \{ \.python \})\n"
    r"(?P<code>.*?)^```\n(?P<command>.*?)^```text\n(?P<output>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_INCLUDED = re.compile(r'^--8<-- "(.+)"\n', re.MULTILINE)
_NUMBER = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class Script:
    """A script of a page, the commands that the page gives for it, and what they print."""

    page: str
    name: str
    ranks: tuple[int, ...]
    needs: str | None
    code: str
    command: str
    output: str

    def check(self, folder: Path) -> None:
        """Run it in a folder, and compare what it prints with the page."""
        (folder / self.name).write_text(self.code, encoding="utf-8")
        launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        stdout = ""
        for ranks in self.ranks:
            command = [*launcher, "--nproc-per-node", str(ranks), self.name]
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
            )
            assert done.returncode == 0, done.stderr
            stdout += done.stdout
        assert _NUMBER.sub("#", stdout) == _NUMBER.sub("#", self.output)
        # Processors round differently, and training enlarges that.
        expected = [float(number) for number in _NUMBER.findall(self.output)]
        printed = [float(number) for number in _NUMBER.findall(stdout)]
        assert printed == pytest.approx(expected, abs=0.1, rel=0.05)


def _scripts(page: Path) -> list[Script]:
    text = _INCLUDED.sub(
        lambda found: (ROOT / "docs" / found[1]).read_text(encoding="utf-8"),
        page.read_text(encoding="utf-8"),
    )
    marks = text.count("\n<!-- script:")
    name = page.relative_to(ROOT).as_posix()
    found = []
    for match in _SCRIPT.finditer(text):
        ranks = tuple(int(number) for number in match["ranks"].split(" then "))
        found.append(Script(name, **{**match.groupdict(), "ranks": ranks}))
    assert len(found) == marks, f"{name} has {marks} marks of scripts, and {len(found)} scripts"
    return found


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = {f"{script.page}:{script.name}": script for page in PAGES for script in _scripts(page)}
