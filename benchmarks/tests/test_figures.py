"""Figures: pages use each of them and say what it shows; SVG files are what the script writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import charts, figures, strategy_memory, svg
from benchmarks.files import ROOT

pytestmark = pytest.mark.alone

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
    assert used == set(figures.FOLDER.iterdir())


def test_every_image_has_a_text_and_a_sentence_that_says_what_to_see() -> None:
    for page, each in images():
        assert len(each["alt"].split()) >= 4, (page, each["path"])
        assert re.match(r"[A-Z`].*\w", each["after"]), (page, each["path"], each["after"])


def test_figures_are_what_the_script_writes(tmp_path: Path) -> None:
    written = figures.write(tmp_path)
    assert {path.name for path in written} == {path.name for path in figures.FOLDER.glob("*.svg")}
    for path in written:
        assert path.read_text("utf-8") == (figures.FOLDER / path.name).read_text("utf-8"), path.name


def test_memory_by_strategy_is_what_the_planner_says() -> None:
    kept = figures.read("plan/strategies.json")["results"]["zero3"]
    found = strategy_memory.course(strategy_memory.planned("zero3"))
    for moment in ("before", "peak"):
        assert found[moment] == pytest.approx(kept[moment], rel=0.05)


# ---- the drawing


def luminance(color: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colors", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
def test_colors_are_legible(colors: dict[str, str]) -> None:
    assert set(colors) == set(svg.LIGHT)
    for ink in ("ink", "quiet"):
        for ground in ("ground", "panel", "grid"):
            assert contrast(colors[ink], colors[ground]) >= 4.5, (ink, ground)
    for series in (*svg.SERIES, "wait"):
        assert contrast(colors[series], colors["ground"]) >= 3, series
    for series in ("a", "b", "c", "d", "f", "wait"):
        assert contrast(colors["inverse"], colors[series]) >= 4.5, series


def test_text_is_escaped_and_numbers_are_short() -> None:
    drawing = svg.Drawing(100, 20.04, "a < b")
    drawing.text(-0.01, 1 / 3, "x & y")
    text = str(drawing)
    assert "<title>a &lt; b</title>" in text
    assert '<text x="0" y="0.3" class="ink">x &amp; y</text>' in text
    assert 'width="100" height="20"' in text


def test_bars_begin_at_zero_and_end_at_their_values() -> None:
    text = charts.bars(
        "T", "ms", {"fsdp2": {"one": (10.0, 8.0, 12.0)}, "other": {"one": (20, 20, 20)}}
    )
    looks = r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="16" class="(\w)"/>'
    (first, second) = re.findall(looks, text)
    assert first[0] == second[0]
    assert float(second[1]) == pytest.approx(2 * float(first[1]), abs=0.2)
    assert (first[2], second[2]) == ("a", "b")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 47, [0, 10, 20, 30, 40, 50]), (-0.14, 0.24, [-0.2, -0.1, 0, 0.1, 0.2, 0.3])],
)
def test_ticks_are_round_and_enclose_the_values(
    low: float, high: float, expected: list[float]
) -> None:
    assert charts.ticks(low, high) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.001, "< 0.01"),
        (0, "0.00"),
        (-0.05, "\N{MINUS SIGN}0.05"),
        (7.516, "7.52"),
        (491.1, "491"),
    ],
)
def test_values_have_three_digits(value: float, expected: str) -> None:
    assert charts.shown(value) == expected
