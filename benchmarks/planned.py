"""Planned and measured steps of `train_lm` on this CPU, side by side, with every error.

    python benchmarks/planned.py                              # 12 configurations, 3 rounds
    python benchmarks/planned.py --rounds 5 --json FILE --machine this_machine.json

In every round the machine is calibrated, and then each configuration is trained. The plan knows the
median of each calibrated figure; a step's time is the median over rounds of a run's median. So both
are of the same hour: what else runs changes both. With ``--use FILE`` an older calibration counts.
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
from fsdp2.planning.calibrate import measure_cpu, median_of
from fsdp2.planning.hardware import load, write

RANKS = (1, 2, 4)
STEPS, STEPS_OF_MEDIUM = 80, 12
"""`train_lm` reports every tenth step of the former, and each of the latter."""

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


def planned(options: str, machine: Path) -> float:
    """Seconds of a step."""
    return train_lm.plan_step(parse([*options.split(), "--plan", str(machine)], None)).time.step


def measured(options: str) -> float:
    """Seconds of a step: the median over a run's reports but the first, which makes buffers."""
    steps = STEPS_OF_MEDIUM if "medium" in options else STEPS
    command = [sys.executable, "-m", train_lm.MODULE, *options.split(), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
    found = re.findall(r"^step .* ([\d,]+) tokens/s", done.stdout, flags=re.MULTILINE)
    assert len(found) > 2, done.stdout
    settings = parse(options.split(), None)
    tokens = settings.batch_size * settings.seq_len
    return statistics.median(tokens / float(rate.replace(",", "")) for rate in found[1:])


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
    parser.add_argument("--use", type=Path, help="a file of fsdp2 calibrate")
    parser.add_argument("--machine", type=Path, default=Path("this_machine.json"), help="written")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="configurations with these words")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    seconds: dict[str, list[float]] = {
        options: [] for options in CONFIGURATIONS if args.only in options
    }
    machines = []
    for turn in range(args.rounds):
        if args.use is None:
            machines.append(measure_cpu(RANKS))
        for options, found in seconds.items():
            found.append(measured(options))
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
    write(load(args.use) if args.use else median_of(machines), args.machine)
    rows = [
        Row(options, planned(options, args.machine), statistics.median(found))
        for options, found in seconds.items()
    ]
    print(table(rows))
    if args.json is not None:
        data = [{**asdict(row), "error": row.error, "rounds": seconds[row.options]} for row in rows]
        args.json.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
