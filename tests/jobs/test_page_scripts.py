"""Whole scripts of README and of the guides print what their page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common import page_scripts

pytestmark = pytest.mark.ranks

SCRIPTS = page_scripts.SCRIPTS


@pytest.mark.alone
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_has_the_command(name: str) -> None:
    script = SCRIPTS[name]
    for ranks in script.ranks:
        assert f"torchrun --nproc-per-node {ranks} {script.name}" in script.command


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name, script in SCRIPTS.items() if not script.needs])
def test_the_script_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    SCRIPTS[name].check(tmp_path)
