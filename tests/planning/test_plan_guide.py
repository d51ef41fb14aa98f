"""The table of plans in the guide to memory is what `fsdp2 plan` says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp2.command import plan as command
from fsdp2.tracing.record import categories

pytestmark = pytest.mark.alone

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "out_of_memory.md"

COLUMNS = (
    (categories.ACTIVATIONS,),
    (categories.TEMPORARY,),
    (categories.GATHERED,),
    (categories.GRADIENTS, categories.REDUCTIONS),
    (categories.SHARDS, categories.OPTIMIZER),
)
"""The categories of the columns after the peak's."""


def _rows() -> dict[str, list[str]]:
    text = PAGE.read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- out of memory: plans -->\n(.*?)<!-- end -->", text, re.DOTALL)
    rows = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in table.splitlines()[2:]]
    return {row[0].strip("`").replace("none", ""): row[1:] for row in rows}


@pytest.mark.extended
@pytest.mark.parametrize("options", _rows())
def test_a_row_of_the_guide(options: str) -> None:
    given = command.parser().parse_args(
        ["llama-8b", "--ranks", "8", "--batch-size", "2", *options.split()]
    )
    peak = command.of_preset(given).memory.peak
    parts = [sum(peak.categories.get(name, 0) for name in names) for names in COLUMNS]
    assert [f"{nbytes / 1e9:.1f}" for nbytes in (peak.live, *parts)] == _rows()[options]
