"""benchmarks/users.py: that it runs, and the collectives of each row. No time is asserted here."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks import users
from benchmarks.harness import ROOT

pytestmark = pytest.mark.extended

QUESTIONS = {"evaluation": users.BATCHES, "generation": users.TOKENS, "accumulation": 2}
"""Forwards of a row that may begin with one small all-reduce: whether shards were written."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all rows: measured once."""
    path = tmp_path_factory.mktemp("users") / "found.json"
    given = ["--size=32,2,8", "--rounds=1", "--seconds=0.001", "--compiler=eager", f"--json={path}"]
    command = [sys.executable, "-m", "benchmarks.users", *given]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text())["results"]


@pytest.mark.parametrize("name", users.ROWS)
def test_no_row_has_more_collectives_than_torchs(name: str, results: dict[str, Any]) -> None:
    ours, theirs = (results["rows"][name]["collectives"][api] for api in ("fsdp2", "torch"))
    for kind in ("all_gather", "reduce_scatter"):
        assert ours.get(kind, 0) <= theirs.get(kind, 0), kind
    questions = max((n for row, n in QUESTIONS.items() if name.startswith(row)), default=0)
    assert sum(ours.values()) <= sum(theirs.values()) + questions


def test_rows_have_what_their_names_say(results: dict[str, Any]) -> None:
    """The root and two blocks: twice each in a step, but the root once; once with kept units."""
    counts = {name: row["collectives"] for name, row in results["rows"].items()}
    for api in users.APIS:
        assert counts["training"][api] == {"all_gather": 5, "reduce_scatter": 3}
        assert counts["training, `reshard_after_forward=False`"][api]["all_gather"] == 3
        assert counts["training, HSDP of 2 x 2 ranks"][api]["all_reduce"] == 3
        assert counts["`full_tensor()` of each parameter"][api] == {"all_gather": 21}
        skipped = counts["accumulation, `set_requires_gradient_sync(False)`"][api]
        assert skipped["reduce_scatter"] == 3
        assert counts["accumulation, two backwards"][api]["reduce_scatter"] == 6
        assert counts["AdamW (fused)"][api] == {}


def test_results_are_tables_and_sentences(results: dict[str, Any]) -> None:
    assert results["ratios"].keys() == users.ROWS.keys()
    assert all(found["median"] > 0 for found in results["ratios"].values())
    shown = users.page_table(results)
    assert "2 blocks of width 32" in shown
    assert shown.count("\n|") == 2 + len(users.ROWS)
    for prefixes in users.SPOKEN_OF.values():
        least, most = users.extremes(prefixes, results).split(" to ")
        assert 0 < float(least) <= float(most)
    worst = users.worst(("",), results).median
    assert worst == max(found["median"] for found in results["ratios"].values())
