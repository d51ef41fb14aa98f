"""benchmarks/muon.py: that it runs, and what it counts. No timing is asserted here."""

from __future__ import annotations

import pytest

from benchmarks import muon


@pytest.mark.extended
def test_a_step() -> None:
    given = ["--dim", "32", "--units", "3", "--rounds", "1", "--steps", "1"]
    result = muon.measure(muon.parse([*given, "--variants", "everywhere,fsdp2"]))
    facts = result["facts"]["fsdp2"]
    bf16 = 2 * 32 * (4 * 32 + 3 * 88) * 3
    assert facts["sent"] <= 1.1 * bf16  # half of all, there and back
    assert facts["whole"] <= 2
    assert facts["balance"] < 1.1
    assert result["ratios"].keys() == {"everywhere / fsdp2"}


def test_a_table_of_losses() -> None:
    losses = {"adamw": {"0": 2.5, "1": 2.25}, "muon": {"0": 2.0, "1": 1.5}}
    header, rows = muon.table({"losses": losses})
    assert header == ("optimizer", "seed 0", "seed 1", "mean")
    assert rows[1] == ("muon", "2.0000", "1.5000", "1.7500")
