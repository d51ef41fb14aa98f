"""docs/benchmarks.md: its table of targets and its plots, made of files in benchmarks/results/.

    python -m benchmarks.report                                  # write and draw all of it anew
    python -m benchmarks.report --measure host_cost,instructions   # measure those first

A file of results is named by date, machine and run: `2026-11-23-xeon-2core-host_cost.json`. Of each
run the newest file counts; the older ones are history.

    RUNS ── --measure ──> benchmarks/results/*.json ──> TARGETS, PLOTS ──> docs/
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import scaling, stats
from benchmarks.stats import Summary

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = ROOT / "docs" / "figures"

RUNS: dict[str, tuple[str, ...]] = {
    "host_cost": ("host_cost.py",),
    "instructions": ("instructions.py", "--shrink", "8", "--variants", "none,torch,fsdp2,kept"),
    "ranks": (
        *("host_cost.py", "--precision", "fp32", "--blocks", "8"),
        *("--world-size", "8,1024,16384", "--rows", "16384"),
    ),
    "startup": ("startup.py",),
    "optimizer": ("optimizer.py",),
    "gloo": ("gloo.py",),
    "compile": ("compile.py",),
    "compile-kernels": ("compile.py", "--dim", "256", "--layers", "8", "--seq", "64"),
    "memory": ("memory.py",),
    "padding": ("padding.py",),
    "collective_cost": ("collective_cost.py",),
}
"""What `--measure` runs, by the last part of the file's name."""

TITLES = {"none": "not sharded", "torch": "torch FSDP2", "fsdp2": "fsdp2"}


@dataclass(frozen=True)
class File:
    """The newest results of a run."""

    environment: dict[str, Any]
    results: Any

    @property
    def where(self) -> str:
        """Date and machine, as in the file's name."""
        return f"{self.environment['date'][:10]}, {machine(self.environment)}"


def machine(environment: dict[str, Any]) -> str:
    """A word for an accelerator, or for a processor and its cores: "epyc-2core"."""
    known = re.search(r"epyc|xeon|ryzen|core|h\d00|a100|b200", _device(environment).lower())
    word = known[0] if known else _device(environment).lower().split()[0]
    return word if "gpu" in environment else f"{word}-{environment['cores']}core"


def _device(environment: dict[str, Any]) -> str:
    return str(environment.get("gpu") or environment["cpu"])


def newest(run: str, folder: Path = RESULTS) -> File | None:
    """The newest file of a run, if there is one."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"*-{run}.json")]
    if not found:
        return None
    content = max(found, key=lambda each: each["environment"]["date"])
    return File(content["environment"], content["results"])


def measure(run: str) -> Path:
    """Run a benchmark; returns the file that it wrote."""
    RESULTS.mkdir(exist_ok=True)
    written = RESULTS / f"{run}.json.new"
    script, *arguments = RUNS[run]
    command = [sys.executable, f"benchmarks/{script}", *arguments]
    subprocess.run([*command, "--json", str(written.relative_to(ROOT))], cwd=ROOT, check=True)
    environment = json.loads(written.read_text())["environment"]
    name = f"{environment['date'][:10]}-{machine(environment)}-{run}.json"
    return written.rename(RESULTS / name)


# ---------------------------------------------------------------------------------------------
# Targets


@dataclass(frozen=True)
class Target:
    """A line of the table.

    Attributes:
        number: of the target; several lines may share one.
        what: what is compared.
        target: in words, as a ratio where nothing else is said.
        limit: up to which the median meets it.
        run: whose results say so; where there is none, ``figure`` is text.
        figure: from results to the ratio; or what to say in its place.
        percent: whether it is a percentage.
    """

    number: int | str
    what: str
    target: str
    limit: float = 0.0
    run: str = ""
    figure: Callable[[Any], Summary] | str = ""
    percent: bool = False


def _given(*path: str | int) -> Callable[[Any], Summary]:
    """A ratio that the benchmark wrote."""

    def find(results: Any) -> Summary:
        for key in path:
            results = results[key]
        return results if isinstance(results, Summary) else _summary(results)

    return find


def _summary(found: float | dict[str, float]) -> Summary:
    if isinstance(found, dict):
        return Summary(**found)
    return Summary(found, found, found)


def _compiled(results: Any) -> Summary:
    ours, torchs = (results["rounds"][f"{name} compiled"]["wall"] for name in ("fsdp2", "torch"))
    return stats.ratio(ours, torchs)


def _worst(kind: str) -> Callable[[Any], Summary]:
    return lambda results: _summary(100 * max(each[kind] for each in results))


def _memory(results: Any) -> Summary:
    """Allocated at the peak of a step, the largest ratio of all settings."""
    sizes: dict[tuple[object, ...], dict[str, int]] = {}
    for each in results:
        setting = (each["preset"], each["checkpoints"], each["reshard"])
        peak = max(each["bytes"]["forward"], each["bytes"]["backward"])
        sizes.setdefault(setting, {})[each["variant"]] = peak
    ratios = [each["fsdp2"] / each["torch"] for each in sizes.values() if "fsdp2" in each]
    return Summary(max(ratios), min(ratios), max(ratios))


_ADDED = "(fsdp2 - none) / (torch - none)"
_SCALING = ("host_cost", -1, "ratios")
EARLIER = "earlier: [history.md](../benchmarks/results/history.md)"
"""For a run that has no file here."""
_NO_GPU = "no figure yet: has not run on a GPU"

TARGETS = (
    Target(
        1,
        "host time added to a step, 32 blocks of 9 parameters, fp32",
        "0.20 of torch FSDP2's",
        0.20,
        "host_cost",
        _given(0, "ratios", f"{_ADDED}, world size 8"),
    ),
    Target(
        1,
        "the same in mixed precision",
        "0.20",
        0.20,
        "host_cost",
        _given(1, "ratios", f"{_ADDED}, world size 8"),
    ),
    Target(
        1,
        "the same in instructions, fp32",
        "0.20",
        0.20,
        "instructions",
        _given("ratios", f"32x9: {_ADDED}"),
    ),
    Target(2, "host time added to a step on a GPU", "0.15 of torch FSDP2's", figure=_NO_GPU),
    Target(
        3,
        "host time added, blocks of 100 parameters",
        "0.10 of torch FSDP2's",
        0.10,
        "host_cost",
        _given(-1, "ratios", f"32x100: {_ADDED}"),
    ),
    Target(
        3,
        "host time added, 300 units of 1 to 3 parameters",
        "0.10 of torch FSDP2's",
        0.10,
        "host_cost",
        _given(-1, "ratios", f"300x1-3: {_ADDED}"),
    ),
    Target(
        3,
        "the same in instructions",
        "0.10",
        0.10,
        "instructions",
        _given("ratios", f"300x1-3: {_ADDED}"),
    ),
    Target(
        3,
        "host time added a block, 128 blocks over 32",
        "1",
        1.0,
        "host_cost",
        _given(-1, "ratios", "fsdp2: added a block, 128x9 / 32x9"),
    ),
    Target(
        3,
        "step at 1024 ranks over 8",
        "1.1",
        1.1,
        "ranks",
        _given(0, "ratios", "fsdp2@1024 / fsdp2@8"),
    ),
    Target(
        3,
        "step at 16,384 ranks over 8",
        "1.1",
        1.1,
        "ranks",
        _given(0, "ratios", "fsdp2@16384 / fsdp2@8"),
    ),
    Target(
        4,
        "`fully_shard` and the first step, 1,000 parameters",
        "1.0 of torch FSDP2's",
        1.0,
        "startup",
        _given("ratios", "fsdp2 / torch, shard + first"),
    ),
    Target(
        5,
        "AdamW (fused) and clipping, 288 parameters",
        "1.2 of plain tensors'",
        1.2,
        "optimizer",
        _given(0, "ratios", "flat / none"),
    ),
    Target(
        "6, 7",
        "GPU: step of a 1.1 B and a 2.8 B model",
        "1.07 of not sharded; 0.95 of torch FSDP2's",
        figure=_NO_GPU,
    ),
    Target(
        8,
        "bytes that our kernels copy: casts only",
        "",
        figure="counted in every test run: `tests/schedule/test_step_counts.py`",
    ),
    Target(9, "GPU: peak memory", "torch FSDP2's", figure=_NO_GPU),
    Target(
        9,
        "memory allocated at a step's peak on a stand-in device, worst setting",
        "1 of torch FSDP2's",
        1.0,
        "memory",
        _memory,
    ),
    Target(
        10,
        "step of `train_lm --preset small` on two gloo ranks",
        "0.9 of torch FSDP2's",
        0.9,
        "gloo",
        _given("ratios", "fsdp2 / torch"),
    ),
    Target(
        11,
        "compiled blocks on a CPU, bound by the host",
        "0.9 of torch FSDP2's",
        0.9,
        "compile",
        _compiled,
    ),
    Target(
        11,
        "compiled blocks on a CPU, bound by kernels",
        "1.0 of torch FSDP2's",
        1.0,
        "compile-kernels",
        _compiled,
    ),
    Target(
        12,
        "padding, worst of three models at 3 to 1024 ranks",
        "3 %",
        3.0,
        "padding",
        _worst("ours"),
        percent=True,
    ),
    Target(
        12,
        "the same where `shard_placement_fn` allows two dims",
        "3 %",
        3.0,
        "padding",
        _worst("two_dims"),
        percent=True,
    ),
)


def targets(folder: Path = RESULTS) -> str:
    """The table, in Markdown."""
    rows = [_row(target, newest(target.run, folder)) for target in TARGETS]
    return stats.markdown(("#", "what", "target", "measured", "", "when, where"), rows)


def _row(target: Target, file: File | None) -> tuple[object, ...]:
    named = (target.number, target.what, target.target)
    if isinstance(target.figure, str):
        return (*named, target.figure, "", "")
    if file is None:
        return (*named, EARLIER, "", "")
    found = target.figure(file.results)
    verdict = "met" if found.median <= target.limit else "**short**"
    if target.percent:
        return (*named, f"{found.median:.1f} %", verdict, "arithmetic")
    text = f"{found.median:.3f}"
    if found.min != found.max:
        text += f" [{found.min:.3f} .. {found.max:.3f}]"
    return (*named, text, verdict, file.where)


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


def _host_cost(results: Any) -> Bars:
    bars: Bars = {}
    for each in results:
        if "cases" not in each:
            for label, kinds in each["rounds"].items():
                title = TITLES[label.partition("@")[0]]
                bars.setdefault(title, {})[each["precision"]] = _bar(kinds["host"])
    return bars


def _scaling(times: Any, counts: Any) -> Bars:
    ratios = {
        "time": times and times[-1]["ratios"],
        "instructions": counts and counts["ratios"],
    }
    bars: Bars = {}
    for series, found in ratios.items():
        if not found:
            continue
        for case in scaling.CASES:
            ratio = found.get(f"{case}: {_ADDED}")
            if ratio is not None:
                summary = _summary(ratio)
                bars.setdefault(series, {})[case] = (summary.median, summary.min, summary.max)
    return bars


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
        "Host time of a step, 32 blocks of 9 parameters", "ms", ["host_cost"], _host_cost
    ),
    "scaling": Plot(
        "Added to a step, fsdp2 over torch FSDP2, by blocks and parameters a block",
        "ratio",
        ["host_cost", "instructions"],
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
# The page


def machines(folder: Path = RESULTS) -> str:
    """What the newest files' figures depend on besides the code: a line for each machine."""
    files = [file for file in (newest(run, folder) for run in RUNS) if file is not None]
    lines = {f"- {machine(e)}: {stats.describe(e)}" for e in (file.environment for file in files)}
    return "\n".join(sorted(lines))


MADE = {"targets": targets, "machines": machines}
"""What stands between marks on the page."""


def filled(text: str, folder: Path = RESULTS) -> str:
    """The page with what stands between ``<!-- targets -->`` and ``<!-- end -->`` made anew.

    ``machines`` likewise.
    """

    def fill(mark: re.Match[str]) -> str:
        return f"<!-- {mark['name']} -->\n{MADE[mark['name']](folder)}\n<!-- end -->"

    return re.sub(r"<!-- (?P<name>\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def write_tables() -> Path:
    """Write what the page has of the files."""
    PAGE.write_text(filled(PAGE.read_text()))
    return PAGE


def drawable() -> Iterator[tuple[Path, Plot, Bars]]:
    """Each plot of which a run has results: its file, and its bars."""
    FIGURES.mkdir(exist_ok=True)
    for name, plot in PLOTS.items():
        files = [newest(run) for run in plot.runs]
        if any(files):
            found = [None if file is None else file.results for file in files]
            yield FIGURES / f"{name}.png", plot, plot.bars(*found)
