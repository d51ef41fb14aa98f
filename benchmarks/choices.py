"""Settings for a slow network, and what each was measured to bring and to cost: a guide's table.

benchmarks/results/*-slow_link*.json  ──> how many times as fast as torch's FSDP2
benchmarks/results/*-accuracy.json    ──> held-out loss by that of exact runs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import accuracy, slow_link, stats
from benchmarks.files import RESULTS, newest

SPEEDS = {
    "slow_link": "200 Mbit/s",
    "slow_link_accumulated": "200 Mbit/s, 4 micro-batches",
    "slow_link_gigabit": "1 Gbit/s",
    "slow_link_pairs": "200 Mbit/s, nodes of 2 ranks, 4 micro-batches",
}
"""Columns, by the run that fills them."""


@dataclass(frozen=True)
class Choice:
    """A row.

    Attributes:
        setting: what to call.
        variant: its name in `slow_link.VARIANTS`.
        wire: its name in `fsdp2.examples.wire.FORMATS`; none where numbers are those of "exact".
        sent: bytes per parameter and optimizer step, of one micro-batch and of four: bf16
            parameters, fp32 reduction, units that are freed after forward.
    """

    setting: str
    variant: str
    wire: str
    sent: tuple[float, float]


def _gathered_twice(weights: float, gradients: float) -> tuple[float, float]:
    return (2 * weights + gradients, 8 * weights + gradients)


def _gathered_once(weights: float, gradients: float) -> tuple[float, float]:
    return (weights + gradients,) * 2


BYTE, NIBBLE = 1 + 4 / 128, 1 / 2 + 2 / 64
"""Bytes per number of 8 and of 4 bits, with its part of a block's scale."""

CHOICES = (
    Choice("none", "fsdp2", "", _gathered_twice(2, 4)),
    Choice('`reduce="fp32"`', "fp32 sums", "", _gathered_twice(2, 4)),
    Choice(
        '`Levels` (or `set_keep_rows(True)`), and `reduce="fp32"`',
        "levels and fp32 sums",
        "",
        _gathered_once(2, 4),
    ),
    Choice('`reduce="bf16"`', "bf16 sums", "bf16-sums", _gathered_twice(2, 2)),
    Choice('`gather="int8", reduce="int8"`', "8 bit", "int8", _gathered_twice(BYTE, BYTE)),
    Choice(
        '`gather="int4", differences=True, reduce="int4", feedback=True, rotate=True`',
        "4 bit",
        "int4",
        _gathered_once(NIBBLE, NIBBLE),
    ),
)


def table(folder: Path = RESULTS) -> str:
    """In Markdown."""
    speeds = {run: file.results for run in SPEEDS if (file := newest(run, folder)) is not None}
    found = newest("accuracy", folder)
    losses = {} if found is None else found.results["losses"]
    header = (
        "setting",
        "bytes per parameter and step (4 micro-batches)",
        *(f"speed at {SPEEDS[run]}" for run in speeds),
        "held-out loss",
    )
    return stats.markdown(header, [_row(choice, speeds, losses) for choice in CHOICES])


def _row(choice: Choice, speeds: dict[str, Any], losses: accuracy.Losses) -> Sequence[str]:
    one, four = choice.sent
    return (
        choice.setting,
        f"{one:.1f} ({four:.1f})",
        *(_speed(results, choice.variant) for results in speeds.values()),
        "as exact" if not choice.wire else _loss(losses, choice.wire),
    )


def _speed(results: Any, variant: str) -> str:
    found = results["ratios"].get(f"torch / {variant}")
    return "" if found is None else f"{found['median']:.2f}"


def _loss(losses: accuracy.Losses, wire: str) -> str:
    ratio = accuracy.ratio(losses, wire)
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


assert {choice.variant for choice in CHOICES} <= slow_link.VARIANTS.keys()
