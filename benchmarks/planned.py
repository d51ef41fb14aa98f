"""Planned and measured steps of `train_lm`, side by side, with every error.

    python -m fsdp2.plan calibrate -o this_machine.json
    python benchmarks/planned.py this_machine.json            # 12 configurations on this CPU
    python benchmarks/planned.py this_machine.json --rounds 5 --json FILE

Each configuration is trained in every round, one after the other, and its step time is the median
over rounds of the speed that `train_lm` prints. The plan is of the same options. The machine's file
must be measured in the same hour: what else runs changes both.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from fsdp2.examples import train_lm
from fsdp2.examples.options import parse

STEPS = 12

CONFIGURATIONS = (
    "--preset tiny --nproc 1",
    "--preset tiny --nproc 2",
    "--preset tiny --nproc 4",
    "--preset small --nproc 1",
    "--preset small --nproc 2",
    "--preset small --nproc 4",
    "--preset small --nproc 2 --grad-accum 2",
    "--preset small --nproc 2 --activation-checkpointing",
    "--preset small --nproc 2 --reshard-after-forward never",
    "--preset small --nproc 4 --replicate 2",
    "--preset medium --nproc 1 --batch-size 4 --seq-len 64",
    "--preset medium --nproc 2 --batch-size 4 --seq-len 64",
)


@dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        options: of `train_lm`.
        planned: seconds of a step.
        measured: the same, the median over rounds.
    """

    options: str
    planned: float
    measured: float

    @property
    def error(self) -> float:
        """Of the plan, as a part of what was measured."""
        return self.planned / self.measured - 1


def planned(options: str, machine: str) -> float:
    """Seconds of a step."""
    return train_lm.plan_step(parse([*options.split(), "--plan", machine], None)).time.step


def measured(options: str) -> float:
    """Seconds of a step of one run."""
    command = [sys.executable, "-m", train_lm.MODULE, *options.split(), "--steps", str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    found = re.search(r"training speed\D*([\d,]+) tokens/s", done.stdout)
    assert found is not None, done.stdout
    settings = parse(options.split(), None)
    tokens = settings.batch_size * settings.seq_len
    return tokens / float(found[1].replace(",", ""))


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's, of values without ties."""
    count = len(pairs)
    places = [
        {value: place for place, value in enumerate(sorted(column))}
        for column in zip(*pairs, strict=True)
    ]
    squares = sum((places[0][a] - places[1][b]) ** 2 for a, b in pairs)
    return 1 - 6 * squares / (count * (count**2 - 1))


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| options | planned, ms | measured, ms | error |", "|---|---|---|---|"]
    lines += [
        f"| `{row.options}` | {row.planned * 1e3:.1f} | {row.measured * 1e3:.1f} "
        f"| {row.error:+.0%} |"
        for row in rows
    ]
    worst = max(abs(row.error) for row in rows)
    within = sum(abs(row.error) <= 0.1 for row in rows)
    lines.append("")
    lines.append(f"{within} of {len(rows)} within 10 %; the worst is off by {worst:.0%}.")
    if len(rows) > 1:
        found = rank_correlation([(row.planned, row.measured) for row in rows])
        lines.append(f"Rank correlation {found:.2f}.")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("machine", help="a file of python -m fsdp2.plan calibrate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    seconds: dict[str, list[float]] = {options: [] for options in CONFIGURATIONS}
    for _ in range(args.rounds):
        for options, found in seconds.items():
            found.append(measured(options))
    rows = [
        Row(options, planned(options, args.machine), statistics.median(found))
        for options, found in seconds.items()
    ]
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
