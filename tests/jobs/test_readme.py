"""README's script, as a reader copies it from the page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

README = Path(__file__).parents[2] / "README.md"
TIMEOUT_SECONDS = 120


def block(language: str, holds: str) -> str:
    """The block of code on the page that has these words."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    (only,) = (text for text in found if holds in text)
    return only


def losses(text: str) -> dict[str, float]:
    return {step: float(loss) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", text)}


@pytest.mark.extended
def test_the_script_prints_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("python", "fully_shard"))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    command = [*launcher, "--nproc-per-node", "2", str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr
    expected = losses(block("text", "loss"))
    assert len(expected) == 6
    # Processors round differently, and a hundred steps enlarge that.
    assert losses(done.stdout) == pytest.approx(expected, abs=0.1)
