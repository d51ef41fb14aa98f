"""What pages quote of the files in benchmarks/results/: tables of targets, and plots.

python -m benchmarks.report                                  # write and draw all of it anew
python -m benchmarks.report --measure host_cost,instructions   # measure those first

benchmarks/results/*.json ── files.newest ──> targets, PLOTS ──> README.md, docs/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    scaling,
    slow_link,
    stats,
    targets,
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
FIGURES = ROOT / "docs" / "figures"
TITLES = {
    "none": "not sharded",
    "torch": "torch FSDP2",
    "fsdp2": "fsdp2",
    "packed": "fsdp2, packed",
}


# ---------------------------------------------------------------------------------------------
# Plots

Bar = tuple[float, float, float]
Bars = dict[str, dict[str, Bar]]
"""A series each: {label on the x axis: median, smallest, largest}."""


@dataclass(frozen=True)
class Plot:
    """One figure.

    Attributes:
        title: above it.
        unit: of the y axis.
        runs: whose results it shows.
        bars: from their results, ``None`` where there are none yet, to the bars.
        log: whether the y axis is logarithmic above 1.
    """

    title: str
    unit: str
    runs: Sequence[str]
    bars: Callable[..., Bars]
    log: bool = False


def _bar(values: Sequence[float]) -> Bar:
    found = stats.summarize(values)
    return (found.median, found.min, found.max)


def _host_cost(fp32: Any, mixed: Any) -> Bars:
    """Host time of a step of real blocks."""
    bars: Bars = {}
    for precision, results in (("fp32", fp32), ("mixed", mixed)):
        for case, rounds in results["rounds"].items() if results else ():
            for variant, values in rounds.items():
                bars.setdefault(TITLES[variant], {})[f"{case} {precision}"] = _bar(values)
    return bars


def _scaling(times: Any, blocks: Any, counts: Any) -> Bars:
    """What is added, of torch's, in time and in instructions, by model and path."""
    bars: Bars = {}
    for series, results in (("time", (times, blocks)), ("instructions", (counts,))):
        for path, variant in (("coalesced", "fsdp2"), ("packed", "packed")):
            shown = bars.setdefault(f"{series}, {path}", {})
            for case in scaling.CASES:
                for each in results:
                    label = f"{case}: ({variant} - none) / (torch - none)"
                    if each and label in each["ratios"]:
                        found = targets.as_summary(each["ratios"][label])
                        shown[case] = (found.median, found.min, found.max)
    return {series: shown for series, shown in bars.items() if shown}


def _ranks(results: Any) -> Bars:
    bars: Bars = {}
    for label, kinds in results[0]["rounds"].items():
        variant, _, ranks = label.partition("@")
        bars.setdefault(TITLES[variant], {})[ranks or "one"] = _bar(kinds["host"])
    return bars


def _kinds(results: Any) -> Bars:
    """A group of bars for each kind of figure, a bar for each variant."""
    return {
        TITLES.get(variant, variant): {kind: _bar(values[kind]) for kind in values}
        for variant, values in results["rounds"].items()
    }


def _optimizer(results: Any) -> Bars:
    named = {
        "not sharded": "plain tensors",
        "shards": "fsdp2, step_shards",
        "flat": "fsdp2, FlatOptimizer",
    }
    return {named.get(name, name): bars for name, bars in _kinds(results[0]).items()}


def _gloo(results: Any) -> Bars:
    return {
        TITLES[variant]: {"a step": _bar(values["step"])}
        for variant, values in results["rounds"].items()
    }


def _compile(small: Any, large: Any) -> Bars:
    bars: Bars = {}
    for model, results in (("bound by the host", small), ("bound by kernels", large)):
        for label, values in results["rounds"].items() if results else ():
            variant, _, mode = label.partition(" ")
            bars.setdefault(f"{TITLES[variant]}, {mode}", {})[model] = _bar(values["wall"])
    return bars


def _memory_bars(results: Any) -> Bars:
    bars: Bars = {}
    for each in results:
        if each["checkpoints"] or (each["variant"] != "none" and each["reshard"] != "always"):
            continue
        for kind in ("forward", "backward", "eval"):
            size = each["bytes"][kind] / 1e9
            title = TITLES[each["variant"]]
            bars.setdefault(title, {})[f"{each['preset']} {kind}"] = (size, size, size)
    return bars


def _padding(results: Any) -> Bars:
    series = {"ours": "fsdp2", "two_dims": "fsdp2, two dims allowed", "torch": "torch FSDP2"}
    return {
        title: {
            str(each["ranks"]): (100 * each[kind],) * 3
            for each in results
            if each["model"] == "GPT-OSS-120B"
        }
        for kind, title in series.items()
    }


PLOTS = {
    "host_cost": Plot(
        "Host time of a step, 32 blocks of width 64", "ms", ["blocks", "blocks-mixed"], _host_cost
    ),
    "scaling": Plot(
        "Added per step, fsdp2 over torch FSDP2, by model and path",
        "ratio",
        ["scaling", "blocks", "instructions"],
        _scaling,
    ),
    "ranks": Plot("Step with more ranks", "ms", ["ranks"], _ranks),
    "memory": Plot(
        "Memory at the peak, on a stand-in device, all units freed after forward",
        "GB",
        ["memory"],
        _memory_bars,
    ),
    "optimizer": Plot("Clipping and AdamW, 288 parameters", "ms", ["optimizer"], _optimizer),
    "compile": Plot("Step with compiled blocks", "ms", ["compile", "compile-kernels"], _compile),
    "startup": Plot("From a model without memory to its steps", "ms", ["startup"], _kinds),
    "gloo": Plot("Training step on two gloo ranks", "ms", ["gloo"], _gloo),
    "padding": Plot(
        "Padding of GPT-OSS-120B, by ranks",
        "per cent of its bytes",
        ["padding"],
        _padding,
        log=True,
    ),
}
"""By the name of the PNG."""


# ---------------------------------------------------------------------------------------------
# Pages


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


def drawable() -> Iterator[tuple[Path, Plot, Bars]]:
    """Each plot of which a run has results: its file, and its bars."""
    FIGURES.mkdir(exist_ok=True)
    for name, plot in PLOTS.items():
        files = [newest(run) for run in plot.runs]
        if any(files):
            found = [None if file is None else file.results for file in files]
            yield FIGURES / f"{name}.png", plot, plot.bars(*found)
