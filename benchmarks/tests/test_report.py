"""benchmarks/report.py: from `--json` files to tables; and what benchmarks/budget.py counts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import budget, figures, files, inline, page, quiet, report, stats, targets
from benchmarks.workers import ROOT
from fsdp2.core.modules import registry

ENVIRONMENT = {"date": "2026-11-20T10:00:00+00:00", "torch": "2.13.0", "python": "3.11.7"}
MACHINE = {"cpu": "AMD EPYC", "cores": 2}


def written(folder: Path, command: str, results: Any, **facts: Any) -> Path:
    """A file as `stats.write_json` writes it."""
    path = folder / f"{command.split()[0].removesuffix('.py')}.json"
    environment = {**ENVIRONMENT, **MACHINE, "command": command, **facts}
    path.write_text(json.dumps({"environment": environment, "results": results}))
    return path


GLOO = {
    "options": {"preset": "small", "precision": "fp32"},
    "rounds": {
        "torch": {"step": [10.0, 20.0, 12.0], "loss": [1, 1, 1]},
        "fsdp2": {"step": [5.0, 8.0, 9.0], "loss": [1, 1, 1]},
    },
    "ratios": {"fsdp2 / torch": {"median": 0.5, "min": 0.4, "max": 0.75}},
}


def test_a_file_becomes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "gloo.py --rounds 3 --json somewhere/gloo.json", GLOO)
    assert report.main([str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "### Training step on two gloo ranks, small, fp32, ms",
        "",
        "2026-11-20, torch 2.13.0, Python 3.11.7, AMD EPYC (2 cores): `gloo.py --rounds 3`",
        "",
        "| variant | step |",
        "| --- | --- |",
        "| torch | 12.00 [10.00 .. 20.00] |",
        "| fsdp2 | 8.00 [5.00 .. 9.00] |",
        "",
        "- fsdp2 / torch: **0.500** [0.400 .. 0.750]",
    ]


def rounds(*variants: str, **kinds: list[float]) -> dict[str, Any]:
    return {"rounds": dict.fromkeys(variants, kinds), "options": {}, "ratios": {}}


STARTUP = rounds("torch", "fsdp2", **{"first": [1.0], "shard + first": [2.0]})
STARTUP["options"] = {"blocks": 100, "params_per_block": 10, "precision": "fp32"}
STEP = rounds(
    "none",
    "torch",
    "fsdp2",
    device=[2.0],
    host=[1.0],
    allocated=[3.0],
    reserved=[4.0],
    logits=[1.0],
)
STEP["options"] = {"preset": "tiny"}
STEP["ratios"] = {"fsdp2 / torch, allocated": {"median": 1.0, "min": 0.9, "max": 1.1}}
STEP["copied"] = {"none": {}, "fsdp2": {"copy_many": 2.5e9}}
COMPILE = rounds("torch eager", "torch compiled", "fsdp2 eager", "fsdp2 compiled", wall=[2.0])
COMPILE["options"] = {"backend": "inductor"}
for values in COMPILE["rounds"].values():
    values["host"] = values["logits"] = [1.0]
PADDED = dict.fromkeys(("ours", "gathered", "packed", "two_dims", "two_dims_packed", "torch"), 0.02)
HALF = {"median": 0.5, "min": 0.5, "max": 0.5}
SCALING = {
    "precision": "fp32",
    "cases": {"2x5": {"blocks": 2, "parameters": 10}},
    "rounds": {"2x5": {"none": [1.0], "fsdp2": [1.5]}},
    "ratios": {},
}
COUNTS = dict.fromkeys(budget.OPERATIONS, 2.0)
TIMES = dict.fromkeys(list(budget.OPERATIONS)[:-1], 0.5)


def allocated(variant: str, **more: float) -> dict[str, Any]:
    """A setting of benchmarks/memory.py; ``more`` as on a GPU."""
    setting = {"preset": "1.1b", "variant": variant, "reshard": "always", "checkpoints": True}
    sizes = {"forward": 4e9, "backward": 5e9, "eval": 1e9, "loss": 2e9, **more}
    return {**setting, "bytes": sizes, "holders": {}}


FILES: dict[str, tuple[Any, str]] = {
    "host_cost": (
        [
            {**rounds("none", "fsdp2@8", host=[4.0], full=[4.0]), "precision": "mixed"},
            SCALING,
        ],
        "| fsdp2@8 | 4.00 [4.00 .. 4.00] |",
    ),
    "optimizer": (
        [{**rounds("none", "flat", clip=[1.0], step=[2.0], both=[3.0]), "optimizer": "sgd"}],
        "| flat | 1.00 [1.00 .. 1.00] | 2.00 [2.00 .. 2.00] | 3.00 [3.00 .. 3.00] |",
    ),
    "memory": (
        [allocated("torch", reserved=8e9), allocated("fsdp2", reserved=7e9)],
        "| 1.1b | yes | always | fsdp2 | 4.000 | 5.000 | 1.000 | 2.000 | 7.000 "
        "| 1.000 | 1.000 | 0.875 |",
    ),
    "step": (STEP, "- fsdp2 / torch, allocated: **1.000** [0.900 .. 1.100]"),
    "planned_steps": (
        {
            "rows": {
                "fsdp2": {
                    "planned": {"ms": 2.0, "GB": 1.0},
                    "measured": {"ms": [4.0], "GB": [2.0]},
                }
            },
            "ratios": {},
            "lost": {},
        },
        "| fsdp2 | 2.00 | 4.00 | -50.0% | 1.0000 | 2.0000 | -50.0% |",
    ),
    "compile": (COMPILE, "- fsdp2 compiled / torch compiled: **1.000** [1.000 .. 1.000]"),
    "scaling": (
        SCALING,
        "| 2x5 | fsdp2 | 1.50  [1.50 .. 1.50] | 250.0 | 50.00 |",
    ),
    "instructions": (
        {
            "precision": "fp32",
            "cases": {"2x5": {"blocks": 2, "parameters": 10}},
            "counts": {"2x5": {"none": 1e6, "fsdp2": 1.5e6}},
            "ratios": {"2x5: (fsdp2 - none) / (torch - none)": 0.1},
        },
        "| 2x5 | fsdp2 | 1500 | 250.0 | 50.00 |",
    ),
    "imports": (
        {
            "options": {"without_bytecode": False},
            "imports": {"fsdp2": {"ms": [30.0, 29.0, 31.0], "modules": [100, 100, 100]}},
        },
        "| fsdp2 | 100 | 29.0 | 30.00  [29.00 .. 31.00] |",
    ),
    "checkpoint": (
        {
            "ranks": 2,
            "rounds": 1,
            "sizes": {"8": {"save": {"stall": [1.0], "durable": [2.0], "memory_mib": 3.5}}},
            "ratios": {"8 MB: save / dcp, durable": HALF},
        },
        "| save | 1.00 [1.00 .. 1.00] | 2.00 [2.00 .. 2.00] | 3.5 |",
    ),
    "slow_link": (
        {
            "options": {
                **{"nodes": 2, "ranks_per_node": 1, "mbit": 200.0, "grad_accum": 1},
                **{"preset": "small", "precision": "bf16"},
            },
            "rounds": {
                "torch": {"step": [2.0], "sent": [3e6], "loss": [1.5]},
                "8 bit": {"step": [1.0], "sent": [1e6], "loss": [1.25]},
            },
            "ratios": {"torch / 8 bit": {"median": 2.0, "min": 2.0, "max": 2.0}},
        },
        "| 8 bit | 1.00  [1.00 .. 1.00] | 1.0 | 2.00 | 1.2500 |",
    ),
    "accuracy": (
        {
            "options": {"preset": "small", "steps": 20},
            "losses": {"exact": {"0": 2.0, "1": 4.0}, "int8": {"0": 1.5, "1": 3.0}},
        },
        "| int8 | 2.2500 | 1.5000 .. 3.0000 | 2 | 0.7500 |",
    ),
    "faults": (
        {
            "rows": {
                "a node is killed": {
                    "outcome": "goes on",
                    "seconds": 25.04,
                    "again": 2,
                    "equal": True,
                }
            }
        },
        "| a node is killed | goes on | 25.0 | 2 | equal |",
    ),
    "muon": (
        {
            "options": {"units": 3, "dim": 64},
            "rounds": {"everywhere": [4.0], "fsdp2": [2.0]},
            "facts": {"fsdp2": {"sent": 3e6, "whole": 1.0, "balance": 1.0625}},
            "ratios": {"everywhere / fsdp2": {"median": 2.0, "min": 2.0, "max": 2.0}},
        },
        "| fsdp2 | 2.00  [2.00 .. 2.00] | 3.0 | 1.00 | 1.062 |",
    ),
    "users": (
        {
            "rows": {
                "training": {
                    "rounds": {"fsdp2": [3.0, 2.0, 4.0], "torch": [4.0, 4.0, 4.0]},
                    "collectives": {
                        "fsdp2": {"all_gather": 5, "gather": 2},
                        "torch": {"all_gather": 6, "barrier": 1},
                    },
                }
            },
        },
        "| training | 3.0 | 4.0 | 0.75 [0.50 .. 1.00] | 5 (6) | 0 (0) | 0 (0) "
        "| barrier: 0 (1), gather: 2 (0) |",
    ),
    "ema": (
        {
            "options": {"units": 3, "dim": 64},
            "rounds": {"every 1": [0.5], "flat": [2.0]},
            "ratios": {"every 1 / flat": {"median": 0.25, "min": 0.25, "max": 0.25}},
        },
        "| flat | 2.00  [2.00 .. 2.00] |",
    ),
    "group_faults": (
        {"rows": {"a fault": {"step": 2.5, "back": None, "dropped": 1, "equal": True}}},
        "| a fault | 2.5 |  | 1 | equal |",
    ),
    "startup": (STARTUP, "### Start-up, 100 blocks of 10 parameters, fp32, ms"),
    "elastic": (
        {
            "options": {"preset": "small"},
            "rounds": {
                "hsdp": {"step": [2.0], "cpu": [1.0]},
                "elastic": {"step": [3.0], "cpu": [2.0]},
            },
            "ratios": {"elastic / hsdp, step": {"median": 1.5, "min": 1.5, "max": 1.5}},
        },
        "| elastic | 3.00  [3.00 .. 3.00] | 2.00  [2.00 .. 2.00] |",
    ),
    "gloo": (GLOO, "| torch | 12.00 [10.00 .. 20.00] |"),
    "collective_cost": (
        {"all-gather, one tensor": {"1": 30.0, "9": 40.0}},
        "| all-gather, one tensor | 30.0 | 40.0 |",
    ),
    "block_collectives": (
        {
            "options": {"ranks": 1},
            "ratios": {"all-gather, width 64, nccl: hybrid / packed": HALF},
            "rows": [
                {
                    "backend": "nccl",
                    "class": "ProcessGroupNCCL",
                    "ranks": 1,
                    "width": 64,
                    "collective": "all-gather",
                    "nbytes": 4e6,
                    "rounds": {"packed": {"time": [2.0], "host": [30.0]}},
                    "kernels": {"packed": 2.0},
                    "absent": {"hybrid": "no coalesced call"},
                }
            ],
        },
        "| all-gather | 64 | nccl | packed | 2.000 | 2.0 | 30 | 2 |",
    ),
    "padding": (
        [{"model": "M", "ranks": 3, **PADDED, "aligned": True, "torch_aligned": False}],
        "| 3 | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 | yes | no |",
    ),
    "window": (
        [{"model": "M", "rule": "window 2", "forward": 1.0, "backward": 2.5}],
        "| M | 1.0 / 2.5 |",
    ),
    "budget": (
        {"precision": "fp32", "counts": COUNTS, "us": TIMES, "added": 50.0},
        f"| above the floor |  |  | {50.0 - len(TIMES):.1f} | fsdp2's own Python |",
    ),
}


def test_host_cost_has_the_cases_of_scaling_too(tmp_path: Path) -> None:
    _, facts, sections = report.read(written(tmp_path, "host_cost.py", FILES["host_cost"][0]))
    assert FILES["scaling"][1] in report.markdown(facts, sections).splitlines()


def test_a_step_says_what_was_copied_and_whose_values_were_not_a_models(tmp_path: Path) -> None:
    other = {**STEP, "rounds": {**STEP["rounds"], "torch": {**STEP["rounds"]["torch"]}}}
    other["rounds"]["torch"]["logits"] = [float("nan")]
    _, facts, (section,) = report.read(written(tmp_path, "step.py", other))
    assert "- fsdp2: copy_many reads and writes 2.500 GB a step" in report.markdown(
        facts, [section]
    )
    assert [note for note in section.notes if note.startswith("UNSOUND: torch's logits")]


def test_memory_has_what_was_measured(tmp_path: Path) -> None:
    """On the stand-in there is no allocator that reserves."""
    results = [allocated("none"), allocated("torch"), allocated("fsdp2")]
    _, _, (section,) = report.read(written(tmp_path, "memory.py", results))
    measured = ("forward", "backward", "eval", "loss")
    assert section.header[4:] == (*measured, "forward / torch's", "step / torch's")
    assert [row[-2:] for row in section.rows] == [("", ""), ("", ""), ("1.000", "1.000")]


@pytest.mark.parametrize("benchmark", FILES)
def test_every_benchmark(benchmark: str, tmp_path: Path) -> None:
    results, line = FILES[benchmark]
    name, facts, sections = report.read(written(tmp_path, f"{benchmark}.py", results))
    assert name == benchmark
    assert line in report.markdown(facts, sections).splitlines()


def test_every_benchmark_that_writes_json_has_a_reader() -> None:
    writers = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if re.search(r"stats\.write_json\(|step\.conclude\(", path.read_text())
    }
    assert writers == set(report.READERS) == set(FILES)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"environment": {}, "results": 1}'])
def test_another_file_is_named(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert report.main([str(path)]) == 2
    assert f"report: {path} is not what a benchmark writes with --json" in capsys.readouterr().err


def test_bars_are_medians_with_their_range(tmp_path: Path) -> None:
    (section,) = report.read(written(tmp_path, "gloo.py", GLOO))[2]
    assert section.bars == {"step": {"torch": (12.0, 10.0, 20.0), "fsdp2": (8.0, 5.0, 9.0)}}


def test_plots(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert report.main([str(written(tmp_path, "gloo.py", GLOO)), "--out", str(out)]) == 0
    assert (out / "gloo.svg").read_text().startswith("<svg ")


# ---- what pages quote


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.name)
def test_pages_say_what_the_newest_files_say(path: Path) -> None:
    text = path.read_text()
    assert page.filled(text) == text
    assert "<!-- end -->" in text or "<!-- / -->" in text


def test_every_table_stands_on_a_page() -> None:
    text = "".join(path.read_text() for path in page.PAGES)
    assert [name for name in page.MADE if f"<!-- {name} -->" not in text] == []
    assert [name for name in inline.FIGURES if f"<!-- = {name} -->" not in text] == []


@pytest.mark.parametrize("name", inline.SOURCED)
def test_no_figure_is_written_by_hand(name: str) -> None:
    text = (ROOT / name).read_text()
    assert list(inline.written_by_hand(name, text)) == []
    assert [
        words for words in inline.STATED.get(name, ()) if words not in " ".join(text.split())
    ] == []


def test_a_figure_that_is_written_by_hand_is_found() -> None:
    text = (
        "It takes 0.42 of\n7 ms, 3 % with `9 %`, on torch 2.13.\n<!-- t -->\n| 5 ms |\n<!-- end -->"
    )
    assert list(inline.written_by_hand("", text)) == ["0.42", "7 ms", "3 %"]
    assert list(inline.written_by_hand("", "<!-- = compiled-small -->0.42<!-- / -->")) == []


def test_figures_in_sentences_are_from_files(tmp_path: Path) -> None:
    rounds = {"fsdp2 compiled": {"wall": [1.0, 3.0]}, "torch compiled": {"wall": [4.0, 4.0]}}
    written(tmp_path, "compile.py", {"rounds": rounds}).rename(
        tmp_path / "2026-11-20-epyc-2core-compile.json"
    )
    text = "takes <!-- = compiled-small -->9<!-- / -->, <!-- = compiled-large -->9<!-- / -->"
    made = "takes <!-- = compiled-small -->0.50<!-- / -->, <!-- = compiled-large -->9<!-- / -->"
    assert inline.filled(text, tmp_path) == made  # the other run has no file here
    with pytest.raises(KeyError):
        inline.filled("<!-- = no-figure -->9<!-- / -->", tmp_path)


def test_the_page_is_short_and_has_every_plot() -> None:
    text = page.PAGES[0].read_text()
    assert len([line for line in text.splitlines() if not line.startswith("|")]) <= 156
    assert set(re.findall(r"\(figures/(\w+)\.svg\)", text)) == set(figures.PLOTS)


def test_results_are_named_by_date_machine_and_run() -> None:
    for path in files.RESULTS.glob("*.json"):
        environment = json.loads(path.read_text())["environment"]
        (run,) = (r for r in files.RUNS if path.stem.endswith(f"core-{r}"))
        assert path.stem == f"{environment['date'][:10]}-{files.machine(environment)}-{run}"


def kept(folder: Path, day: str, ratio: float, **facts: Any) -> None:
    """A file of results of gloo.py."""
    environment = {**ENVIRONMENT, **MACHINE, "date": day, "command": "gloo.py", **facts}
    results = {**GLOO, "ratios": {"fsdp2 / torch": {"median": ratio, "min": 0.4, "max": 2.0}}}
    path = folder / f"{day}-epyc-2core-gloo.json"
    path.write_text(json.dumps({"environment": environment, "results": results}))


def gloo_row(folder: Path) -> str:
    found = (line for line in targets.table(folder).splitlines() if "ranks of gloo" in line)
    return next(found)


def test_the_newest_file_counts(tmp_path: Path) -> None:
    kept(tmp_path, "2026-11-19", 2.0)
    kept(tmp_path, "2026-11-20", 0.5)
    expected = "| 0.75 | 0.500 [0.400 .. 2.000] | met | 2026-11-20, epyc-2core |"
    assert gloo_row(tmp_path).endswith(expected)


def test_a_figure_above_its_target_is_short(tmp_path: Path) -> None:
    kept(tmp_path, "2026-11-20", 0.76, taken={"others": 0.02, "stolen": 0.0})
    assert "| **short** |" in gloo_row(tmp_path)


def test_a_figure_of_a_busy_machine_is_never_met(tmp_path: Path) -> None:
    kept(tmp_path, "2026-11-20", 0.5, taken={"others": 0.02, "stolen": 0.5})
    assert "| busy machine |" in gloo_row(tmp_path)


# ---- whether the machine was quiet


def test_what_others_took_is_what_is_left() -> None:
    start = quiet.Times(busy=10.0, stolen=1.0, own=2.0, wall=100.0)
    end = quiet.Times(busy=25.0, stolen=2.0, own=12.0, wall=110.0)
    found = quiet.between(start, end)
    assert (found.others, found.stolen, found.quiet) == (0.5, 0.1, False)
    assert str(found).startswith("busy, repeat this run: other processes used 0.50 processors")
    assert quiet.between(start, quiet.Times(20.0, 1.0, 12.0, 110.0)).quiet


def test_processors_are_read_as_linux_writes_them() -> None:
    text = "cpu  100 20 30 4000 500 6 7 80 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
    assert quiet.processors(text, 100) == (1.63, 0.8)


def test_time_of_this_process_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does: a second more of all processors that is this process's."""
    first = quiet.Times(5.0, 0.0, 1.0, 10.0)
    moments = iter([first, quiet.Times(6.0, 0.0, 2.0, 11.0)])
    monkeypatch.setattr(quiet, "now", lambda: next(moments))
    found = quiet.Watch().found()
    assert found == quiet.Found(0.0, 0.0)


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quiet, "_STAT", tmp_path / "none")
    assert quiet.Watch().found() is None


def test_files_and_output_say_whether_it_was_quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stats._WATCH, "found", lambda: quiet.Found(1.5, 0.0))
    stats.write_json(tmp_path / "a.json", "cpu", {})
    assert "machine: busy, repeat this run" in capsys.readouterr().out
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["environment"]["taken"] == {"others": 1.5, "stolen": 0.0}


def test_runs_that_are_not_known_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main(["--measure", "host_cost,nothing"])
    assert "nothing not known; known are host_cost" in capsys.readouterr().err


# ---- the budget


@pytest.fixture(autouse=True)
def _no_root_of_another_test() -> None:
    """One whose calls no backward has looked at lets every backward of the process look."""
    registry.noting.clear()


def documented() -> dict[str, tuple[float, float]]:
    """Operation -> (fp32, mixed), of the table in docs/performance.md."""
    text = (
        (ROOT / "docs" / "performance.md").read_text().partition("| operation of a Llama block")[0]
    )
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    return {name: (float(fp32), float(mixed)) for name, fp32, mixed in rows}


@pytest.mark.extended
def test_the_documented_paths_are_what_is_counted() -> None:
    """Of each operation a number for each path and precision, in the table's order."""
    text = (ROOT / "docs" / "performance.md").read_text()
    table = text.partition("| operation of a Llama block")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:-1]]
    assert rows == budget.paths_table(budget.count_paths())[1]


def test_the_documented_budget_is_what_is_counted() -> None:
    fp32, mixed = budget.count("fp32"), budget.count("mixed")
    assert documented() == {name: (fp32[name], mixed[name]) for name in budget.OPERATIONS}
