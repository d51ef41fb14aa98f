"""The page of a timeline, in a real browser: what somebody sees, points at and presses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp2.command.trace import main
from fsdp2.tracing import Memory, Slice, Timeline, Wait, show
from tests.common.errors import raises
from tests.tracing import browser
from tests.tracing.browser import Browser, Page

pytestmark = pytest.mark.alone

NEEDS = browser.program() is None
REASON = "no Chromium is installed (apt-get install chromium), and CHROMIUM names none"

DATA = r'<script id="data" type="application/json">(.*?)</script>'

UNITS = 4
MB = 10**6


def step(gather: float, title: str, blocks: int = UNITS) -> Timeline:
    """Blocks whose gathers take so many µs beside forwards of 100, the first one exposed."""
    found = Timeline(metadata={"title": title, "source": "paper", "clock": "paper"})
    now = ready = 0.0
    for number in range(blocks):
        unit = f"blocks.{number}"
        behind, ready = len(found.slices), ready + gather
        about = (unit, MB, "bfloat16", "ranks 0-7")
        found.slices.append(Slice("all-gather", "all-gather", ready - gather, ready, *about))
        start = max(now, ready)
        label = "compute after all-gather"
        found.waits.append(
            Wait("compute", "all-gather", label, now, start, unit, "all-gather", behind)
        )
        found.slices.append(Slice("compute", "forward", start, start + 100, unit))
        found.memory.append(Memory(ready - gather, {"shards": MB, "gathered": number * MB}))
        now = start + 100
    found.memory.append(Memory(now, {"shards": MB}))
    return found.sorted()


def two_steps() -> Timeline:
    """A step, and the same 500 µs later."""
    found = step(40, "one")
    found.slices += [
        replace(s, start=s.start + 500, end=s.end + 500, iteration=1) for s in found.slices
    ]
    return found


def _data(page: Path) -> list[dict[str, Any]]:
    data = re.search(DATA, page.read_text(), re.DOTALL)
    found: list[dict[str, Any]] = json.loads(data[1])
    return found


# ---- the file


def test_a_page_holds_all_that_it_needs(tmp_path: Path) -> None:
    timeline = step(40, "a </script> title")
    timeline.write(tmp_path / "step.json")
    page = show(tmp_path / "step.json")
    assert page == tmp_path / "step.html"
    text = page.read_text()
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)
    (run,) = _data(page)
    assert run["title"] == "a </script> title"
    assert len(run["slices"]) == len(timeline.slices)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, gather in (("a", 40), ("b", 80)):
        step(gather, name).write(tmp_path / f"{name}.json")
    first, second = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert main(["view", first, second, "--to", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "both.html").is_file()
    assert main(["summary", first]) == 0
    assert main(["diff", first, second]) == 0
    out = capsys.readouterr().out
    assert "exposed communication" in out
    assert "blocks.0 gather" in out
    (tmp_path / "a.json").write_text("{}")
    assert main(["summary", first]) == main(["summary", "nowhere.json"]) == 2
    assert "not a timeline of fsdp2" in capsys.readouterr().err


def test_show_refuses() -> None:
    with raises("trace-show-nothing"):
        show()
    with raises("trace-show-where"):
        show(Timeline())


def test_the_table_of_two_runs_is_of_a_step(tmp_path: Path) -> None:
    one, two = step(40, "one"), two_steps()
    two.waits += [replace(w, start=w.start + 500, end=w.end + 500, behind=-1) for w in two.waits]
    first, second = _data(show(one, two, to=tmp_path / "both.html"))
    assert first["units"] == second["units"]
    assert [first["letter"], second["letter"]] == ["A", "B"]


def test_steps_are_marked_and_idle_time_has_causes(tmp_path: Path) -> None:
    (run,) = _data(show(two_steps(), to=tmp_path / "steps.html"))
    assert run["marks"] == [[0, 0.0, "step 0, 500 µs"], [1, 500.0, "step 1, 440 µs"]]
    assert run["steps"].startswith("2 steps: median 470 µs")
    assert run["idle"] == (
        "Compute is idle for 140 µs: 100 µs nothing was launched, 40 µs compute after all-gather."
    )
    (alone,) = _data(show(step(0, "one"), to=tmp_path / "one.html"))
    assert (alone["marks"], alone["steps"], alone["idle"]) == ([], "", "")


# ---- in a browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture
def page(chromium: Browser, tmp_path: Path) -> Page:
    return chromium.open(show(step(40, "one"), to=tmp_path / "one.html"))


def _range(page: Page) -> tuple[float, float]:
    """What the page says is shown, in µs."""
    units = {"µs": 1.0, "ms": 1e3, "s": 1e6}
    found = re.findall(r"([\d.]+) (µs|ms|s)", page.text("#range"))
    (start, end) = (float(number) * units[unit] for number, unit in found)
    return start, end


def _point(page: Page, lane: str, time: float, run: int = 0) -> tuple[float, float]:
    """Where a lane's row is at a moment, in the window."""
    left, _, width, _ = page.box("canvas[role=application]", run)
    names = page.texts(f"#runs section:nth-of-type({run + 1}) .names .lane")
    _, row, _, height = page.box(".lane", names.index(lane) + run * len(names))
    start, end = page.run("view")
    return left + width * (time - start) / (end - start), row + height / 2


browsing = [
    pytest.mark.extended,
    pytest.mark.skipif(NEEDS, reason=REASON),
]


class TestInABrowser:
    pytestmark = browsing

    def test_lanes_units_and_the_peak_are_there(self, page: Page) -> None:
        assert page.text("h1") == "one"
        assert page.texts(".lane") == ["compute", "all-gather"]
        assert page.texts("td button") == [f"blocks.{n}" for n in range(UNITS)]
        assert page.text(".peak") == "peak 4.00 MB"
        told = page.text(".peak-told")
        assert told == (
            "Peak of 4.00 MB at 120 µs, with forward blocks.1 and all-gather blocks.3 running: "
            "gathered 3.00 MB (75%), shards 1.00 MB (25%). Last came 1.00 MB of gathered."
        )
        assert page.texts(".facts b") == ["440 µs", "90.9 %", "9.1 %", "75%", "4.00 MB"]
        assert _range(page) == (0.0, 440.0)

    def test_a_slice_says_what_it_is(self, page: Page) -> None:
        assert page.text("#tip") == ""
        page.hover(*_point(page, "all-gather", 60))
        tip = page.text("#tip")
        assert tip.startswith("all-gather blocks.1\nall-gather lane, 40.0 µs from 40.0 µs")
        assert "1.00 MB in bfloat16, 25.00 GB/s" in tip
        assert "ranks 0-7" in tip
        page.hover(*_point(page, "compute", 20))
        assert "stood still for 40.0 µs" in page.text("#tip")
        assert "behind all-gather blocks.0 on the all-gather lane" in page.text("#tip")
        page.hover(5, 5)
        assert page.text("#tip") == ""

    def test_memory_says_how_much_of_what(self, page: Page) -> None:
        left, top, width, height = page.box("canvas[role=img]")
        page.hover(left + width * 0.9, top + height / 2)
        assert "gathered: 3.00 MB" in page.text("#tip")
        assert "shards: 1.00 MB" in page.text("#tip")

    def test_keys_and_buttons_zoom_and_move(self, page: Page) -> None:
        page.run("document.querySelector('canvas[role=application]').focus()")
        page.press("+")
        start, end = _range(page)
        assert end - start == pytest.approx(440 * 0.6, rel=0.01)
        page.press("ArrowRight")
        assert _range(page)[0] == pytest.approx(start + 0.2 * (end - start), rel=0.02)
        page.press("-")
        page.press("0")
        assert _range(page) == (0.0, 440.0)
        left, top, width, height = page.box("#in")
        page.click(left + width / 2, top + height / 2)
        assert _range(page) == pytest.approx((start, end), rel=0.01)

    def test_the_wheel_zooms_where_the_mouse_is_and_dragging_moves(self, page: Page) -> None:
        x, y = _point(page, "compute", 300)
        page.wheel(x, y, -240)
        start, end = _range(page)
        assert end - start < 440 * 0.8
        assert _point(page, "compute", 300)[0] == pytest.approx(x, abs=2)
        page.drag(x, y, -100)
        assert _range(page)[0] > start

    def test_it_is_used_by_keyboard_alone(self, page: Page) -> None:
        for _ in range(9):  # five buttons, then the timeline
            page.press("Tab")
            if page.run("document.activeElement.getAttribute('role')") == "application":
                break
        assert page.run("document.activeElement.getAttribute('role')") == "application"
        page.press("ArrowDown")
        assert page.text(".told") == f"all-gather lane, {UNITS} slices"
        page.press("n")
        page.press("n")
        assert page.text(".told").startswith("all-gather blocks.1: all-gather lane, 40.0 µs")
        page.press("Enter")
        assert _range(page)[1] < 200
        page.press("Escape")
        assert page.text(".told") == ""
        page.press("m")
        start, end = _range(page)
        assert (start + end) / 2 == pytest.approx(120, abs=1)
        assert page.text(".told").startswith("Peak of 4.00 MB")
        offset = "getComputedStyle(document.activeElement).outlineOffset"
        assert page.run(offset) == "-2px"  # inside of the frame, which cuts off what is outside

    def test_a_click_chooses_a_slice_and_a_unit(self, page: Page) -> None:
        page.click(*_point(page, "compute", 100))
        assert page.text(".told").startswith("forward blocks.0")
        left, top, width, height = page.box("td button", 2)
        page.click(left + width / 2, top + height / 2)
        pressed = page.run("[...document.querySelectorAll('td button')].map(b => b.ariaPressed)")
        assert pressed == ["false", "false", "true", "false"]

    def test_everything_has_a_name_for_those_who_do_not_see(self, page: Page) -> None:
        unnamed = page.run(
            "[...document.querySelectorAll('button, canvas, section, [role]')].filter(e => "
            "!(e.ariaLabel || e.innerText.trim() || e.matches('.told, #tip')))"
            ".map(e => e.outerHTML)"
        )
        assert unnamed == []
        assert page.run("document.documentElement.lang") == "en"

    def test_steps_are_shown_one_after_another(self, chromium: Browser, tmp_path: Path) -> None:
        page = chromium.open(show(two_steps(), to=tmp_path / "steps.html"))
        assert page.text(".steps").startswith("2 steps: median 470 µs")
        assert page.text(".idle").startswith("Compute is idle for 140 µs: ")
        page.run("document.querySelector('canvas[role=application]').focus()")
        for shown, told in (((0, 500), "step 0, 500 µs"), ((500, 940), "step 1, 440 µs")):
            page.press("s")
            assert _range(page) == pytest.approx(shown, abs=0.1)
            assert page.text(".told") == told

    @pytest.mark.parametrize("dark", [False, True])
    def test_it_is_legible_in_light_and_dark(
        self, chromium: Browser, tmp_path: Path, dark: bool
    ) -> None:
        """By WCAG's contrast: 4.5 for words, 3 for what is drawn."""
        path = show(step(40, "one"), to=tmp_path / "one.html")
        page = chromium.open(path, dark=dark)
        names = ["ground", "ink", "quiet", "forward", "backward", "optimizer", "gather"]
        names += ["scatter", "reduce", "copy", "wait", "on-color", "panel", "wait-ground"]
        colors = {name: page.run(f"css['{name}']") for name in names}
        assert (_light(colors["ground"]) < 0.1) is dark
        for name in ("ink", "quiet", "wait"):
            assert _contrast(colors[name], colors["ground"]) >= 4.5, name
        assert _contrast(colors["quiet"], colors["panel"]) >= 4.5
        assert _contrast(colors["wait"], colors["wait-ground"]) >= 4.0
        for name in ("forward", "backward", "optimizer", "gather", "scatter", "reduce", "copy"):
            assert _contrast(colors[name], colors["ground"]) >= 3, name
            assert _contrast(colors["on-color"], colors[name]) >= 3, name

    def test_two_runs_share_an_axis_and_a_table(self, chromium: Browser, tmp_path: Path) -> None:
        page = chromium.open(show(step(40, "before"), step(90, "after"), to=tmp_path / "two.html"))
        assert page.texts("h2") == ["A: before", "B: after", "Units"]
        assert page.text(".compared") == (
            "B against A, per step: 490 µs in all for 440 µs (1.11 x), 90 µs of exposed "
            "communication for 40 µs (2.25 x), a peak of 4.00 MB for 4.00 MB (1.00 x)."
        )
        assert page.text("#units-told").endswith("A is before. B is after. Times are per step.")
        assert page.texts(".lane") == ["compute", "all-gather"] * 2
        assert page.texts("th")[:3] == ["unit", "compute", "copies"]
        assert page.texts("th.run")[:2] == ["A", "B"]
        row = page.texts("tbody tr:first-child td")
        assert row[5:7] == ["40 µs", "90 µs"]
        assert row[-1] == "+50.0 µs"
        page.run("document.querySelectorAll('canvas[role=application]')[1].focus()")
        page.press("+")
        for run in (0, 1):  # of either, the same moment is at the same place
            x, _ = _point(page, "compute", 200, run)
            assert x == pytest.approx(_point(page, "compute", 200)[0])
        page.press("0")
        page.hover(*_point(page, "all-gather", 100, run=1))
        assert page.text("#tip").startswith("all-gather blocks.1")

    def test_ten_thousand_slices_are_drawn_by_what_is_seen(
        self, chromium: Browser, tmp_path: Path
    ) -> None:
        """Counted, not timed: what shares a pixel is drawn once, what is outside not at all."""
        timeline = step(40, "long", blocks=5000)
        assert len(timeline.slices) == 10_000
        page = chromium.open(show(timeline, to=tmp_path / "long.html"))
        width = page.box("canvas[role=application]")[2]
        assert page.run("runs[0].drawn") <= 4 * width
        assert page.run("runs[0].arrows") <= 120
        assert page.run("runs[0].samples") <= width
        page.run("setView(100000, 100400)")
        page.drawn()
        assert 8 <= page.run("runs[0].drawn") <= 16


def _light(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    high, low = sorted((_light(a), _light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)
