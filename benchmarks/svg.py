"""Figures as SVG text: shapes and words in the colors of the reader's light or dark setting.

    drawing = Drawing(400, 120, "What it shows")
    drawing.box(10, 10, 80, 30, "forward", "a")
    path.write_text(str(drawing))

Every color is a class, and the style sheet in the file has two colors for each class. A rounded
ground lies below everything, so that a figure stays legible on a page whose setting differs from
the reader's. The same calls make the same text: no fonts are measured, and numbers are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

SERIES = "abcdefg"
"""Classes of fills: blue, orange, green, purple, grey, teal, olive."""

LIGHT = {
    **{"ground": "#ffffff", "ink": "#1b1f27", "quiet": "#59616e", "line": "#8b94a1"},
    **{"grid": "#e3e7ec", "panel": "#f2f4f7", "wait": "#c93a3a", "inverse": "#ffffff"},
    **{"a": "#3a6fd3", "b": "#b85c00", "c": "#2a8447", "d": "#7a55c7"},
    **{"e": "#868f9c", "f": "#0b7f86", "g": "#8a7a10"},
}
DARK = {
    **{"ground": "#14171c", "ink": "#e8eaee", "quiet": "#a3abb8", "line": "#7d8795"},
    **{"grid": "#2b313b", "panel": "#1f242c", "wait": "#ff8585", "inverse": "#10131a"},
    **{"a": "#7ba4f4", "b": "#f0a04b", "c": "#6cc98a", "d": "#b79af0"},
    **{"e": "#6b7482", "f": "#4fc0c6", "g": "#cdbb4f"},
}
_FONT = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif"


def _colors(colors: dict[str, str]) -> str:
    fills = "".join(f".{name}{{fill:{color}}}" for name, color in colors.items())
    strokes = "".join(f".s-{name}{{stroke:{color}}}" for name, color in colors.items())
    return fills + strokes


_STYLE = (
    f"text{{font-family:{_FONT};font-size:12px}}.bold{{font-weight:600}}"
    ".end{text-anchor:end}.middle{text-anchor:middle}.small{font-size:11px}.title{font-size:14px}"
    ".stroke{fill:none;stroke-width:1.5}.thin{fill:none;stroke-width:1}.faint{fill-opacity:.18}.pale{fill-opacity:.4}"
    f".dashed{{stroke-dasharray:4 3}}{_colors(LIGHT)}"
    f"@media(prefers-color-scheme:dark){{{_colors(DARK)}}}"
)


def number(value: float) -> str:
    """A coordinate: one decimal, and none where it is 0."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def width_of(text: str, size: float = 12) -> float:
    """About how wide a line of text is, in any of the fonts."""
    return (
        sum(0.32 if c in "il.,:;'()|[]fjt I" else 0.62 if c.islower() else 0.68 for c in text)
        * size
    )


class Drawing:
    """An SVG file.

    Args:
        width: of the figure, in pixels.
        height: likewise.
        title: what a screen reader says.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height = width, height
        self._title = title
        self._parts: list[str] = []

    def resize(self, height: float) -> None:
        """Give it another height: that of what is in it."""
        self.height = height

    def rect(
        self, x: float, y: float, width: float, height: float, look: str, radius: float = 0
    ) -> None:
        """A rectangle; ``look``: classes."""
        size = f'width="{number(width)}" height="{number(height)}"'
        round_ = f' rx="{number(radius)}"' if radius else ""
        self._add(f'<rect x="{number(x)}" y="{number(y)}" {size}{round_} class="{look}"/>')

    def text(self, x: float, y: float, text: str, look: str = "ink") -> None:
        """One line of text; ``look``: classes of color, size and anchor."""
        self._add(f'<text x="{number(x)}" y="{number(y)}" class="{look}">{escape(text)}</text>')

    def line(self, points: Sequence[tuple[float, float]], look: str) -> None:
        """Straight lines from point to point."""
        found = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self._add(f'<polyline points="{found}" class="{look}"/>')

    def area(self, points: Sequence[tuple[float, float]], look: str) -> None:
        """A filled polygon."""
        found = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self._add(f'<polygon points="{found}" class="{look}"/>')

    def dot(self, x: float, y: float, radius: float, look: str) -> None:
        """A filled circle."""
        self._add(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" class="{look}"/>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str,
        color: str,
        ink: str = "inverse",
    ) -> None:
        """A filled box with centered lines of text in it."""
        self.rect(x, y, width, height, color, radius=3)
        lines = text.split("\n") if text else []
        for place, line in enumerate(lines):
            below = y + height / 2 + 4 + 14 * (place - (len(lines) - 1) / 2)
            self.text(x + width / 2, below, line, f"{ink} middle")

    def arrow(self, points: Sequence[tuple[float, float]], look: str = "line") -> None:
        """Straight lines with a head at the last point; ``look``: the color."""
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        along, across = (x1 - x0) / length, (y1 - y0) / length
        back = (x1 - 6 * along, y1 - 6 * across)
        self.line([*points[:-1], back], f"stroke s-{look}")
        sides = [(back[0] - s * 3.5 * across, back[1] + s * 3.5 * along) for s in (1, -1)]
        self.area([(x1, y1), *sides], look)

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> float:
        """Colors and what they stand for, in rows that fit; returns the y below them."""
        at = x
        for look, text in entries:
            needed = 16 + width_of(text) + 18
            if at > x and at + needed > self.width:
                at, y = x, y + 18
            self.rect(at, y - 9, 11, 11, look, radius=2)
            self.text(at + 16, y, text, "quiet")
            at += needed
        return y + 18

    def _add(self, part: str) -> None:
        self._parts.append(part)

    def __str__(self) -> str:
        size = f'width="{number(self.width)}" height="{number(self.height)}"'
        view = f'viewBox="0 0 {number(self.width)} {number(self.height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} {view}>'
        ground = f'<rect {size} rx="8" class="ground"/>'
        style = f"<style>{_STYLE}</style>"
        start = [head, f"<title>{escape(self._title)}</title>", style, ground]
        return "\n".join([*start, *self._parts, "</svg>", ""])
