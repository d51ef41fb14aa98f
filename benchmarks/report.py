"""Tables and numbers on pages, from the files in benchmarks/results; `benchmarks.figures` draws.

    python -m benchmarks.report                                    # write all of it anew
    python -m benchmarks.report --measure host_cost,instructions   # measure those first

A file is named by date, machine and run: `2026-11-23-xeon-2core-host_cost.json`. The newest file of
each run counts; a machine's older ones are in git. A row of targets whose run was not on a quiet
machine is never "met".
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, users
from benchmarks.harness import RESULTS, ROOT, Summary

PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
_SLOW = "network --mbit 200 --precision bf16 --rounds 5 --steps 3 --variants"
_FEW = "one_process,torch,fsdp2,fp32_sums,8_bit,4_bit,levels,levels_and_fp32_sums"
_EMA = "optimizer --variants fsdp2,flat,ema,ema-10 --clock cpu"
RUNS = {
    "host_cost": "step --precision fp32,mixed --rounds 15",
    "scaling": "step --models 32x9+128x9,32x100,300x1-3 --steps 10",
    "blocks": "step --models llama,moe,lora --precision fp32,mixed --rounds 15 --steps 10",
    "instructions": "instructions --shrink 8 --precision fp32,mixed",
    "ranks": "step --models tall --world-size 8,1024,16384",
    "compile": "step --models tiny,tiny-wide --compiled --variants none,torch,fsdp2",
    "startup": "startup",
    "optimizer": "optimizer --variants none,torch,fsdp2,flat",
    "optimizer_offload": "optimizer --blocks 8 --dim 1024 --steps 10 "
    "--variants none,flat,flat-offload,torch-offload",
    "ema": f"{_EMA} --blocks 8 --dim 512 --steps 30",
    "ema_small": f"{_EMA} --blocks 64 --dim 32 --steps 100",
    "gloo": "network --rounds 15",
    "checkpoint": "checkpoint --variants save,dcp,load,dcp-load",
    "memory": "memory",
    "slow_link": f"{_SLOW} all",
    "slow_link_accumulated": f"{_SLOW} all --grad-accum 4",
    "slow_link_gigabit": f"{_SLOW} all --mbit 1000",
    "slow_link_four": f"{_SLOW} {_FEW} --nodes 4",
    "slow_link_pairs": f"{_SLOW} {_FEW} --ranks-per-node 2 --grad-accum 4",
    "faults": "faults",
    "users": "users",
}
"""What `--measure` runs, by the last part of the file's name; "_" stands for a space."""


# ---------------------------------------------------------------------------------------------
# Files


@dataclass(frozen=True)
class File:
    """The newest results of a run."""

    environment: dict[str, Any]
    results: Any

    @property
    def where(self) -> str:
        """Date and machine, as in the file's name."""
        return f"{self.environment['date'][:10]}, {machine(self.environment)}"

    @property
    def quiet(self) -> bool:
        """Whether the machine had nothing else to do; counts and sizes do not ask."""
        taken = self.environment.get("taken")
        return taken is None or harness.Taken(**taken).quiet


def machine(environment: dict[str, Any]) -> str:
    """A word for an accelerator, or for a processor and its cores: "epyc-2core"."""
    device = str(environment.get("gpu") or environment["cpu"]).lower()
    known = re.search(r"epyc|xeon|ryzen|core|h\d00|a100|b200", device)
    word = known[0] if known else device.split()[0]
    return word if "gpu" in environment else f"{word}-{environment['cores']}core"


def newest(run: str, folder: Path = RESULTS) -> File | None:
    """The newest file of a run, if there is one."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"*core-{run}.json")]
    if not found:
        return None
    content = max(found, key=lambda each: each["environment"]["date"])
    return File(content["environment"], content["results"])


def arguments_of(run: str) -> list[str]:
    """A module, and its arguments."""
    return [each.replace("_", " ") for each in RUNS[run].split()]


def measure(run: str) -> Path:
    """Run a benchmark; returns the file that it wrote, in place of the machine's older one."""
    written = RESULTS / f"{run}.json.new"
    module, *arguments = arguments_of(run)
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(written)]
    subprocess.run(command, cwd=ROOT, check=True)
    environment = json.loads(written.read_text())["environment"]
    name = f"{machine(environment)}-{run}.json"
    for older in RESULTS.glob(f"*-{name}"):
        older.unlink()
    return written.rename(RESULTS / f"{environment['date'][:10]}-{name}")


# ---------------------------------------------------------------------------------------------
# Targets

COALESCED, PACKED = "coalesced", "packed"
VARIANTS = {COALESCED: "fsdp2", PACKED: "packed"}
PRECISIONS = ("fp32", "mixed")
ADDED = "({} - none) / (torch - none)"
"""What a variant adds over what torch FSDP2 adds: how results call that ratio."""
BLOCKS = {"llama": "Llama", "moe": "mixture of experts", "lora": "LoRA on frozen Llama"}
TORCH, PLAIN, ITSELF = "torch FSDP2's", "plain tensors'", "itself"
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
        run: whose results say so; "" where none can yet.
        figure: the label of a ratio, or from results to it.
        path: how parameters travel: each by itself in one call (coalesced) or in one buffer.
        unit: behind the figure.
        timed: whether a busy machine changes it.
    """

    what: str
    of: str
    limit: float = 0.0
    run: str = ""
    figure: str | Callable[[Any], Summary] = ""
    path: str = "-"
    unit: str = ""
    timed: bool = True

    def row(self, folder: Path) -> tuple[str, ...]:
        """The cells of the table."""
        limit = f"{self.limit:g}{self.unit}" if self.limit else ""
        what = self.what if self.path == "-" else f"{self.what} ({self.path})"
        named = (what, self.of or "-", limit)
        file = newest(self.run, folder) if self.run else None
        if file is None:
            return (*named, ABSENT if self.run else _NO_GPU, "")
        figure = self.figure
        found = as_summary(
            file.results["ratios"][figure] if isinstance(figure, str) else (figure(file.results))
        )
        met = "met" if found.median <= self.limit else "**missed**"
        verdict = met if self.limit else ""
        if self.timed and not file.quiet:
            verdict = "busy machine"
        return (*named, _text(found, self.unit), verdict)


def as_summary(found: Summary | float | dict[str, float]) -> Summary:
    """A ratio of a file: one figure, or a median with its range."""
    if isinstance(found, Summary):
        return found
    return Summary(**found) if isinstance(found, dict) else Summary(found, found, found)


def _compiled(model: str, results: Any) -> Summary:
    """A compiled step over torch FSDP2's."""
    names = (f"{model}, fp32, {variant}, compiled" for variant in ("fsdp2", "torch"))
    return harness.ratio(*(results["rounds"][name]["wall"] for name in names))


def _memory(results: Any) -> Summary:
    """Allocated at the peak of a step, the largest ratio of all settings."""
    sizes: dict[tuple[object, ...], dict[str, int]] = {}
    for each in results:
        setting = (each["preset"], each["checkpoints"], each["reshard"])
        peak = max(each["bytes"]["forward"], each["bytes"]["backward"])
        sizes.setdefault(setting, {})[each["variant"]] = peak
    ratios = [each["fsdp2"] / each["torch"] for each in sizes.values() if "fsdp2" in each]
    return Summary(max(ratios), min(ratios), max(ratios))


def added(model: str, precision: str, path: str = COALESCED) -> str:
    """The label of a ratio of what a variant adds."""
    return f"{model}, {precision}: {ADDED.format(VARIANTS[path])}"


def _targets() -> list[Target]:
    limits = {COALESCED: (0.09, 0.15), PACKED: (0.12, 0.18)}
    made = [
        Target(
            *(f"32 blocks: {name}, {precision}", TORCH, limits[path][at]),
            *("blocks", added(case, precision, path), path),
        )
        for case, name in BLOCKS.items()
        for path in VARIANTS
        for at, precision in enumerate(PRECISIONS)
    ]
    for case, name, run, precision, limit in (
        ("32x9", "32 blocks of 9 equal parameters", "host_cost", "fp32", 0.09),
        ("32x9", "32 blocks of 9 equal parameters", "host_cost", "mixed", 0.15),
        ("32x100", "32 blocks of 100 parameters", "scaling", "fp32", 0.1),
        ("300x1-3", "300 units of 1 to 3 parameters", "scaling", "fp32", 0.1),
    ):
        figure = added(case, precision)
        made.append(Target(f"{name}, {precision}", TORCH, limit, run, figure, COALESCED))
    grows = "{}: added a block, 128x9 / 32x9"
    first = "`fully_shard` and the first step"
    slowest = partial(users.worst, ("",))
    whole = [
        Target(what, TORCH, 0.7, "users", partial(users.worst, prefixes), PACKED)
        for what, prefixes in users.WHOLE.items()
    ]
    clipping = "clipping and AdamW (fused)"
    offload = "AdamW's step of offloaded shards on a CPU, `FlatOptimizer(offload=True)`"
    checkpoint = "checkpoint of 256 MB, two ranks: "
    ranks = "tall, fp32, fsdp2: {} ranks / 8"
    compiled = "step of compiled blocks on a CPU, bound by "
    return [
        *made,
        Target(
            *("each block, 128 blocks over 32 blocks", ITSELF, 1.1, "scaling"),
            *(grows.format("fp32, fsdp2"), COALESCED),
        ),
        Target(
            *("the same in torch FSDP2", ITSELF, 0.0, "scaling"),
            *(grows.format("fp32, torch"), COALESCED),
        ),
        *(
            Target(
                *(f"whole step at {n:,} ranks over 8 ranks", ITSELF, 1.1, "ranks", ranks.format(n)),
                COALESCED,
            )
            for n in (1024, 16384)
        ),
        Target("host time that sharding adds to a step", TORCH, 0.15),
        Target(
            "`from fsdp2 import fully_shard` after torch, DTensor and DCP, no bytecode",
            *("", 100.0, "startup", lambda found: harness.summarize(found["import"])),
            unit=" ms",
        ),
        *(
            Target(
                *(f"{what}, 1,000 parameters", TORCH, limit, "startup", f"fsdp2 / torch, {part}"),
                COALESCED,
            )
            for what, limit, part in (
                (first, 0.7, "shard + first"),
                ("`fully_shard`", 0.0, "shard"),
                ("the first step", 0.0, "first"),
            )
        ),
        *(
            Target(what, PLAIN, limit, "optimizer", f"{variant} / none")
            for what, limit, variant in (
                (f"{clipping} by `FlatOptimizer`, 288 parameters", 0.95, "flat"),
                (f"{clipping} over DTensors, 288 parameters", 2.5, "fsdp2"),
                ("the same over torch FSDP2's DTensors", 0.0, "torch"),
            )
        ),
        Target(offload, "without offload", 1.1, "optimizer_offload", "flat-offload / flat"),
        Target("update of `EMA(every=10)`", "fused AdamW's step", 0.03, "ema", "ema-10 / fsdp2"),
        *(
            Target(f"update of `EMA`, {units}", "fused AdamW's step", 0.0, run, "ema / fsdp2")
            for units, run in (("large units", "ema"), ("many small units", "ema_small"))
        ),
        Target(
            *("step of `train_lm --preset small`, two ranks of gloo", TORCH, 0.75),
            *("gloo", "fsdp2 / torch", PACKED),
        ),
        Target(f"{compiled}the host", TORCH, 0.38, "compile", partial(_compiled, "tiny"), PACKED),
        Target(
            *(f"{compiled}kernels", TORCH, 1.0, "compile", partial(_compiled, "tiny-wide")), PACKED
        ),
        *(
            Target(
                *(f"{checkpoint}{what}", "DCP's", limit),
                *("checkpoint", f"256 MB: {label}, durable"),
            )
            for what, limit, label in (
                ("`save`, until it is durable", 0.75, "save / dcp"),
                ("`load`", 0.9, "load / dcp-load"),
            )
        ),
        Target("the slowest of the calls that users make", TORCH, 1.05, "users", slowest, PACKED),
        *whole,
        Target("step of a 1.1 B and a 2.8 B model", TORCH, 0.95),
        Target("peak memory", TORCH, 1.0),
        Target(
            *("memory at a step's peak on a stand-in device, worst setting", TORCH, 1.0),
            *("memory", _memory, COALESCED),
            timed=False,
        ),
    ]


_GROUPS = {
    "Host time that sharding adds to a step": "blocks host_cost scaling ranks",
    "Steps and calls of two ranks": "gloo compile users",
    "Optimizers and averages": "optimizer optimizer_offload ema ema_small",
    "Start-up, memory, checkpoints": "startup memory checkpoint",
    "On a GPU": "",
}


def table(folder: Path = RESULTS) -> str:
    """All targets, in Markdown: a table per group."""
    header = ("what", "relative to", "at most", "measured", "target")
    text = ""
    for title, runs in _GROUPS.items():
        own = [each for each in _targets() if each.run in (runs.split() or [""])]
        files = {file.where for each in own if (file := newest(each.run, folder)) is not None}
        rows = harness.markdown(header, [each.row(folder) for each in own])
        text += f"### {title}\n\n{'; '.join(sorted(files))}\n\n{rows}\n\n"
    return text.rstrip()


def _text(found: Summary, unit: str = "") -> str:
    digits = 1 if unit else 3
    text = f"{found.median:.{digits}f}{unit}"
    if found.min != found.max:
        text += f" [{found.min:.{digits}f} .. {found.max:.{digits}f}]"
    return text


# ---------------------------------------------------------------------------------------------
# Other tables, and words


def instructions(folder: Path = RESULTS) -> str:
    """What fsdp2 adds over what torch FSDP2 adds: a row per model, a column per path."""
    columns = [(path, precision) for path in VARIANTS for precision in PRECISIONS]
    header = ("32 blocks", *(f"{path}, {precision}" for path, precision in columns))
    file = newest("instructions", folder)
    rows = []
    for case, name in BLOCKS.items():
        labels = [added(case, precision, path) for path, precision in columns]
        ratios = file.results["ratios"] if file else {}
        cells = [_text(as_summary(ratios[each])) if ratios else ABSENT for each in labels]
        rows.append((name, *cells))
    return harness.markdown(header, rows)


def machines(folder: Path = RESULTS) -> str:
    """What the newest files' figures depend on besides the code: a line for each machine."""
    files = [file for run in RUNS if (file := newest(run, folder)) is not None]
    lines = {f"- {machine(e)}: {harness.describe(e)}" for e in (file.environment for file in files)}
    return "\n".join(sorted(lines))


def _words(figure: Callable[[Any], str], run: str, folder: Path = RESULTS) -> str:
    """A figure inside of a sentence."""
    file = newest(run, folder)
    return ABSENT if file is None else figure(file.results)


def _ratio(label: str, results: Any) -> str:
    return str(as_summary(results["ratios"][label]))


MADE: dict[str, Callable[[Path], str]] = {
    "targets": table,
    "instructions": instructions,
    "machines": machines,
    "users": partial(_words, users.page_table, "users"),
    **{
        f"added, {precision}": partial(_words, partial(_ratio, added("llama", precision)), "blocks")
        for precision in PRECISIONS
    },
    "gloo": partial(_words, partial(_ratio, "fsdp2 / torch"), "gloo"),
    **{
        name: partial(_words, partial(users.extremes, prefixes), "users")
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


def main(arguments: list[str] | None = None) -> None:
    """Measure what is asked for, and write what the pages quote."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--measure",
        type=lambda text: list(RUNS) if text == "all" else harness.among(RUNS)(text),
        default=[],
        metavar="RUNS",
        help=f"measure these first, comma list or all: {', '.join(RUNS)}",
    )
    options = parser.parse_args(arguments)
    for run in options.measure:
        print(measure(run))
    for path in PAGES:
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
