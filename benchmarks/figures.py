"""Figures of the docs: the files of docs/figures that a script writes.

    python -m benchmarks.report      # writes them, and the tables of pages

    benchmarks/results/ ── PLOTS, and functions here ──┐
    schedules, meshes ──────── diagrams ───────────────┴─ FIGURES ──> docs/figures/*.svg

Screenshots (*.png) show pages of `fsdp2.trace` and `fsdp2.plan`; nothing here writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import charts, diagrams, scaling, stats, strategy_memory, targets
from benchmarks.charts import Bar, Bars, Course, Panel
from benchmarks.files import RESULTS, ROOT, newest

FOLDER = ROOT / "docs" / "figures"
TITLES = {
    "none": "not sharded",
    "torch": "torch FSDP2",
    "fsdp2": "fsdp2",
    "packed": "fsdp2, packed",
    "shards": "fsdp2, step_shards",
    "flat": "fsdp2, FlatOptimizer",
}
MILLISECONDS = "milliseconds (shorter is better)"


@dataclass(frozen=True)
class Plot:
    """Bars of results.

    Attributes:
        title: above it.
        unit: of the values.
        runs: whose results it shows.
        bars: from their results to the bars.
        log: whether the axis is logarithmic above 1.
        dots: whether medians are dots: ratios that may be below 0.
    """

    title: str
    unit: str
    runs: Sequence[str]
    bars: Callable[..., Bars]
    log: bool = False
    dots: bool = False


def _bar(values: Sequence[float]) -> Bar:
    found = stats.summarize(values)
    return (found.median, found.min, found.max)


def _on_path(variant: str) -> str:
    """A variant's title where both paths are shown."""
    return "fsdp2, coalesced" if variant == "fsdp2" else TITLES[variant]


def _host_cost(fp32: Any, mixed: Any) -> Bars:
    """Host time of a step of real blocks."""
    bars: Bars = {}
    for precision, results in (("fp32", fp32), ("mixed precision", mixed)):
        for case, rounds in results["rounds"].items():
            for variant, values in rounds.items():
                label = f"{targets.BLOCKS[case]}, {precision}"
                bars.setdefault(_on_path(variant), {})[label] = _bar(values)
    return bars


CASES = {
    "32x9": "32 blocks of 9 parameters",
    "128x9": "128 blocks of 9 parameters",
    "32x100": "32 blocks of 100 parameters",
    "300x1-3": "300 units of 1 to 3 parameters",
    **{case: f"32 blocks: {name}" for case, name in targets.BLOCKS.items()},
}


def _scaling(times: Any, blocks: Any, counts: Any) -> Bars:
    """What is added, of torch's, in time and in instructions, by model and path."""
    bars: Bars = {}
    for series, results in (("time", (times, blocks)), ("instructions", (counts,))):
        for path, variant in targets.VARIANTS.items():
            shown = bars.setdefault(f"{series}, {path}", {})
            for case in scaling.CASES:
                for each in results:
                    label = f"{case}: {targets.ADDED.format(variant)}"
                    if label in each["ratios"]:
                        found = targets.as_summary(each["ratios"][label])
                        shown[CASES[case]] = (found.median, found.min, found.max)
    return bars


def _ranks(results: Any) -> Bars:
    bars: Bars = {}
    for label, kinds in results[0]["rounds"].items():
        variant, _, ranks = label.partition("@")
        group = f"{int(ranks):,} ranks" if ranks else "one process"
        bars.setdefault(_on_path(variant), {})[group] = _bar(kinds["host"])
    return bars


def _kinds(names: dict[str, str], results: Any) -> Bars:
    """A group of bars for each kind of figure, a bar for each variant."""
    return {
        TITLES[variant]: {name: _bar(values[kind]) for kind, name in names.items()}
        for variant, values in results["rounds"].items()
    }


def _optimizer(results: Any) -> Bars:
    names = {"clip": "clipping", "step": "optimizer step", "both": "both"}
    found = _kinds(names, results[0])
    return {
        "plain tensors" if name == "not sharded" else name: bars for name, bars in found.items()
    }


def _compile(small: Any, large: Any) -> Bars:
    bars: Bars = {}
    for results in (small, large):
        config = results["config"]
        model = f"{config['layers']} blocks of width {config['dim']}"
        for label, values in results["rounds"].items():
            variant, _, mode = label.partition(" ")
            bars.setdefault(TITLES[variant], {})[f"{model}, {mode}"] = _bar(values["wall"])
    return bars


STARTUP = {
    "first use": "first use in a process",
    "shard": "fully_shard",
    "materialise": "memory for parameters",
    "first": "first step",
    "second": "second step",
    "shard + first": "fully_shard and first step",
}
MODELS = {"1.1b": "1.1 B parameters", "2.8b": "2.8 B parameters"}
PHASES = {"forward": "forward", "backward": "backward", "eval": "evaluation"}


def _memory(results: Any) -> Bars:
    bars: Bars = {}
    for each in results:
        if each["checkpoints"] or (each["variant"] != "none" and each["reshard"] != "always"):
            continue
        for kind, phase in PHASES.items():
            size = each["bytes"][kind] / 1e9
            label = f"{MODELS[each['preset']]}, {phase}"
            bars.setdefault(_on_path(each["variant"]), {})[label] = (size, size, size)
    return bars


def _padding(results: Any) -> Bars:
    series = {"ours": "fsdp2", "two_dims": "fsdp2, two dims allowed", "torch": "torch FSDP2"}
    return {
        title: {
            f"{each['ranks']:,} ranks": (100 * each[kind],) * 3
            for each in results
            if each["model"] == "GPT-OSS-120B"
        }
        for kind, title in series.items()
    }


PLOTS = {
    "host_cost": Plot(
        "Host time of one training step: 32 blocks of width 64",
        MILLISECONDS,
        ["blocks", "blocks-mixed"],
        _host_cost,
    ),
    "scaling": Plot(
        "What fsdp2 adds to a step that is not sharded, relative to what torch FSDP2 adds",
        "fsdp2's addition / torch FSDP2's addition (1: the same; 0: none)",
        ["scaling", "blocks", "instructions"],
        _scaling,
        dots=True,
    ),
    "ranks": Plot(
        "Host time of one training step by number of ranks: 8 blocks of 9 parameters",
        MILLISECONDS,
        ["ranks"],
        _ranks,
    ),
    "memory": Plot(
        "Memory at the peak on a stand-in device, all units resharded after forward",
        "GB (less is better)",
        ["memory"],
        _memory,
    ),
    "optimizer": Plot(
        "Clipping and fused AdamW over 288 parameters", MILLISECONDS, ["optimizer"], _optimizer
    ),
    "compile": Plot(
        "One training step on a CPU, eager and with compiled blocks",
        MILLISECONDS,
        ["compile", "compile-kernels"],
        _compile,
    ),
    "startup": Plot(
        "From a model without memory to its first steps: 1,000 parameters",
        MILLISECONDS,
        ["startup"],
        partial(_kinds, STARTUP),
    ),
    "gloo": Plot(
        "One training step of train_lm --preset small on two CPU ranks (gloo)",
        MILLISECONDS,
        ["gloo"],
        partial(_kinds, {"step": "training step"}),
    ),
    "padding": Plot(
        "Padding of GPT-OSS-120B by number of ranks",
        "padding, % of the model's bytes (logarithmic above 1)",
        ["padding"],
        _padding,
        log=True,
    ),
}
"""The plots of docs/benchmarks.md."""


def _plotted(plot: Plot) -> str:
    files = [newest(run) for run in plot.runs]
    found = plot.bars(*(file.results for file in files if file is not None))
    return charts.bars(plot.title, plot.unit, found, log=plot.log, dots=plot.dots)


# ---------------------------------------------------------------------------------------------
# Others


def read(name: str) -> Any:
    """A file of results, by its path below benchmarks/results."""
    return json.loads((RESULTS / name).read_text())


def planned_and_measured() -> str:
    """Every planned step and peak of benchmarks/results/plan, over what was measured."""
    steps: dict[str, list[tuple[float, float, str]]] = {}
    for row in read("plan/2026-11-25-epyc-2core.json"):
        words = row["options"].split()
        ranks = int(words[words.index("--nproc") + 1])
        series = f"{ranks} rank{'s' if ranks > 1 else ''}"
        steps.setdefault(series, []).append((row["measured"] * 1e3, row["planned"] * 1e3, ""))
    peaks: dict[str, list[tuple[float, float, str]]] = {"no checkpointing": []}
    for row in read("plan/2026-11-25-epyc-2core-memory.json"):
        recomputed = row["model"].endswith("recomputed")
        series = "activation checkpointing" if recomputed else "no checkpointing"
        peaks.setdefault(series, []).append((row["measured"] / 1e6, row["planned"] / 1e6, ""))
    panels = [
        Panel("Time of a step (band: 10 %)", "ms", steps, 0.10),
        Panel("Memory at the peak (band: 3 %)", "MB", peaks, 0.03),
    ]
    return charts.scatter("Planned and measured, on two CPU cores", panels)


STRATEGY_LOOKS = {
    strategy_memory.PARAMETERS: "e",
    strategy_memory.STATES: "f",
    strategy_memory.UNSHARDED: "b",
    strategy_memory.GRADIENTS: "d",
    strategy_memory.ACTIVATIONS: "a",
    strategy_memory.TEMPORARY: "g",
}


def memory_by_strategy() -> str:
    """What each strategy allocates in the course of a step."""
    courses = []
    for strategy, found in read("plan/strategies.json")["results"].items():
        peak = sum(found["peak"].values()) / 1e3
        moments = [
            (when, {name: size / 1e3 for name, size in sizes.items()})
            for when, sizes in found["moments"]
        ]
        marks = [(when, phase) for phase, when in found["phases"].items()]
        note = f"peak {peak:.1f} GB"
        courses.append(Course(strategy, note, found["end"], marks, moments))
    title = "Memory of one rank during one step, by strategy"
    notes = (
        "Planned: a Llama of 1.5 billion parameters on",
        "8 ranks, one sequence of 1,024 tokens each;",
        "fp32 parameters, AdamW, bf16 compute.",
        "All areas have the same scale.",
    )
    units = ("GB", "milliseconds, planned for H100")
    return charts.areas(title, notes, units, STRATEGY_LOOKS, courses)


def async_checkpoint() -> str:
    """How long saves of 256 MB stop training, and when they are durable."""
    sizes = read("checkpoint/2026-11-25-epyc-2core.json")["sizes"]["256"]
    names = {
        "save": "fsdp2: save",
        "async": "fsdp2: async_save",
        "dcp": "DCP: save",
        "dcp-async": "DCP: async_save",
    }
    rows = [(name, sizes[key]["stall_ms"], sizes[key]["durable_ms"]) for key, name in names.items()]
    return diagrams.saves("Checkpoint of 256 MB on two ranks, from the call on", rows)


FIGURES: dict[str, Callable[[], str]] = {
    **{name: partial(_plotted, plot) for name, plot in PLOTS.items()},
    "planned_and_measured": planned_and_measured,
    "memory_by_strategy": memory_by_strategy,
    "async_checkpoint": async_checkpoint,
    "unit_life": diagrams.unit_life,
    "mesh_hsdp": partial(diagrams.meshes, "hsdp"),
    "mesh_tp": partial(diagrams.meshes, "tp"),
    "mesh_experts": partial(diagrams.meshes, "experts"),
    "meshes": partial(diagrams.meshes, "hsdp", "tp", "experts"),
}
"""By the name of the SVG file: what writes its text."""


def write(folder: Path = FOLDER) -> list[Path]:
    """Write every figure; returns the paths."""
    folder.mkdir(exist_ok=True)
    paths = []
    for name, make in FIGURES.items():
        paths.append(folder / f"{name}.svg")
        paths[-1].write_text(make(), encoding="utf-8")
    return paths
