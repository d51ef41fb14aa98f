"""Figures: pages use each of them and say what it shows; SVG files are what the script writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import memory
from benchmarks.harness import RESULTS, ROOT

pytestmark = pytest.mark.alone

FOLDER = ROOT / "docs" / "figures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IMAGE = re.compile(r"^!\[(?P<alt>[^\]]*)\]\((?P<path>[^)\s]+)\)\n+(?P<after>[^\n]*)", re.MULTILINE)


def images() -> list[tuple[Path, re.Match[str]]]:
    """Every image of the pages, and its page."""
    return [(page, each) for page in PAGES for each in IMAGE.finditer(page.read_text("utf-8"))]


def test_every_image_of_a_page_stands_in_a_line_of_its_own() -> None:
    texts = "".join(page.read_text("utf-8") for page in PAGES)
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"!\[[^\]]*\]\(", code.sub("", texts))) == len(images())


def test_every_figure_is_on_a_page_and_every_image_is_there() -> None:
    used = {(page.parent / each["path"]).resolve() for page, each in images()}
    assert used == set(FOLDER.iterdir())


def test_every_image_has_a_text_and_a_sentence_that_says_what_to_see() -> None:
    for page, each in images():
        assert len(each["alt"].split()) >= 4, (page, each["path"])
        assert re.match(r"[A-Z`].*\w", each["after"]), (page, each["path"], each["after"])


def test_memory_by_strategy_is_what_the_planner_says() -> None:
    kept = json.loads((RESULTS / "plan" / "strategies.json").read_text())["results"]["zero3"]
    found = memory.course(memory.planned("zero3"))
    for moment in ("before", "peak"):
        assert found[moment] == pytest.approx(kept[moment], rel=0.05)


# ---- the drawing


@pytest.fixture
def figures() -> ModuleType:
    """The module that draws, where matplotlib is installed."""
    pytest.importorskip("matplotlib", reason="the extra `docs`: matplotlib draws figures")
    from benchmarks import figures

    return figures


def test_figures_are_what_the_script_writes(figures: ModuleType, tmp_path: Path) -> None:
    written = figures.write(tmp_path)
    assert {path.name for path in written} == {path.name for path in FOLDER.glob("*.svg")}
    for path in written:
        assert path.read_text("utf-8") == (FOLDER / path.name).read_text("utf-8"), path.name


def test_every_plot_is_on_the_page_of_benchmarks(figures: ModuleType) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert set(re.findall(r"\(figures/(\w+)\.svg\)", text)) == set(figures.PLOTS)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.svg")), ids=lambda path: path.stem)
def test_a_dark_page_replaces_every_color(path: Path) -> None:
    text = path.read_text("utf-8")
    style, _, drawing = text.partition("</style>")
    replaced = set(re.findall(r"(?:fill|stroke): (#\w{6})", style))
    assert set(re.findall(r"(?:fill|stroke): (#\w{6})", drawing)) <= replaced
    assert "rgb(" not in drawing


def luminance(color: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colors_are_legible(figures: ModuleType, dark: bool) -> None:
    colors = {name: pair[dark] for name, pair in figures.COLORS.items()}
    for ink in ("ink", "quiet"):
        for ground in ("ground", "panel", "grid"):
            assert contrast(colors[ink], colors[ground]) >= 4.5, (ink, ground)
    for series in (*figures.SERIES, "red"):
        assert contrast(colors[series], colors["ground"]) >= 3, series
    for series in ("blue", "orange", "green", "purple", "teal", "red"):
        assert contrast(colors["inverse"], colors[series]) >= 4.5, series
