"""Scripts of guides that need a library print what their page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common import page_scripts

pytestmark = pytest.mark.clients

SCRIPTS = {name: script for name, script in page_scripts.SCRIPTS.items() if script.needs}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    assert script.needs is not None
    pytest.importorskip(script.needs)
    script.check(tmp_path)
