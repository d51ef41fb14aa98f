"""benchmarks/ema.py: that it runs, and what its tables say. No timing is asserted here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ema

ROOT = Path(ema.__file__).resolve().parents[1]


@pytest.mark.extended
def test_a_run(tmp_path: Path) -> None:
    given = ["--units", "2", "--dim", "16", "--rounds", "1", "--json", str(tmp_path / "found")]
    command = [sys.executable, "-m", "benchmarks.ema", *given]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, stdout=subprocess.DEVNULL)
    results = json.loads((tmp_path / "found").read_text())["results"]
    assert results["rounds"].keys() == {*ema.EVERY, *ema.STEPPED}
    assert all(found["median"] > 0 for found in results["ratios"].values())
    assert "2 units of width 16" in ema.page_table(results)


def test_a_table_of_ratios() -> None:
    same = {"median": 0.25, "min": 0.125, "max": 0.5}
    ratios = {f"{update} / {step}": same for update in ema.EVERY for step in ema.STEPPED}
    shown = ema.page_table({"options": {"units": 3, "dim": 64}, "ratios": ratios})
    assert "| flat | 25.0% [12.5% .. 50.0%] | 25.0% [12.5% .. 50.0%] |" in shown
