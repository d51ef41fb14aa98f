"""A script of a guide that needs a library prints what its page says.

<!-- not run: it needs torchao, and tests/clients runs it -->
```python … ```  ```text … ```
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.clients

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
RANKS = 2
TIMEOUT_SECONDS = 300

_SCRIPT = re.compile(
    r"^<!-- not run: it needs (?P<package>\w+), and tests/clients runs it -->\n"
    r"```python\n(?P<code>.*?)^```\n.*?^```text\n(?P<output>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"\d+\.\d+")


@pytest.mark.parametrize("page", ["qlora.md"])
def test_the_script_prints_what_the_page_says(page: str, tmp_path: Path) -> None:
    script = _SCRIPT.search((GUIDES / page).read_text(encoding="utf-8"))
    assert script, f"{page} has no script that needs a library"
    if importlib.util.find_spec(script["package"]) is None:
        pytest.skip(f"{script['package']} is not installed")
    (tmp_path / "script.py").write_text(script["code"], encoding="utf-8")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        [*launcher, "--nproc-per-node", str(RANKS), "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert _NUMBER.sub("#", done.stdout) == _NUMBER.sub("#", script["output"])
    # Processors round differently, and training enlarges that.
    expected = [float(number) for number in _NUMBER.findall(script["output"])]
    printed = [float(number) for number in _NUMBER.findall(done.stdout)]
    assert printed == pytest.approx(expected, abs=0.1, rel=0.05)
