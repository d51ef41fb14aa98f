"""The schedule of docs/streams.md: what the page says is what the paper says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import streams

PAGE = Path(__file__).parents[2] / "docs" / "streams.md"


def test_the_pages_table_is_the_schedules() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| ([\w-]+) \| ([\w -]+) \| (\d+) \|$", text, re.MULTILINE)
    shown = {(lane, on, order.strip(), int(count)) for lane, on, order, count in rows}
    assert shown == set(streams.orders(streams.schedule()))


def test_two_units_are_gathered_at_most() -> None:
    gathered = [m.bytes.get("gathered", 0) for m in streams.schedule().memory]
    assert max(gathered) == 2 * streams.GATHERED
    assert gathered[-1] == gathered[0] - streams.GATHERED * bool(gathered[0]) == 0


def test_it_writes_a_timeline_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert streams.main(["--to", str(tmp_path / "streams.json")]) == 0
    assert (tmp_path / "streams.html").is_file()
    assert "| all-gather | copy-in |" in capsys.readouterr().out
