"""Tables and plots of what the benchmarks wrote with `--json`.

    python -m benchmarks.report                                 # what pages quote, and plots
    python -m benchmarks.report --measure host_cost             # the same, with a new measurement
    python -m benchmarks.report results/*.json                  # prints Markdown
    python -m benchmarks.report results/*.json --out report     # report/tables.md, report/*.svg

Without files it takes the newest of each benchmark in benchmarks/results/ (`benchmarks/files.py`).
The Markdown of given files has, for each, the facts that its figures depend on, a table, and
ratios. The plots are bars of medians, with lines from the smallest to the largest round.
The command that made a file says which benchmark it is from:

    file {"environment": {...}, "results": ...} ──> [Section] ──> Markdown, SVG
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import (
    accuracy,
    block_collectives,
    budget,
    charts,
    checkpoint,
    compile,
    elastic,
    ema,
    faults,
    figures,
    files,
    group_faults,
    imports,
    instructions,
    memory,
    muon,
    padding,
    page,
    planned_steps,
    scaling,
    slow_link,
    stats,
    step,
    users,
    window,
)
from benchmarks.charts import Bar, Bars


@dataclass
class Section:
    """One table, and the bars of one plot.

    Attributes:
        title: what was measured.
        header, rows: the table.
        ratios: by what they say: median, smallest and largest round.
        notes: lines behind the table and ratios.
        table_counts: whether the table says more than its ratios do.
        unit: of the bars.
        bars: a series each: {label on the x axis: bar}; none where nothing is worth a plot.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    table_counts: bool = False
    unit: str = "ms"
    bars: Bars = field(default_factory=dict)


class ReportError(Exception):
    """A file that is not what a benchmark writes; the message says which."""


# ---------------------------------------------------------------------------------------------
# From a benchmark's results to sections


def _summary(values: Sequence[float]) -> str:
    found = stats.summarize(values)
    return f"{found.median:.2f} [{found.min:.2f} .. {found.max:.2f}]"


def _bar(values: Sequence[float]) -> Bar:
    found = stats.summarize(values)
    return (found.median, found.min, found.max)


def _ratio_notes(ratios: dict[str, dict[str, float]]) -> list[str]:
    return [
        f"{label}: **{ratio['median']:.3f}** [{ratio['min']:.3f} .. {ratio['max']:.3f}]"
        for label, ratio in ratios.items()
    ]


def _rounds(title: str, result: dict[str, Any], kinds: Sequence[str], primary: str) -> Section:
    """Variants by kinds of figures; bars of the primary one."""
    rounds = result["rounds"]
    rows = [
        (label, *(_summary(values[kind]) for kind in kinds)) for label, values in rounds.items()
    ]
    ratios = result.get("ratios", {})
    bars = {primary: {label: _bar(values[primary]) for label, values in rounds.items()}}
    return Section(title, ("variant", *kinds), rows, ratios, bars=bars)


def _host_cost(results: list[dict[str, Any]], device: str) -> list[Section]:
    kinds = ("host", "full") if device == "cuda" else ("host",)
    sections = []
    for each in results:
        if "cases" in each:
            sections += _scaling(each, device)
        else:
            title = f"Host time a step, {each['precision']}, ms"
            sections.append(_rounds(title, each, kinds, "host"))
    return sections


def _clock(result: dict[str, Any]) -> str:
    return " of CPU time" if result.get("clock") == "cpu" else ""


def _optimizer(results: list[dict[str, Any]], device: str) -> list[Section]:
    return [
        _rounds(
            f"Clipping and optimizer step, {each['optimizer']}, ms{_clock(each)}",
            each,
            ("clip", "step", "both"),
            "both",
        )
        for each in results
    ]


def _step(results: dict[str, Any], device: str) -> list[Section]:
    rounds = results["rounds"]
    kinds = list(next(iter(rounds.values())))
    primary = "device" if "device" in kinds else "wall"
    title = f"Step of a Llama-like model, {results['options']['preset']}, ms (memory: GB)"
    section = _rounds(title, results, kinds, primary)
    section.notes += [*step.unsound(rounds), *step.own_kernels(results), *step.copied(results)]
    return [section]


def _compile(results: dict[str, Any], device: str) -> list[Section]:
    rounds = results["rounds"]
    primary = "device" if device == "cuda" else "wall"
    ratios = {}
    for label, values in rounds.items():
        variant = label.split()[0]
        eager = rounds[compile.label(variant, None)]
        if label.endswith("compiled"):
            ratios[f"{label} / {variant} eager"] = vars(
                stats.ratio(values[primary], eager[primary])
            )
            torchs = rounds.get("torch compiled")
            if torchs is not None and variant == "fsdp2":
                ratios[f"{label} / torch compiled"] = vars(
                    stats.ratio(values[primary], torchs[primary])
                )
    title = f"Compiled blocks, {results['options']['backend']}, ms"
    section = _rounds(title, {"rounds": rounds, "ratios": ratios}, (primary, "host"), primary)
    section.notes += step.unsound(rounds, compile.label("none", None))
    return [section]


def _scaling(results: dict[str, Any], device: str) -> list[Section]:
    header, rows = scaling.table(results)
    bars: Bars = {}
    for case, by_variant in results["rounds"].items():
        for variant, values in by_variant.items():
            bars.setdefault(variant, {})[case] = _bar(values)
    title = f"Host time with more blocks and parameters, {results['precision']}"
    return [Section(title, header, rows, results["ratios"], bars=bars)]


def _instructions(results: dict[str, Any], device: str) -> list[Section]:
    header, rows = instructions.table(results)
    bars: Bars = {}
    for case, by_variant in results["counts"].items():
        for variant, value in by_variant.items():
            bars.setdefault(variant, {})[case] = (value / 1e6,) * 3
    notes = [f"{label}: **{value:.3f}**" for label, value in results["ratios"].items()]
    title = f"Instructions of a step, {results['precision']}, thousands"
    return [Section(title, header, rows, notes=notes, unit="millions", bars=bars)]


def _startup(results: dict[str, Any], device: str) -> list[Section]:
    options = results["options"]
    kinds = list(next(iter(results["rounds"].values())))
    real = options.get("model", "tiny") != "tiny"
    kind = f"as of {options['model']}" if real else f"of {options['params_per_block']} parameters"
    unit = "millions of instructions" if options.get("instructions") else "ms"
    title = f"Start-up, {options['blocks']} blocks {kind}, {options['precision']}, {unit}"
    return [_rounds(title, results, kinds, "shard + first")]


def _gloo(results: dict[str, Any], device: str) -> list[Section]:
    options = results["options"]
    title = f"Training step on two gloo ranks, {options['preset']}, {options['precision']}, ms"
    return [_rounds(title, results, ("step",), "step")]


def _elastic(results: dict[str, Any], device: str) -> list[Section]:
    header, rows = elastic.table(results)
    bars: Bars = {
        kind: {name: _bar(each[kind]) for name, each in results["rounds"].items()}
        for kind in ("step", "cpu")
    }
    title = f"Training step of two replica groups of two ranks, {results['options']['preset']}, ms"
    return [Section(title, header, rows, results["ratios"], bars=bars)]


def _collective_cost(results: dict[str, dict[str, float]], device: str) -> list[Section]:
    counts = list(dict.fromkeys(count for by_count in results.values() for count in by_count))
    rows = [
        (name, *(f"{by_count[count]:.1f}" if count in by_count else "" for count in counts))
        for name, by_count in results.items()
    ]
    header = ("collective", *(f"{count} tensors" for count in counts))
    bars = {
        f"{count} tensors": {
            name: (by_count[count],) * 3 for name, by_count in results.items() if count in by_count
        }
        for count in counts
    }
    return [Section("Host time of a real collective, us", header, rows, unit="us", bars=bars)]


def _block_collectives(results: dict[str, Any], device: str) -> list[Section]:
    header, rows = block_collectives.report(results)
    bars: Bars = {}
    for row in results["rows"]:
        for layout, values in row["rounds"].items():
            what = "gather" if row["collective"] == "all-gather" else "reduce"
            label = f"{what} {row['width']}, {row['backend']}"
            bars.setdefault(layout, {})[label] = _bar(values["time"])
    return [
        Section(
            "Collectives of a Llama block",
            header,
            rows,
            results["ratios"],
            block_collectives.notes(results),
            table_counts=True,
            bars=bars,
        )
    ]


def _padding(results: list[dict[str, Any]], device: str) -> list[Section]:
    sections = []
    for model in dict.fromkeys(each["model"] for each in results):
        own = [each for each in results if each["model"] == model]
        header, rows = padding.report(own)
        bars = {
            kind: {f"{each['ranks']}": (each[kind] * 100,) * 3 for each in own}
            for kind in ("ours", "two_dims", "torch")
        }
        title = f"Padding of {model}, per cent of its bytes"
        rest = [row[1:] for row in rows]
        sections.append(Section(title, header[1:], rest, unit="per cent", bars=bars))
    return sections


def _memory(results: list[dict[str, Any]], device: str) -> list[Section]:
    header, rows = memory.report(results)
    return [Section("Memory of a step, GB", header, rows)]


def _window(results: list[dict[str, Any]], device: str) -> list[Section]:
    header, rows = window.report(results)
    return [Section("All-gathers that compute does not hide, by simulation, ms", header, rows)]


def _budget(results: dict[str, Any], device: str) -> list[Section]:
    header, rows = budget.report(results)
    return [Section("Budget of one unit's step", header, rows)]


def _checkpoint(results: dict[str, Any], device: str) -> list[Section]:
    sections = []
    for size, rows in results["sizes"].items():
        lines = [
            (name, *(_summary(row[kind]) for kind in checkpoint.KINDS), row["memory_mib"])
            for name, row in rows.items()
        ]
        own = {label: r for label, r in results["ratios"].items() if label.startswith(f"{size} MB")}
        title = f"Checkpoints of {size} MB on {results['ranks']} ranks, ms"
        bars = {
            kind: {name: _bar(row[kind]) for name, row in rows.items()} for kind in checkpoint.KINDS
        }
        header = ("variant", *checkpoint.KINDS, "MiB")
        sections.append(Section(title, header, lines, own, bars=bars))
    return sections


def _slow_link(results: dict[str, Any], device: str) -> list[Section]:
    options = results["options"]
    where = slow_link.where(options)
    header, rows = slow_link.table(results)
    bars = {"step": {name: _bar(each["step"]) for name, each in results["rounds"].items()}}
    title = f"Step over a slow network, {options['preset']}, {options['precision']}, {where}"
    return [Section(title, header, rows, results["ratios"], bars=bars)]


def _group_faults(results: dict[str, Any], device: str) -> list[Section]:
    header, rows = group_faults.table(results["rows"])
    return [Section("Faults among replica groups", header, rows)]


def _faults(results: dict[str, Any], device: str) -> list[Section]:
    header, rows = faults.table(results["rows"])
    return [Section("What goes wrong, and after how many seconds a run goes on", header, rows)]


def _muon(results: dict[str, Any], device: str) -> list[Section]:
    options = results["options"]
    header, rows = muon.table(results)
    if "losses" in results:
        return [Section(f"Held-out loss of train_lm, {options['preset']}", header, rows)]
    bars = {"step": {name: _bar(each) for name, each in results["rounds"].items()}}
    title = f"Step of Muon, {options['units']} units of width {options['dim']}, ms"
    return [Section(title, header, rows, results["ratios"], bars=bars)]


def _ema(results: dict[str, Any], device: str) -> list[Section]:
    options = results["options"]
    header, rows = ema.table(results)
    bars = {"call": {name: _bar(each) for name, each in results["rounds"].items()}}
    title = f"Update of EMA and step of AdamW, {options['units']} units of width {options['dim']}"
    return [Section(title, header, rows, results["ratios"], bars=bars)]


def _users(results: dict[str, Any], device: str) -> list[Section]:
    header, rows = users.table(results)
    return [Section("What users run, over torch's FSDP2", header, rows)]


def _accuracy(results: dict[str, Any], device: str) -> list[Section]:
    options = results["options"]
    header, rows = accuracy.table(results["losses"])
    title = f"Held-out loss by format, {options['preset']}, {options['steps']} steps"
    return [Section(title, header, rows)]


def _imports(results: dict[str, Any], device: str) -> list[Section]:
    kept = "without" if results["options"]["without_bytecode"] else "with"
    header, rows = imports.report(results["imports"])
    return [Section(f"CPU time of imports, {kept} bytecode", header, rows)]


def _planned_steps(results: dict[str, Any], device: str) -> list[Section]:
    header, rows = planned_steps.table(results)
    bars: Bars = {"planned": {}, "measured": {}}
    for name, row in results["rows"].items():
        bars["planned"][name] = (row["planned"]["ms"],) * 3
        bars["measured"][name] = _bar(row["measured"]["ms"])
    title = "Planned and measured steps of Llama-like models"
    return [Section(title, header, rows, results["ratios"], table_counts=True, bars=bars)]


READERS: dict[str, Callable[[Any, str], list[Section]]] = {
    "host_cost": _host_cost,
    "optimizer": _optimizer,
    "step": _step,
    "compile": _compile,
    "scaling": _scaling,
    "instructions": _instructions,
    "startup": _startup,
    "gloo": _gloo,
    "elastic": _elastic,
    "collective_cost": _collective_cost,
    "block_collectives": _block_collectives,
    "padding": _padding,
    "memory": _memory,
    "window": _window,
    "planned_steps": _planned_steps,
    "budget": _budget,
    "imports": _imports,
    "checkpoint": _checkpoint,
    "slow_link": _slow_link,
    "faults": _faults,
    "group_faults": _group_faults,
    "muon": _muon,
    "ema": _ema,
    "users": _users,
    "accuracy": _accuracy,
}


def read(path: Path) -> tuple[str, str, list[Section]]:
    """(benchmark, what its figures depend on in one line, its sections) of one file."""
    try:
        content = json.loads(path.read_text())
        environment, results = content["environment"], content["results"]
        script, *arguments = shlex.split(environment["command"])
        reader = READERS[Path(script).stem]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(
            f"{path} is not what a benchmark writes with --json ({type(error).__name__}: {error}); "
            f"known are {', '.join(READERS)}"
        ) from error
    if "--json" in arguments:  # where it was written says nothing
        at = arguments.index("--json")
        del arguments[at : at + 2]
    command = shlex.join([Path(script).name, *arguments])
    device = "cuda" if "gpu" in environment else "cpu"
    facts = f"{environment['date'][:10]}, {stats.describe(environment)}: `{command}`"
    return Path(script).stem, facts, reader(results, device)


# ---------------------------------------------------------------------------------------------
# Out


def markdown(facts: str, sections: Sequence[Section]) -> str:
    """The sections of one file."""
    parts = []
    for section in sections:
        lines = [f"### {section.title}", "", facts, ""]
        lines.append(stats.markdown(section.header, section.rows))
        notes = [*_ratio_notes(section.ratios), *section.notes]
        lines += ["", *(f"- {note}" for note in notes)] if notes else []
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def write(out: Path, text: str, sections: dict[str, Section]) -> list[Path]:
    """Write the tables, and a plot of each section that has bars; returns the paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "tables.md"]
    paths[0].write_text(text)
    for name, section in sections.items():
        if section.bars:
            paths.append(out / f"{name}.svg")
            paths[-1].write_text(charts.bars(section.title, section.unit, section.bars))
    return paths


def write_page(runs: Sequence[str]) -> list[Path]:
    """Measure the runs, then write what pages quote, and plots anew; returns the paths."""
    paths = [files.measure(run) for run in runs]
    return [*paths, *page.write_tables(), *figures.write()]


def _runs(text: str) -> list[str]:
    runs = list(files.RUNS) if text == "all" else text.split(",")
    if unknown := set(runs) - set(files.RUNS):
        raise argparse.ArgumentTypeError(
            f"{', '.join(sorted(unknown))} not known; known are {', '.join(files.RUNS)}"
        )
    return runs


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tables and plots of benchmarks' --json files.")
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="none: write docs/benchmarks.md anew"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write tables.md and plots here")
    parser.add_argument(
        "--measure",
        type=_runs,
        default=[],
        metavar="RUNS",
        help=f"measure these first, comma list or all: {', '.join(files.RUNS)}",
    )
    options = parser.parse_args(arguments)
    if options.files and options.measure:
        parser.error("--measure is for docs/benchmarks.md: give no files")
    if options.out is not None and not options.files:
        parser.error("--out needs files")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not options.files:
        _print_paths(write_page(options.measure))
        return 0
    texts: list[str] = []
    plots: dict[str, Section] = {}
    try:
        for path in options.files:
            _, facts, sections = read(path)
            texts.append(markdown(facts, sections))
            for number, section in enumerate(sections, 1):
                name = path.stem if len(sections) == 1 else f"{path.stem}-{number}"
                plots[name] = section
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    text = "\n".join(texts)
    if options.out is None:
        print(text, end="")
        return 0
    _print_paths(write(options.out, text, plots))
    return 0


def _print_paths(paths: Sequence[Path]) -> None:
    for path in paths:
        print(path)


if __name__ == "__main__":
    sys.exit(main())
