"""benchmarks/report.py: from results to pages, and figures that no hand has written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.harness import RESULTS, ROOT

pytestmark = pytest.mark.alone

ENVIRONMENT = {"date": "2026-11-20T10:00:00+00:00", "torch": "2.13.0", "python": "3.11.7"}
MACHINE = {"cpu": "AMD EPYC", "cores": 2}


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
    "docs/benchmarks.md": ("0.1 processors or less",),
    "docs/compat_xla.md": ("leave it at 128 KiB",),
    "docs/compat.md": ("more than 3 % and more than 1 MiB",),
    "docs/migration/torch_fsdp2.md": ("more than 3 % and more than 1 MiB",),
}
"""Numbers of definitions, and bounds, with the words around them."""

MADE = re.compile(r"<!-- [\w ,]+ -->.*?<!-- end -->|^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`|\]\([^)]*\)")
VERSION = re.compile(r"\b(?:2\.(?:8|1[0-5])|0\.1\.0|Python 3\.1\d|Apache 2\.0)(?![\d.]*\d)")
FIGURE = re.compile(r"\d*\.\d+|\d[\d,]* ?(?:%|\u00d7|[nµm]?s\b|[KMGT]i?B\b|times\b|per cent)")


@pytest.mark.parametrize("name", SOURCED)
def test_no_figure_is_written_by_hand(name: str) -> None:
    """Outside of what is made, and of code."""
    text = " ".join(CODE.sub("", MADE.sub("", (ROOT / name).read_text())).split())
    for words in STATED.get(name, ()):
        assert words in text
        text = text.replace(words, "")
    assert [found[0] for found in FIGURE.finditer(VERSION.sub("", text))] == []


def test_results_are_named_by_date_machine_and_run() -> None:
    for path in RESULTS.glob("*.json"):
        environment = json.loads(path.read_text())["environment"]
        (run,) = (r for r in report.RUNS if path.stem.endswith(f"core-{r}"))
        assert path.stem == f"{environment['date'][:10]}-{report.machine(environment)}-{run}"


def kept(folder: Path, day: str, ratio: float, **facts: Any) -> None:
    """A file of results of `train_lm` on gloo."""
    environment = {**ENVIRONMENT, **MACHINE, "date": day, **facts}
    results = {"ratios": {"fsdp2 / torch": {"median": ratio, "min": 0.4, "max": 2.0}}}
    path = folder / f"{day}-epyc-2core-gloo.json"
    path.write_text(json.dumps({"environment": environment, "results": results}))


def gloo_row(folder: Path) -> str:
    return next(line for line in report.table(folder).splitlines() if "ranks of gloo" in line)


def test_the_newest_file_counts(tmp_path: Path) -> None:
    kept(tmp_path, "2026-11-19", 2.0)
    kept(tmp_path, "2026-11-20", 0.5)
    expected = "| 0.75 | 0.500 [0.400 .. 2.000] | met |"
    assert gloo_row(tmp_path).endswith(expected)
    text = "<!-- gloo -->9<!-- end -->, <!-- training -->9<!-- end -->, <!-- x -->9<!-- end -->"
    assert report.filled(text, tmp_path) == (
        "<!-- gloo -->0.50 [0.40 .. 2.00]<!-- end -->, <!-- training -->no file<!-- end -->, "
        "<!-- x -->9<!-- end -->"
    )


@pytest.mark.parametrize(
    ("ratio", "stolen", "verdict"), [(0.76, 0.0, "**missed**"), (0.5, 0.5, "busy machine")]
)
def test_a_figure_above_its_target_or_of_a_busy_machine_is_not_met(
    tmp_path: Path, ratio: float, stolen: float, verdict: str
) -> None:
    kept(tmp_path, "2026-11-20", ratio, taken={"others": 0.02, "stolen": stolen})
    assert f"| {verdict} |" in gloo_row(tmp_path)


def test_runs_are_commands_that_benchmarks_take(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    for run in report.RUNS:
        module, *arguments = report.arguments_of(run)
        importlib.import_module(f"benchmarks.{module}").parse(arguments)
    with pytest.raises(SystemExit):
        report.main(["--measure", "host_cost,nothing"])
