"""What pages quote of the files in benchmarks/results/: tables.

python -m benchmarks.report                                  # write all of it anew, and figures
python -m benchmarks.report --measure host_cost,instructions   # measure those first

benchmarks/results/*.json ── files.newest ──> targets ──> README.md, docs/
"""

from __future__ import annotations

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
    inline,
    muon,
    optimizer,
    slow_link,
    stats,
    targets,
    users,
)
from benchmarks.files import RESULTS, ROOT, RUNS, machine, newest

PAGES = tuple(
    ROOT / path
    for path in (
        *("docs/benchmarks.md", "README.md", "docs/compile.md"),
        *("docs/guides/elastic.md", "docs/guides/slow_network.md", "docs/guides/optimizers.md"),
        *("docs/guides/fault_tolerance.md", "docs/compat.md"),
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


SLOW = [run for run in RUNS if run.startswith("slow_link")]

MADE: dict[str, Callable[[Path], str]] = {
    "targets": targets.table,
    "blocks": partial(targets.blocks, "blocks"),
    "instructions": partial(targets.blocks, "instructions"),
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
    "compiled": partial(targets.quoted, "docs/compile.md"),
}
"""What stands between marks on the pages."""


def filled(text: str, folder: Path = RESULTS) -> str:
    """A page with what stands between ``<!-- targets -->`` and ``<!-- end -->`` made anew.

    Each name of `MADE` likewise, and figures in sentences (`benchmarks.inline`).
    """

    def fill(mark: re.Match[str]) -> str:
        return f"<!-- {mark['name']} -->\n{MADE[mark['name']](folder)}\n<!-- end -->"

    marks = "|".join(MADE)
    made = re.sub(rf"<!-- (?P<name>{marks}) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)
    return inline.filled(made, folder)


def write_tables() -> Sequence[Path]:
    """Write what the pages have of the files."""
    for path in PAGES:
        path.write_text(filled(path.read_text()))
    return PAGES
