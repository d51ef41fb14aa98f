"""Figures of the docs, drawn by matplotlib: the files of docs/figures that a script writes.

    python -m benchmarks.figures     # needs the extra `docs`

    benchmarks/results/ ── PLOTS, and functions here ──┐
    schedules, meshes ────────────────────────────────┴─ FIGURES ──> docs/figures/*.svg

A file has the colors of `COLORS` for a light page, and a style sheet that replaces each of them
where the reader's setting is dark. The same results make the same text.
Screenshots (*.png) show pages of `fsdp2.trace` and `fsdp2.plan`; nothing here writes them.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from benchmarks import harness, memory, models, report, streams
from benchmarks.harness import RESULTS, ROOT
from benchmarks.report import newest
from fsdp2 import fully_shard, graph_mode
from fsdp2.graph import placement
from fsdp2.testing.blocks import tiny_blocks
from fsdp2.testing.null_group import null_world

FOLDER = ROOT / "docs" / "figures"
COLORS = {
    **{"ground": ("#ffffff", "#14171c"), "ink": ("#1b1f27", "#e8eaee")},
    **{"quiet": ("#59616e", "#a3abb8"), "grid": ("#e3e7ec", "#2b313b")},
    **{"panel": ("#f2f4f7", "#1f242c"), "inverse": ("#fefefe", "#10131a")},
    **{"blue": ("#3a6fd3", "#7ba4f4"), "orange": ("#b85c00", "#f0a04b")},
    **{"green": ("#2a8447", "#6cc98a"), "purple": ("#7a55c7", "#b79af0")},
    **{"grey": ("#868f9c", "#6b7482"), "teal": ("#0b7f86", "#4fc0c6")},
    **{"olive": ("#8a7a10", "#cdbb4f"), "red": ("#c93a3a", "#ff8585")},
}
"""On a light page, and on a dark one."""
LIGHT = {name: light for name, (light, _) in COLORS.items()}
SERIES = ("blue", "orange", "green", "purple", "grey", "teal", "olive")
STYLE = {
    **{
        "svg.fonttype": "none",
        "svg.hashsalt": "fsdp2",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    },
    **{"font.size": 9, "axes.titlesize": 9, "legend.frameon": False, "legend.fontsize": 8},
    **{"figure.facecolor": LIGHT["ground"], "axes.facecolor": LIGHT["ground"]},
    **{"text.color": LIGHT["ink"], "axes.labelcolor": LIGHT["quiet"]},
    **{"xtick.color": LIGHT["quiet"], "ytick.color": LIGHT["quiet"]},
    **{"axes.edgecolor": LIGHT["quiet"], "ytick.labelcolor": LIGHT["ink"]},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
    **{"axes.grid": True, "grid.color": LIGHT["grid"]},
}
DARK = "".join(
    f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
    for kind in ("fill", "stroke")
    for light, dark in COLORS.values()
)

Bar = tuple[float, float, float]
"""Median, smallest and largest round."""
Bars = dict[str, dict[str, Bar]]
"""A series each: {label of a group: bar}."""

LOOKS = {
    "not sharded": "grey",
    "plain tensors": "grey",
    "torch FSDP2": "orange",
    "fsdp2": "blue",
    "fsdp2, coalesced": "blue",
    "fsdp2, packed": "teal",
    "fsdp2, FlatOptimizer": "green",
}
"""One color for each variant in all figures; other series have those of `SERIES`."""
TITLES = {
    "none": "not sharded",
    "torch": "torch FSDP2",
    "fsdp2": "fsdp2",
    "packed": "fsdp2, packed",
    "flat": "fsdp2, FlatOptimizer",
}
MILLISECONDS = "milliseconds (shorter is better)"


def svg(figure: Figure) -> str:
    """The text of a figure, in both settings."""
    with matplotlib.rc_context(STYLE):
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", bbox_inches="tight", metadata=nothing)
    text = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.1f}", file.getvalue())
    text = re.sub(r"\s*\n *(?!<| )", " ", text)  # a shape is a line
    text = re.sub(r"\n +", "\n", text)
    dark = f"<style>@media(prefers-color-scheme:dark){{{DARK}}}</style>"
    return text.replace("<defs>", f"{dark}\n<defs>", 1)


def _legend(figure: Figure, looks: Mapping[str, str]) -> None:
    handles = [Patch(color=LIGHT[look], label=name) for name, look in looks.items()]
    figure.legend(handles=handles, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _titled(title: str, width: float, height: float) -> Figure:
    figure = Figure((width, height), layout="constrained")
    figure.suptitle(title, fontsize=10, fontweight="bold")
    return figure


# ---------------------------------------------------------------------------------------------
# Bars of results


@dataclass(frozen=True)
class Plot:
    """Bars of results: a bar is a median, and the line on it goes over all rounds.

    Attributes:
        title: above it.
        unit: of the values.
        runs: whose results it shows.
        bars: from their results to the bars.
        dots: whether medians are dots: ratios that may be below 0.
    """

    title: str
    unit: str
    runs: Sequence[str]
    bars: Callable[..., Bars]
    dots: bool = False


def _bar(values: Sequence[float]) -> Bar:
    found = harness.summarize(values)
    return (found.median, found.min, found.max)


def _on_path(variant: str) -> str:
    """A variant's title where both paths are shown."""
    return "fsdp2, coalesced" if variant == "fsdp2" else TITLES[variant]


def _host_cost(results: Any) -> Bars:
    """Host time of a step of real blocks."""
    bars: Bars = {}
    for label, figures in results["rounds"].items():
        case, precision, variant = label.split(", ")
        words = {"fp32": "fp32", "mixed": "mixed precision"}[precision]
        group = f"{report.BLOCKS[case]}, {words}"
        bars.setdefault(_on_path(variant), {})[group] = _bar(figures["host"])
    return bars


CASES = {
    "32x9": "32 blocks of 9 parameters",
    "128x9": "128 blocks of 9 parameters",
    "32x100": "32 blocks of 100 parameters",
    "300x1-3": "300 units of 1 to 3 parameters",
    **{case: f"32 blocks: {name}" for case, name in report.BLOCKS.items()},
}


def _scaling(times: Any, blocks: Any, counts: Any) -> Bars:
    """What is added, of torch's, in time and in instructions, by model and path."""
    bars: Bars = {}
    for series, results in (("time", (times, blocks)), ("instructions", (counts,))):
        for path in report.VARIANTS:
            shown = bars.setdefault(f"{series}, {path}", {})
            for case in CASES:
                for each in results:
                    ratio = each["ratios"].get(report.added(case, "fp32", path))
                    if ratio is not None:
                        found = report.as_summary(ratio)
                        shown[CASES[case]] = (found.median, found.min, found.max)
    return bars


def _ranks(results: Any) -> Bars:
    bars: Bars = {}
    for label, figures in results["rounds"].items():
        variant, _, ranks = label.split(", ")[2].partition("@")
        group = f"{int(ranks):,} ranks" if ranks else "one process"
        bars.setdefault(_on_path(variant), {})[group] = _bar(figures["host"])
    return bars


def _kinds(names: dict[str, str], results: Any) -> Bars:
    """A group of bars for each kind of figure, a bar for each variant."""
    return {
        TITLES[variant]: {name: _bar(values[kind]) for kind, name in names.items()}
        for variant, values in results["rounds"].items()
        if variant in TITLES  # results may have variants that are gone since
    }


def _optimizer(results: Any) -> Bars:
    names = {"clip": "clipping", "step": "optimizer step", "both": "both"}
    found = _kinds(names, results)
    return {
        "plain tensors" if name == "not sharded" else name: bars for name, bars in found.items()
    }


def _compile(results: Any) -> Bars:
    bars: Bars = {}
    for label, figures in results["rounds"].items():
        name, _, variant, *compiled = label.split(", ")
        shape = models.PRESETS[name]
        group = f"{shape.layers} blocks of width {shape.dim}, {'compiled' if compiled else 'eager'}"
        bars.setdefault(TITLES[variant], {})[group] = _bar(figures["wall"])
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


PLOTS = {
    "host_cost": Plot(
        "Host time of one training step: 32 blocks of width 64",
        MILLISECONDS,
        ["blocks"],
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
        ["compile"],
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
}
"""The plots of docs/benchmarks.md."""


def shown(value: float) -> str:
    """A value in a chart: three digits at most."""
    if 0 < value < 0.005:
        return "< 0.01"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")


def drawn(plot: Plot, found: Bars) -> Figure:
    """Horizontal bars: a group for each label, and in it one for each series that has the label."""
    rest = cycle(look for look in SERIES if look not in {LOOKS.get(name) for name in found})
    looks = {name: LOOKS.get(name) or next(rest) for name in found}
    groups = list(dict.fromkeys(label for each in found.values() for label in each))
    count = sum(len(each) for each in found.values())
    figure = _titled(plot.title, 7.6, 1.0 + 0.16 * count + 0.13 * len(groups))
    axes = figure.subplots()
    place, middles = 0.0, []
    for group in groups:
        names = [name for name in found if group in found[name]]
        middles.append(place + (len(names) - 1) / 2)
        for name in names:
            median, low, high = found[name][group]
            if plot.dots:
                axes.plot([low, high], [place, place], color=LIGHT[looks[name]])
                axes.plot(median, place, "o", color=LIGHT[looks[name]], markersize=5)
            else:
                axes.barh(place, median, 0.85, color=LIGHT[looks[name]])
                if high > low:
                    axes.plot([low, high], [place, place], "|-", color=LIGHT["ink"], linewidth=0.8)
            beside = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
            at = (max(high, 0.0), place)
            axes.annotate(shown(median), at, fontsize=7.5, color=LIGHT["quiet"], **beside)
            place += 1
        place += 0.8
    if plot.dots:
        axes.axvline(0, color=LIGHT["quiet"], linewidth=0.8)
    axes.set_yticks(middles, groups)
    axes.set_ylim(place - 1.2, -0.6)
    axes.tick_params("y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(plot.unit)
    if len(found) > 1:
        _legend(figure, looks)
    return figure


def _plotted(plot: Plot) -> Figure:
    files = [newest(run) for run in plot.runs]
    return drawn(plot, plot.bars(*(file.results for file in files if file is not None)))


# ---------------------------------------------------------------------------------------------
# Others


def read(name: str) -> Any:
    """A file of results, by its path below benchmarks/results."""
    return json.loads((RESULTS / name).read_text())


def planned_and_measured() -> Figure:
    """Every planned peak of benchmarks/results/plan, over what was measured."""
    peaks: dict[str, list[tuple[float, float]]] = {"no checkpointing": []}
    for row in read("plan/2026-11-25-epyc-2core-memory.json"):
        recomputed = row["model"].endswith("recomputed")
        series = "activation checkpointing" if recomputed else "no checkpointing"
        peaks.setdefault(series, []).append((row["measured"] / 1e6, row["planned"] / 1e6))
    figure = _titled("Planned and measured, on two CPU cores", 4.6, 4.2)
    axes = figure.subplots()
    values = [value for each in peaks.values() for point in each for value in point]
    ends = [min(values) / 1.3, max(values) * 1.3]
    low, high = ([end * factor for end in ends] for factor in (0.97, 1.03))
    axes.fill_between(ends, low, high, color=LIGHT["blue"], alpha=0.18, linewidth=0)
    axes.plot(ends, ends, color=LIGHT["quiet"], linewidth=0.8)
    for look, (name, each) in zip(SERIES, peaks.items(), strict=False):
        axes.plot(*zip(*each, strict=True), "o", color=LIGHT[look], markersize=5, label=name)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.set(title="Memory at the peak (band: 3 %)", xlabel="measured, MB", ylabel="planned, MB")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="upper left")
    return figure


STRATEGY_LOOKS = {
    memory.PARAMETERS: "grey",
    memory.STATES: "teal",
    memory.UNSHARDED: "orange",
    memory.GRADIENTS: "purple",
    memory.ACTIVATIONS: "blue",
    memory.TEMPORARY: "olive",
}
"""The lowest first."""


def memory_by_strategy() -> Figure:
    """What each strategy allocates in the course of a step, all on one scale."""
    title = (
        "Memory of one rank during one step, by strategy\n"
        "Planned: a Llama of 1.5 billion parameters on 8 ranks, one sequence of 1,024 tokens each;"
        "\nfp32 parameters, AdamW, bf16 compute"
    )
    figure = _titled(title, 7.6, 6.6)
    grid = figure.subplots(2, 2, sharey=True).flat
    found = read("plan/strategies.json")["results"]
    for axes, (strategy, course) in zip(grid, found.items(), strict=True):
        moments = [*course["moments"], (course["end"], course["moments"][-1][1])]
        amounts = [[each.get(name, 0) / 1e3 for _, each in moments] for name in STRATEGY_LOOKS]
        colors = [LIGHT[look] for look in STRATEGY_LOOKS.values()]
        axes.stackplot([when for when, _ in moments], amounts, colors=colors, step="post")
        for place, (phase, when) in enumerate(course["phases"].items()):
            axes.axvline(when, color=LIGHT["quiet"], linestyle="--", linewidth=0.8)
            y = 1.0 + 0.07 * (place % 2)
            axes.text(when, y, phase, transform=axes.get_xaxis_transform(), fontsize=7.5)
        peak = sum(course["peak"].values()) / 1e3
        axes.set_title(f"{strategy}: peak {peak:.1f} GB", loc="left", pad=26, fontweight="bold")
        axes.set(xlim=(0, course["end"]), xlabel="milliseconds, planned for H100", ylabel="GB")
    _legend(figure, STRATEGY_LOOKS)
    return figure


def async_checkpoint() -> Figure:
    """How long saves of 256 MB stop training, and when they are durable."""
    sizes = read("checkpoint/2026-11-25-epyc-2core.json")["sizes"]["256"]
    names = {"save": "fsdp2: save", "async": "fsdp2: async_save"}
    names |= {"dcp": "DCP: save", "dcp-async": "DCP: async_save"}
    kinds = {"training goes on": "stall_ms", "the checkpoint is durable": "durable_ms"}
    bars: Bars = {
        title: {names[key]: (sizes[key][kind],) * 3 for key in names}
        for title, kind in kinds.items()
    }
    title = "Checkpoint of 256 MB on two ranks: time from the call until"
    return drawn(Plot(title, MILLISECONDS, (), dict), bars)


# ---------------------------------------------------------------------------------------------
# Diagrams


FOLLOWED = "blocks.1"
OPERATIONS = {
    **{"all-gather": "orange", "forward": "blue", "backward": "purple"},
    **{"reduce-scatter": "green", "optimizer": "teal"},
}


def unit_life() -> Figure:
    """One unit in a steady step of four, as fsdp2's scheduler orders it, and what it holds."""
    lanes = {"all-gather": 0, "reduce": 0, "compute": 1}
    shown = [s for s in streams.schedule(copies=1).slices if s.lane in lanes]
    shown = [s for s in shown if s.unit.startswith("blocks.") or s.operation == "optimizer"]
    slices = [s for s in shown if s.operation != "copy"]
    end = max(s.end for s in slices)
    figure = _titled("One step of four units, 0 to 3: the life of unit 1", 7.6, 3.6)
    axes = figure.subplots()
    for each in slices:
        mine = each.unit == FOLLOWED
        look, ink = (OPERATIONS[each.operation], "inverse") if mine else ("grid", "quiet")
        width = each.end - each.start
        if each.operation != "optimizer":
            _box(axes, each.start, lanes[each.lane], width, 0.8, look)
            middle = (each.start + width / 2, lanes[each.lane] + 0.4)
            number = each.unit.rpartition(".")[2]
            axes.text(*middle, number, color=LIGHT[ink], ha="center", va="center", fontsize=7.5)
    first = min(s.start for s in slices if s.operation == "optimizer")
    _box(axes, first, lanes["compute"], end - first, 0.8, OPERATIONS["optimizer"])
    own = [s for s in slices if s.unit == FOLLOWED]
    times = {name: [(s.start, s.end) for s in own if s.operation == name] for name in OPERATIONS}
    (gathered, again), (reduced,) = times["all-gather"], times["reduce-scatter"]
    (forward,), (backward,) = times["forward"], times["backward"]
    for start, stop in ((gathered[0], forward[1]), (again[0], backward[1])):
        _box(axes, start, 3.2, stop - start, 1.1, "orange")
        axes.text((start + stop) / 2, 3.75, "unsharded", color=LIGHT["inverse"], ha="center")
    _box(axes, backward[1], 3.5, reduced[1] - backward[1], 0.8, "purple")
    _box(axes, reduced[1], 4.0, end - reduced[1], 0.3, "green")
    _box(axes, 0, 4.3, end, 0.3, "grey")
    small = {"fontsize": 7.5, "color": LIGHT["ink"]}
    axes.text(backward[1], 3.4, "gradients", **small)
    axes.text(reduced[1], 3.9, "gradient shard", **small)
    axes.text(0, 5.0, "the shard of parameters and optimizer states stays", **small)
    changes = (
        *((gathered[0], "all-gather"), (forward[0], "forward"), (forward[1], "reshard")),
        *((again[0], "all-gather"), (backward[0], "backward")),
        *((reduced[0], "reshard, reduce-scatter"), (first, "step")),
    )
    for place, (when, words) in enumerate(changes, 1):
        y = 2.2 + 0.35 * (words in ("forward", "backward", "step"))
        axes.plot([when, when], [y, 4.6], "--", color=LIGHT["quiet"], linewidth=0.7, zorder=0)
        axes.text(when, y, f"\N{NO-BREAK SPACE}{place} {words}", **small)
    axes.set(xlim=(0, end), ylim=(5.1, -0.1), xticks=[])
    axes.set_yticks([0.4, 1.4, 3.9], ["communication", "compute", "memory of\nunit 1"])
    axes.tick_params("y", length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    _legend(figure, {**OPERATIONS, "other units": "grid"})
    return figure


Span = tuple[str, str, float, float]
"""An operation, the number of its block, its begin, and its end, in products of matrices."""


def placed_graphs(blocks: int) -> list[list[Span]]:
    """The forward and the backward of a model in graph mode, as the backend "fsdp2" orders them."""
    found: list[list[Span]] = []

    def note(graph: Any) -> None:
        place(graph)
        spans, begun, at, block = list[Span](), dict[str, tuple[str, str, float]](), 0.0, ""
        for node in graph.nodes:
            step = re.match(r"(fsdp2|aten)\.(all_gather|reduce_scatter|wait|mm)", str(node.target))
            kind = step[2] if step else ""
            if kind == "mm":
                spans.append(("compute", block, at, at := at + 1))
            elif kind and node.args[0]:  # what nothing hides is drawn short
                name, owner, start = begun.pop(str(node.args[0]))
                spans.append((name, owner, start, at := max(at, start + 0.6)))
                block = owner if name == "all_gather" else block
            if kind in ("all_gather", "reduce_scatter"):
                owner = node.args[4].partition("#")[0].removeprefix("blocks.")
                begun[str(node.args[2])], block = (kind, owner, at), block or owner
        found.append(spans)

    place = placement.place
    with null_world(4), mock.patch.object(placement, "place", note):
        model = tiny_blocks(blocks, (2,), 8)
        for each in model.blocks:
            fully_shard(each)
        graph_mode(fully_shard(model), compile={"options": {"compiler": "aot_eager"}})
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    torch._dynamo.reset()
    return found


def graph_mode_graphs() -> Figure:
    """Where the graphs of four blocks launch collectives and wait for them."""
    rows = {"all_gather": "all-gather", "compute": "compute", "reduce_scatter": "reduce-scatter"}
    figure = _titled("Graph mode: the graphs of blocks 0 to 3, in their order", 7.6, 2.9)
    graphs = zip(figure.subplots(2), placed_graphs(4), ("forward", "backward"), strict=True)
    for axes, spans, title in graphs:
        for name, block, start, end in spans:
            row, middle = [*rows].index(name), (start + end) / 2
            _box(axes, start, row, end - start, 0.85, OPERATIONS.get(rows[name], "blue"))
            inside = {"color": LIGHT["inverse"], "ha": "center", "va": "center"}
            axes.text(middle, row + 0.42, block, **inside)
        axes.set(xlim=(0, 17), ylim=(3, -0.1), xticks=[], ylabel=title)
        axes.set_yticks([0.42, 1.42, 2.42], rows.values(), fontsize=7.5)
        axes.tick_params("y", length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    return figure


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, look: str, alpha: float = 1
) -> None:
    color, edge = LIGHT[look], LIGHT["ground"]
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=color, alpha=alpha, edgecolor=edge, lw=0.7)
    )


Held = dict[tuple[int, int], str]
"""The color of each piece, by row and column, that a rank has."""


@dataclass(frozen=True)
class Mesh:
    """Ranks in rows and columns, and what each holds of a parameter.

    Attributes:
        title: above it.
        shape: rows and columns of ranks.
        pieces: rows and columns of a parameter's pieces.
        held: of a rank.
        notes: what goes on in rows and in columns, in lines below.
    """

    title: str
    shape: tuple[int, int]
    pieces: tuple[int, int]
    held: Callable[[int], Held]
    notes: str


def _hsdp(rank: int) -> Held:
    return {(rank % 4, column): SERIES[rank % 4] for column in range(4)}


def _tp(rank: int) -> Held:
    row, column = divmod(rank, 4)
    return {(2 * row + r, column): SERIES[column] for r in range(2)}


def _experts(rank: int) -> Held:
    """Experts in the first row of pieces, and all else in the third."""
    between, within = divmod(rank, 2)
    gathered: Held = {(0, 4 * within + place): "blue, pale" for place in range(4)}
    kept: Held = {(0, 4 * within + 2 * between + place): "blue" for place in range(2)}
    return {**gathered, **kept, **{(2, 2 * rank + place): "green" for place in range(2)}}


MESHES = {
    "hsdp": Mesh(
        'HSDP: mesh ("replicate" 2, "shard" 4)',
        (2, 4),
        (4, 4),
        _hsdp,
        "Row: shard, within a node: all-gather, reduce-scatter. It holds every piece once.\n"
        "Column: replicate: all-reduce of gradient shards. Its ranks hold the same piece.",
    ),
    "tp": Mesh(
        'Tensor parallelism: mesh ("shard" 2, "tp" 4)',
        (2, 4),
        (4, 4),
        _tp,
        "Row: tp: the same batch; collectives of activations.\n"
        "Column: shard: all-gather, reduce-scatter. It shares one quarter of a parameter: while\n"
        "unsharded, a rank has its whole column of pieces, and never the other three.",
    ),
    "experts": Mesh(
        'Experts: mesh ("efsdp" 2, "ep" 2), all else on ("dp" 4)',
        (2, 2),
        (3, 8),
        _experts,
        "In a rank: experts above; attention and norms below. Filled: the pieces that a rank\n"
        "keeps. Pale: what it gathers to compute.\n"
        "Row: ep: all-to-all of tokens. Its ranks have different experts.\n"
        "Column: efsdp: all-gather, reduce-scatter of experts. Its ranks shard the same ones.",
    ),
}


def meshes(*names: str) -> Figure:
    """Ranks, and what each holds: one mesh below the other."""
    figure = Figure((5.6, 3.4 * len(names)), layout="constrained")
    found = figure.subplots(len(names), squeeze=False)[:, 0]
    for axes, name in zip(found, names, strict=True):
        _mesh(axes, MESHES[name])
    return figure


def _mesh(axes: Axes, mesh: Mesh) -> None:
    (rows, columns), (high, wide) = mesh.shape, mesh.pieces
    for rank in range(rows * columns):
        row, column = divmod(rank, columns)
        left, top = column * (wide + 2), row * (high + 2.5)
        _box(axes, left - 0.5, top - 1.2, wide + 1, high + 1.6, "panel")
        axes.text(left, top - 0.3, f"rank {rank}", fontsize=7.5)
        held = mesh.held(rank)
        for piece in ((r, c) for r in range(high) for c in range(wide)):
            look, _, pale = held.get(piece, "grid").partition(", ")
            if high == 4 or piece[0] != 1:  # an empty row parts experts from the rest
                place = (left + piece[1], top + piece[0])
                _box(axes, *place, 0.9, 0.9, look, 0.4 if pale else 1)
    axes.set(xlim=(-0.6, columns * (wide + 2) - 1.4), ylim=(rows * (high + 2.5) - 1.9, -1.3))
    axes.set_title(mesh.title, loc="left", fontweight="bold")
    axes.set_xlabel(mesh.notes, loc="left")
    axes.set(xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)


FIGURES: dict[str, Callable[[], Figure]] = {
    **{name: partial(_plotted, plot) for name, plot in PLOTS.items()},
    "planned_and_measured": planned_and_measured,
    "memory_by_strategy": memory_by_strategy,
    "async_checkpoint": async_checkpoint,
    "unit_life": unit_life,
    "graph_mode": graph_mode_graphs,
    "mesh_hsdp": partial(meshes, "hsdp"),
    "mesh_tp": partial(meshes, "tp"),
    "mesh_experts": partial(meshes, "experts"),
    "meshes": partial(meshes, "hsdp", "tp", "experts"),
}
"""By the name of the SVG file: what draws it."""


def write(folder: Path = FOLDER) -> list[Path]:
    """Write every figure; returns the paths."""
    folder.mkdir(exist_ok=True)
    paths = []
    for name, draw in FIGURES.items():
        paths.append(folder / f"{name}.svg")
        with matplotlib.rc_context(STYLE):
            paths[-1].write_text(svg(draw()), encoding="utf-8")
    return paths


if __name__ == "__main__":
    print(*write(), sep="\n")
