"""Numbers that may only fall: how much a reader or a step must go through, in one table.

    pytest -n0 tests/house tests/schedule/test_paths.py benchmarks/tests/test_visits.py \\
        --lower-bounds    # writes what has fallen

`upper_bounds.json` has them, by name. A number above its bound fails the test that measures it; one
below is a reason to run that command.
"""

from __future__ import annotations

import json
from pathlib import Path

TABLE = Path(__file__).with_suffix(".json")

lowers = False
"""Whether bounds are lowered to what is measured: ``--lower-bounds``."""


def bounds() -> dict[str, dict[str, int]]:
    """All bounds, by what is measured."""
    found: dict[str, dict[str, int]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def hold(name: str, **measured: int) -> None:
    """Fail if any number is above its bound."""
    table = bounds()
    bound = table[name]
    assert measured.keys() == bound.keys(), f"{name} has bounds of {', '.join(bound)}"
    above = {key: value for key, value in measured.items() if value > bound[key]}
    assert not above, f"{name}: {above} above {bound}"
    if lowers and measured != bound:
        table[name] = measured
        TABLE.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
