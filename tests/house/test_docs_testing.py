"""The code of docs/testing.md runs, and shows what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.alone

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def test_the_pages_code_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["gathers"]
