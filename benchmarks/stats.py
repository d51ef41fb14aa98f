"""Medians, ratios, tables and JSON files of the benchmarks. All times are milliseconds."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import quiet

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # seconds
_WATCH = quiet.Watch()  # from the import on


@dataclass(frozen=True)
class Summary:
    """Median, smallest and largest of one figure's per-round values."""

    median: float
    min: float
    max: float

    def __str__(self) -> str:
        return f"{self.median:.2f}  [{self.min:.2f} .. {self.max:.2f}]"


def summarize(values: Sequence[float]) -> Summary:
    return Summary(statistics.median(values), min(values), max(values))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Summary:
    """Round by round, numerator / denominator: drift of the machine cancels within a round."""
    return summarize([n / d for n, d in zip(numerator, denominator, strict=True)])


def added(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round, what `values` adds to `base`."""
    return [v - b for v, b in zip(values, base, strict=True)]


def print_ratios(ratios: Mapping[str, Summary]) -> None:
    """A line for each: what it says, its median and its range."""
    for label, summary in ratios.items():
        print(f"{label}: {summary.median:.3f}  [{summary.min:.3f} .. {summary.max:.3f}]")


def in_line(ratios: Mapping[str, Mapping[str, float]]) -> str:
    """Ratios of a file in one line: what each says, its median and its range."""
    return "; ".join(
        f"{label}: {found['median']:.2f} [{found['min']:.2f} .. {found['max']:.2f}]"
        for label, found in ratios.items()
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain text table: first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same as a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def environment(device_type: str) -> dict[str, Any]:
    """What a figure depends on besides the code: versions, processor, accelerator, command.

    "taken" is what others took of the machine up to now (`benchmarks/quiet.py`).
    """
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
    }
    taken = _WATCH.found()
    if taken is not None:
        facts["taken"] = asdict(taken)
    if device_type == "cuda" and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
    return facts


def describe(facts: dict[str, Any]) -> str:
    """One line of `environment`'s facts."""
    on = facts.get("gpu") or f"{facts['cpu']} ({facts['cores']} cores)"
    return f"torch {facts['torch']}, Python {facts['python']}, {on}"


def write_json(
    path: str | Path | None, device_type: str, results: object, *, timed: bool = True
) -> None:
    """Keep results and what they depend on in a file, if one was asked for.

    Prints whether the machine was quiet, unless nothing is ``timed``: call it last.
    """
    facts = environment(device_type)
    if not timed:
        facts.pop("taken", None)
    if "taken" in facts:
        print(f"\nmachine: {quiet.Found(**facts['taken'])}")
    if path is None:
        return
    content = {"environment": facts, "results": results}
    Path(path).write_text(json.dumps(content, indent=2, default=vars) + "\n")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
