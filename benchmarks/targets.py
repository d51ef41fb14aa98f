"""Targets of the project, and how far the newest results are: the tables that pages quote.

    benchmarks/results/*.json ── files.newest ──> TARGETS ──> rows of Markdown

A row whose run was not on a quiet machine (`benchmarks/quiet.py`) is never "met".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import stats, users
from benchmarks.files import RESULTS, File, newest
from benchmarks.stats import Summary

COALESCED, PACKED = "coalesced", "packed"
ADDED = "({} - none) / (torch - none)"
"""What a variant adds over what torch FSDP2 adds: how results call that ratio."""

TORCH = "torch FSDP2's"
PLAIN = "plain tensors'"
ABSENT = "no file"
"""For a run that has none here."""
_NO_GPU = "no figure yet: has not run on a GPU"


@dataclass(frozen=True)
class Target:
    """A line of the table.

    Attributes:
        what: what is measured.
        of: what it is compared with.
        limit: up to which the median meets it; 0: there is none.
        run: whose results say so; where there is none, ``figure`` is text.
        figure: from results to the ratio; or what to say in its place.
        path: how parameters travel: each by itself in one call (coalesced) or in one buffer.
        unit: behind the figure.
        timed: whether a busy machine changes it.
    """

    what: str
    of: str
    limit: float = 0.0
    run: str = ""
    figure: Callable[[Any], Summary] | str = ""
    path: str = ""
    unit: str = ""
    timed: bool = True


def _given(*path: str | int) -> Callable[[Any], Summary]:
    """A ratio that the benchmark wrote."""

    def find(results: Any) -> Summary:
        for key in path:
            results = results[key]
        return results if isinstance(results, Summary) else as_summary(results)

    return find


def as_summary(found: float | dict[str, float]) -> Summary:
    """A ratio of a file: one figure, or a median with its range."""
    if isinstance(found, dict):
        return Summary(**found)
    return Summary(found, found, found)


def _compiled(results: Any) -> Summary:
    """A compiled step over torch FSDP2's."""
    ours, torchs = (results["rounds"][f"{name} compiled"]["wall"] for name in ("fsdp2", "torch"))
    return stats.ratio(ours, torchs)


def _worst(kind: str) -> Callable[[Any], Summary]:
    return lambda results: as_summary(100 * max(each[kind] for each in results))


def _memory(results: Any) -> Summary:
    """Allocated at the peak of a step, the largest ratio of all settings."""
    sizes: dict[tuple[object, ...], dict[str, int]] = {}
    for each in results:
        setting = (each["preset"], each["checkpoints"], each["reshard"])
        peak = max(each["bytes"]["forward"], each["bytes"]["backward"])
        sizes.setdefault(setting, {})[each["variant"]] = peak
    ratios = [each["fsdp2"] / each["torch"] for each in sizes.values() if "fsdp2" in each]
    return Summary(max(ratios), min(ratios), max(ratios))


def _imported(results: Any) -> Summary:
    return stats.summarize(results["imports"]["fsdp2"]["ms"])


BLOCKS = {"llama": "Llama", "moe": "mixture of experts", "lora": "LoRA on frozen Llama"}
VARIANTS = {COALESCED: "fsdp2", PACKED: "packed"}
PRECISIONS = {"fp32": "", "mixed": "-mixed"}
"""What a file of the precision has behind the name of its run."""
_LIMITS = {COALESCED: (0.09, 0.15), PACKED: (0.12, 0.18)}


def _blocks() -> tuple[Target, ...]:
    """Host time of real blocks, on both paths, in both precisions."""
    return tuple(
        Target(
            f"host time added per step, 32 blocks: {name}, {precision}",
            TORCH,
            limit,
            "blocks" + PRECISIONS[precision],
            _given("ratios", f"{case}: {ADDED.format(VARIANTS[path])}"),
            path,
        )
        for case, name in BLOCKS.items()
        for path, limits in _LIMITS.items()
        for precision, limit in zip(PRECISIONS, limits, strict=True)
    )


TARGETS = (
    *_blocks(),
    *(
        Target(
            f"host time added per step, 32 blocks of 9 equal parameters, {precision}",
            TORCH,
            limit,
            "host_cost",
            _given(index, "ratios", f"{ADDED.format('fsdp2')}, world size 8"),
            COALESCED,
        )
        for index, (precision, limit) in enumerate((("fp32", 0.09), ("mixed", 0.15)))
    ),
    *(
        Target(
            f"host time added per step, {name}, fp32",
            TORCH,
            0.10,
            "scaling",
            _given("ratios", f"{case}: {ADDED.format('fsdp2')}"),
            COALESCED,
        )
        for case, name in (
            ("32x100", "32 blocks of 100 parameters"),
            ("300x1-3", "300 units of 1 to 3 parameters"),
        )
    ),
    Target(
        "host time added per block, 128 blocks over 32 blocks",
        "itself",
        1.1,
        "scaling",
        _given("ratios", "fsdp2: added a block, 128x9 / 32x9"),
        COALESCED,
    ),
    Target(
        "the same in torch FSDP2",
        "itself",
        0.0,
        "scaling",
        _given("ratios", "torch: added a block, 128x9 / 32x9"),
        COALESCED,
    ),
    *(
        Target(
            f"step at {ranks:,} ranks over 8 ranks",
            "itself",
            1.1,
            "ranks",
            _given(0, "ratios", f"fsdp2@{ranks} / fsdp2@8"),
            COALESCED,
        )
        for ranks in (1024, 16384)
    ),
    Target("host time added per step on a GPU", TORCH, 0.15, figure=_NO_GPU),
    Target(
        "`from fsdp2 import fully_shard` after torch, DTensor and DCP, no bytecode",
        "",
        100.0,
        "imports",
        _imported,
        unit=" ms",
    ),
    *(
        Target(
            f"{what}, 1,000 parameters",
            TORCH,
            limit,
            "startup",
            _given("ratios", f"fsdp2 / torch, {part}"),
            COALESCED,
        )
        for what, part, limit in (
            ("`fully_shard` and the first step", "shard + first", 0.7),
            ("`fully_shard`", "shard", 0.0),
            ("the first step", "first", 0.0),
        )
    ),
    Target(
        "clipping and AdamW (fused) by `FlatOptimizer`, 288 parameters",
        PLAIN,
        0.95,
        "optimizer",
        _given(0, "ratios", "flat / none"),
    ),
    Target(
        "clipping and AdamW (fused) over DTensors, 288 parameters",
        PLAIN,
        2.5,
        "optimizer",
        _given(0, "ratios", "fsdp2 / none"),
    ),
    Target(
        "the same with `step_shards`",
        PLAIN,
        2.5,
        "optimizer",
        _given(0, "ratios", "shards / none"),
    ),
    Target(
        "the same over torch FSDP2's DTensors",
        PLAIN,
        0.0,
        "optimizer",
        _given(0, "ratios", "torch / none"),
    ),
    Target(
        'AdamW\'s step of offloaded shards on a CPU, `FlatOptimizer(offload="cpu")`',
        "without offload",
        1.1,
        "optimizer_offload",
        _given(0, "ratios", "flat-offload / flat"),
    ),
    Target(
        "update of `EMA(every=10)`",
        "fused AdamW's step",
        0.03,
        "ema",
        _given("ratios", "every 10 / dtensors"),
    ),
    Target(
        "step of `train_lm --preset small`, two ranks of gloo",
        TORCH,
        0.75,
        "gloo",
        _given("ratios", "fsdp2 / torch"),
        PACKED,
    ),
    *(
        Target(
            f"step of compiled blocks on a CPU, bound by {what}",
            TORCH,
            limit,
            run,
            _compiled,
            PACKED,
        )
        for what, limit, run in (
            ("the host", 0.38, "compile"),
            ("kernels", 1.0, "compile-kernels"),
        )
    ),
    *(
        Target(
            f"checkpoint of 256 MB, two ranks: {what}",
            "DCP's",
            limit,
            "checkpoint",
            _given("ratios", f"256 MB: {label}, durable"),
        )
        for what, limit, label in (
            ("`save`, until it is durable", 0.75, "save / dcp"),
            ("`load`", 0.9, "load / dcp-load"),
        )
    ),
    Target(
        "the slowest of the calls that users make",
        TORCH,
        1.05,
        "users",
        partial(users.worst, ("",)),
        PACKED,
    ),
    *(
        Target(what, TORCH, 0.7, "users", partial(users.worst, prefixes), PACKED)
        for what, prefixes in users.WHOLE.items()
    ),
    Target("GPU: step of a 1.1 B and a 2.8 B model", TORCH, 0.95, figure=_NO_GPU),
    Target("GPU: peak memory", TORCH, 1.0, figure=_NO_GPU),
    Target(
        "memory at a step's peak on a stand-in device, worst setting",
        TORCH,
        1.0,
        "memory",
        _memory,
        COALESCED,
        timed=False,
    ),
    Target(
        "padding, worst of three models at 3 to 1024 ranks",
        "the model's bytes",
        3.0,
        "padding",
        _worst("ours"),
        unit=" %",
        timed=False,
    ),
    Target(
        "the same where `shard_placement_fn` allows two dims",
        "the model's bytes",
        3.0,
        "padding",
        _worst("two_dims"),
        unit=" %",
        timed=False,
    ),
)

HEADER = ("what", "path", "of", "target", "measured", "", "when, where")


def table(folder: Path = RESULTS) -> str:
    """All targets, in Markdown."""
    return stats.markdown(HEADER, [_row(each, folder) for each in TARGETS])


def instructions(folder: Path = RESULTS) -> str:
    """What fsdp2 adds over what torch FSDP2 adds: a row per model, a column per path and precision.

    Args:
        folder: of the files.
    """
    columns = [(path, precision) for path in VARIANTS for precision in PRECISIONS]
    header = ("32 blocks", *(f"{path}, {precision}" for path, precision in columns))
    files = {name: newest(f"instructions{end}", folder) for name, end in PRECISIONS.items()}
    rows = []
    for case, name in BLOCKS.items():
        cells = []
        for path, precision in columns:
            file, label = files[precision], f"{case}: {ADDED.format(VARIANTS[path])}"
            cells.append(_text(as_summary(file.results["ratios"][label])) if file else ABSENT)
        rows.append((name, *cells))
    return stats.markdown(header, rows)


def _row(target: Target, folder: Path) -> tuple[str, ...]:
    limit = f"{target.limit:g}{target.unit}" if target.limit else ""
    named = (target.what, target.path or "-", target.of or "-", limit)
    file = newest(target.run, folder)
    if isinstance(target.figure, str) or file is None:
        return (*named, str(target.figure) if not target.run else ABSENT, "", "")
    found = target.figure(file.results)
    return (*named, _text(found, target.unit), _verdict(target, found.median, file), file.where)


def _text(found: Summary, unit: str = "") -> str:
    digits = 1 if unit else 3
    text = f"{found.median:.{digits}f}{unit}"
    if found.min != found.max:
        text += f" [{found.min:.{digits}f} .. {found.max:.{digits}f}]"
    return text


def _verdict(target: Target, median: float, file: File) -> str:
    """Whether a figure meets its target: never where the machine was busy."""
    if target.timed and not file.quiet:
        return "busy machine"
    if not target.limit:
        return ""
    return "met" if median <= target.limit else "**short**"
