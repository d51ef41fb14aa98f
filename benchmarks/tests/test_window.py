"""Exposed time by window, of schedules with a closed form; and the table of the docs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import window
from benchmarks.window import Unit, ours, torchs
from benchmarks.workers import ROOT

PAIRS = 5
SMALL, LARGE = Unit(1, 2, 4), Unit(6, 8, 16)  # the gather of the large one: longer than a compute
ALTERNATING = [SMALL, LARGE] * PAIRS


@pytest.mark.parametrize("gather", [1, 2, 3, 5])
def test_equal_units(gather: float) -> None:
    """No window helps: exposed are the first gather, and what each takes longer than a compute."""
    units = [Unit(gather, 2, 4)] * 6
    forward = gather + 5 * max(0, gather - 2)
    backward = gather + 5 * max(0, gather - 4)
    for found in (torchs(units), *(ours(units, size, separate=True) for size in window.WINDOWS)):
        assert (found.forward, found.backward) == (forward, backward)


def test_reductions_queue_behind_gathers_of_their_process_group() -> None:
    """Then compute waits for a reduction, and so for what is gathered three units ahead."""
    units = [Unit(3, 2, 4)] * 6
    assert ours(units, 2).backward == ours(units, 3, separate=True).backward == 3
    assert ours(units, 3, buffers=2).backward == 3
    last_gathered_ahead, second_is_over = 4 * 3, 3 + 2 * 4
    assert ours(units, 3).backward == 3 + last_gathered_ahead - second_is_over


def test_a_large_unit_behind_a_small_one() -> None:
    """With one unit ahead each gather has one compute to hide behind, with two the one before too.

    In backward the large unit is the first.
    """
    one = ours(ALTERNATING, 1)
    short = LARGE.gather - SMALL.forward
    assert one.forward == SMALL.gather + PAIRS * short
    assert one.backward == LARGE.gather + (PAIRS - 1) * (LARGE.gather - SMALL.backward)
    for size in (2, 3):  # only the first large unit has nothing before the small one
        more = ours(ALTERNATING, size)
        assert more.forward == SMALL.gather + short
        assert more.backward == LARGE.gather


def test_torchs_rule_is_a_window_of_two_in_forward_and_of_one_in_backward() -> None:
    for units in (ALTERNATING, [LARGE, SMALL] * PAIRS, [SMALL, SMALL, LARGE] * PAIRS):
        found = torchs(units)
        assert found.forward == ours(units, 2).forward
        assert found.backward == ours(units, 1).backward


def test_two_small_units_before_a_large_one() -> None:
    """Each further unit ahead hides more, until all is hidden but the beginning."""
    units = [Unit(1, 2, 2), Unit(1, 2, 2), Unit(8, 12, 24)] * PAIRS
    first = 1 + (1 + 8 - 2 * 2)  # of the first large one two gathers are behind the beginning
    rest = PAIRS - 1
    forward = [1 + PAIRS * (8 - 2), first + rest * (8 - 2 * 2), first]
    assert [ours(units, size).forward for size in window.WINDOWS] == forward
    backward = [8 + rest * (8 - 2), 8 + rest * (8 - 2 * 2), 8]
    assert [ours(units, size).backward for size in window.WINDOWS] == backward


def test_the_table_of_the_docs() -> None:
    """docs/performance.md has what the command prints."""
    lines = window.table(window.measure(blocks=32, tokens=8192))
    page = (ROOT / "docs" / "performance.md").read_text()
    assert "\n".join(lines) in page


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "window.json"
    assert window.main(["--blocks", "2", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["results"]
    printed = capsys.readouterr().out
    assert printed.startswith("\n".join(window.table(rows)) + "\n")
