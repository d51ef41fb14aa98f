"""ZeRO's stages hold and send what theory says, line by line, on four ranks."""

from __future__ import annotations

import pytest

from benchmarks.zero_stages import LINES, STRATEGIES, measure, theory

SLACK = 0.03
"""Bytes a parameter: norms of losses, counters of steps, activations, padding of small shards."""


def test_unsharded_is_sixteen_bytes_a_parameter() -> None:
    lines = theory("replicated")
    kinds = ("weight", "gradient", "master", "momentum", "variance")
    assert [lines[kind] for kind in kinds] == [2, 2, 4, 4, 4]


@pytest.mark.parametrize(
    "strategy",
    [
        name if name == "zero1" else pytest.param(name, marks=pytest.mark.extended)
        for name in STRATEGIES
    ],
)
def test_each_line_is_what_theory_says(strategy: str) -> None:
    found, expected = measure(strategy, dim=256), theory(strategy)
    assert {line: found[line] for line in LINES} == pytest.approx(expected, abs=SLACK)
    kept = expected["weight"] if strategy == "zero1" else 0.0
    states = sum(expected[line] for line in ("master", "momentum", "variance"))
    assert found["live"] == pytest.approx(states + kept, abs=SLACK)
