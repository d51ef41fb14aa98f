"""What pages quote of the files in benchmarks/results/, and figures of them.

python -m benchmarks.report                                    # write all of it anew
python -m benchmarks.report --measure host_cost,instructions   # measure those first

benchmarks/results/*.json ── files.newest ──> MADE ──> README.md, docs/
                                         └──> figures ──> docs/figures
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import (
    accuracy,
    choices,
    elastic,
    ema,
    faults,
    group_faults,
    muon,
    optimizer,
    slow_link,
    stats,
    targets,
    users,
)
from benchmarks.files import RESULTS, ROOT, RUNS, machine, measure, newest

PAGES = tuple(
    ROOT / path
    for path in (
        *("docs/benchmarks.md", "README.md"),
        *("docs/guides/elastic.md", "docs/guides/slow_network.md", "docs/guides/optimizers.md"),
        "docs/guides/fault_tolerance.md",
    )
)


def machines(folder: Path = RESULTS) -> str:
    """What the newest files' figures depend on besides the code: a line for each machine."""
    files = [file for file in (newest(run, folder) for run in RUNS) if file is not None]
    lines = {f"- {machine(e)}: {stats.describe(e)}" for e in (file.environment for file in files)}
    return "\n".join(sorted(lines))


def tables(table: Callable[[Any], str], runs: Sequence[str], folder: Path = RESULTS) -> str:
    """The tables of runs, one after the other; of each its newest file."""
    files = [file for run in runs if (file := newest(run, folder)) is not None]
    return "\n\n".join(
        f"{file.where}{'' if file.quiet else ', on a busy machine'}; {table(file.results)}"
        for file in files
    )


def words(figure: Callable[[Any], str], run: str, folder: Path = RESULTS) -> str:
    """A figure inside of a sentence."""
    file = newest(run, folder)
    return targets.ABSENT if file is None else figure(file.results)


def _ratio(label: str, results: Any) -> str:
    """The median of a ratio that the benchmark wrote, with its smallest and largest round."""
    found = targets.as_summary(results["ratios"][label])
    return f"{found.median:.2f} [{found.min:.2f} .. {found.max:.2f}]"


SLOW = [run for run in RUNS if run.startswith("slow_link")]
_ADDED = partial(_ratio, f"llama: {targets.ADDED.format('fsdp2')}")

MADE: dict[str, Callable[[Path], str]] = {
    "targets": targets.table,
    "instructions": targets.instructions,
    "machines": machines,
    "slow links": partial(tables, slow_link.page_table, SLOW),
    "choices": choices.table,
    "elastic": partial(tables, elastic.page_table, ["elastic"]),
    "offload": partial(tables, optimizer.page_table, ["optimizer_offload"]),
    "group faults": partial(tables, group_faults.page_table, ["group_faults"]),
    "faults": partial(tables, faults.page_table, ["faults"]),
    "muon": partial(tables, muon.page_table, ["muon", "muon_losses"]),
    "ema": partial(tables, ema.page_table, ["ema", "ema_small"]),
    "users": partial(tables, users.page_table, ["users"]),
    "losses": partial(tables, accuracy.page_table, ["accuracy"]),
    "added, fp32": partial(words, _ADDED, "blocks"),
    "added, mixed": partial(words, _ADDED, "blocks-mixed"),
    "gloo": partial(words, partial(_ratio, "fsdp2 / torch"), "gloo"),
    **{
        name: partial(words, partial(users.extremes, prefixes), "users")
        for name, prefixes in users.SPOKEN_OF.items()
    },
}
"""What stands between marks on the pages: `<!-- gloo -->0.81<!-- end -->`."""

_MARK = re.compile(
    rf"(?P<mark><!-- (?P<name>{'|'.join(MADE)}) -->\n?).*?(?P<end>\n?<!-- end -->)", re.DOTALL
)


def filled(text: str, folder: Path = RESULTS) -> str:
    """A page with what stands between marks made anew."""
    return _MARK.sub(lambda found: found["mark"] + MADE[found["name"]](folder) + found["end"], text)


def write() -> list[Path]:
    """Write what the pages quote, and figures anew; returns the paths."""
    from benchmarks import figures  # needs matplotlib

    for path in PAGES:
        path.write_text(filled(path.read_text()))
    return [*PAGES, *figures.write()]


def _runs(text: str) -> list[str]:
    runs = list(RUNS) if text == "all" else text.split(",")
    if unknown := set(runs) - set(RUNS):
        raise argparse.ArgumentTypeError(
            f"{', '.join(sorted(unknown))} not known; known are {', '.join(RUNS)}"
        )
    return runs


def main(arguments: list[str] | None = None) -> None:
    """Measure what is asked for, and write pages and figures."""
    parser = argparse.ArgumentParser(description="Tables and figures of benchmarks/results.")
    parser.add_argument(
        "--measure",
        type=_runs,
        default=[],
        metavar="RUNS",
        help=f"measure these first, comma list or all: {', '.join(RUNS)}",
    )
    options = parser.parse_args(arguments)
    for path in [*map(measure, options.measure), *write()]:
        print(path)


if __name__ == "__main__":
    main()
