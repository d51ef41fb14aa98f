"""benchmarks/report.py: from results to pages; and what benchmarks/budget.py counts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import budget, files, quiet, report, stats, targets
from benchmarks.workers import ROOT
from fsdp2.core.modules import registry

ENVIRONMENT = {"date": "2026-11-20T10:00:00+00:00", "torch": "2.13.0", "python": "3.11.7"}
MACHINE = {"cpu": "AMD EPYC", "cores": 2}


# ---- what pages quote


@pytest.mark.parametrize("path", report.PAGES, ids=lambda path: path.name)
def test_pages_say_what_the_newest_files_say(path: Path) -> None:
    text = path.read_text()
    assert report.filled(text) == text
    assert "<!-- end -->" in text


def test_every_table_stands_on_a_page() -> None:
    text = "".join(path.read_text() for path in report.PAGES)
    assert [name for name in report.MADE if f"<!-- {name} -->" not in text] == []


SOURCED = (
    *("README.md", "docs/index.md", "docs/benchmarks.md", "docs/compile.md"),
    *("docs/compat.md", "docs/compat_fsdp1.md", "docs/compat_xla.md"),
    *("docs/migration/torch_fsdp2.md", "docs/migration/fsdp1.md"),
    *("docs/migration/ddp.md", "docs/migration/deepspeed.md"),
)
"""Pages on which no measured figure is written by hand."""

STATED = {
    "docs/benchmarks.md": ("0.1 processors or less", "exceed 3 %", "below 2 %"),
    "docs/compat_xla.md": ("leave it at 128 KiB",),
    "docs/compat.md": ("more than 3 % and more than 1 MiB",),
    "docs/migration/torch_fsdp2.md": ("more than 3 % and more than 1 MiB",),
}
"""Numbers of definitions, and bounds, with the words around them."""

MADE = re.compile(r"<!-- [\w ,]+ -->.*?<!-- end -->|^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`|\]\([^)]*\)")
VERSION = re.compile(r"\b(?:2\.(?:8|1[0-5])|0\.1\.0|Python 3\.1\d|Apache 2\.0)(?![\d.]*\d)")
FIGURE = re.compile(r"\d*\.\d+|\d[\d,]* ?(?:%|\u00d7|[nµm]?s\b|[KMGT]i?B\b|times\b|per cent)")


def written_by_hand(text: str, stated: tuple[str, ...] = ()) -> list[str]:
    """Measured figures of a page outside of what is made, and of code."""
    text = " ".join(CODE.sub("", MADE.sub("", text)).split())
    for words in stated:
        assert words in text
        text = text.replace(words, "")
    return [found[0] for found in FIGURE.finditer(VERSION.sub("", text))]


@pytest.mark.parametrize("name", SOURCED)
def test_no_figure_is_written_by_hand(name: str) -> None:
    assert written_by_hand((ROOT / name).read_text(), STATED.get(name, ())) == []


def test_a_figure_that_is_written_by_hand_is_found() -> None:
    text = (
        "It takes 0.42 of\n7 ms, 3 % with `9 %`, on torch 2.13.\n<!-- t -->\n| 5 ms |\n<!-- end -->"
    )
    assert written_by_hand(text) == ["0.42", "7 ms", "3 %"]
    assert written_by_hand("<!-- gloo -->0.42<!-- end -->") == []


def test_figures_in_sentences_are_from_files(tmp_path: Path) -> None:
    kept(tmp_path, "2026-11-20", 0.5)
    text = (
        "takes <!-- gloo -->9<!-- end -->, <!-- training -->9<!-- end -->, <!-- x -->9<!-- end -->"
    )
    assert report.filled(text, tmp_path) == (
        "takes <!-- gloo -->0.50 [0.40 .. 2.00]<!-- end -->, "
        "<!-- training -->no file<!-- end -->, <!-- x -->9<!-- end -->"
    )


def test_the_page_is_short() -> None:
    text = report.PAGES[0].read_text()
    assert len([line for line in text.splitlines() if not line.startswith("|")]) <= 156


def test_results_are_named_by_date_machine_and_run() -> None:
    for path in files.RESULTS.glob("*.json"):
        environment = json.loads(path.read_text())["environment"]
        (run,) = (r for r in files.RUNS if path.stem.endswith(f"core-{r}"))
        assert path.stem == f"{environment['date'][:10]}-{files.machine(environment)}-{run}"


def kept(folder: Path, day: str, ratio: float, **facts: Any) -> None:
    """A file of results of gloo.py."""
    environment = {**ENVIRONMENT, **MACHINE, "date": day, "command": "gloo.py", **facts}
    results = {"ratios": {"fsdp2 / torch": {"median": ratio, "min": 0.4, "max": 2.0}}}
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
