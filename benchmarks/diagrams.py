"""Diagrams of the docs: a unit's life, meshes, saves in time.

streams.schedule ── unit_life ──┐
ranks of a mesh ──── meshes ────┼──> SVG text
(name, stall, durable) ─ saves ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import streams
from benchmarks.charts import WIDTH, ticks
from benchmarks.svg import Drawing
from fsdp2.tracing import Slice

# ---- a unit's life

FOLLOWED = "blocks.1"
_LOOKS = {"all-gather": "b", "forward": "a", "backward": "d", "reduce-scatter": "c"}
_LEGEND = (
    *((look, operation) for operation, look in _LOOKS.items()),
    ("f", "optimizer step"),
    ("grid", "other units"),
)
_LANES = {"all-gather": 0, "reduce": 0, "compute": 1}


def unit_life() -> str:
    """One unit in a steady step of four, as fsdp2's scheduler orders it."""
    drawing = Drawing(WIDTH, 304, "A unit's life in one step")
    slices = [s for s in streams.schedule(copies=1).slices if s.lane in _LANES]
    slices = [s for s in slices if s.operation != "copy"]
    left, right, end = 128.0, WIDTH - 40.0, max(s.end for s in slices)

    def x(time: float) -> float:
        return left + time / end * (right - left)

    drawing.text(16, 26, "One step of four units, 0 to 3: the life of unit 1", "ink title bold")
    drawing.legend(16, 50, _LEGEND)
    top = 108.0
    for place, name in enumerate(("communication", "compute")):
        y = top + 44 * place
        drawing.rect(left, y, right - left, 34, "panel", radius=3)
        drawing.text(left - 10, y + 21, name, "ink end")
    for each in slices:
        if each.operation != "optimizer":
            _slice(drawing, each, x, top)
    step = min(s.start for s in slices if s.operation == "optimizer")
    drawing.rect(x(step), top + 44, right - x(step), 34, "f", radius=2)
    _state(drawing, [s for s in slices if s.unit == FOLLOWED], x, (left, right), top + 100)
    return str(drawing)


def _slice(drawing: Drawing, each: Slice, x: Callable[[float], float], top: float) -> None:
    y = top + 44 * _LANES[each.lane]
    width = max(x(each.end) - x(each.start) - 1, 1.5)
    mine = each.unit == FOLLOWED
    look = _LOOKS[each.operation] if mine else "grid"
    drawing.rect(x(each.start), y, width, 34, look, radius=3)
    number = each.unit.rpartition(".")[2]
    text = f"{each.operation} {number}" if width > 70 else number
    ink = "inverse" if mine else "quiet"
    drawing.text(x(each.start) + width / 2, y + 21, text, f"{ink} small middle")


def _state(
    drawing: Drawing,
    own: Sequence[Slice],
    x: Callable[[float], float],
    sides: tuple[float, float],
    top: float,
) -> None:
    """What the unit has in memory, and when that changes."""

    def places(operation: str) -> list[tuple[float, float]]:
        return [(x(s.start), x(s.end)) for s in own if s.operation == operation]

    (gathered, again), (reduced,) = places("all-gather"), places("reduce-scatter")
    (forward,), (backward,), (step,) = places("forward"), places("backward"), places("optimizer")
    (left, right), low = sides, top + 66
    drawing.text(left - 10, top + 30, "memory of", "ink end")
    drawing.text(left - 10, top + 46, "unit 1", "ink end")
    drawing.rect(left, low - 14, right - left, 14, "e")
    drawing.text(
        left, low + 16, "the shard of parameters and optimizer states stays", "quiet small"
    )
    for start, end in ((gathered[0], forward[1]), (again[0], backward[1])):
        drawing.rect(start, top, end - start, 52, "b")
        drawing.text((start + end) / 2, top + 30, "unsharded", "inverse middle")
    drawing.rect(backward[1], top + 12, reduced[1] - backward[1], 40, "d")
    drawing.rect(reduced[1], top + 38, right - reduced[1], 14, "c")
    drawing.text(backward[1] + 4, top + 6, "gradients", "ink small")
    drawing.text(reduced[1] + 4, top + 32, "gradient shard", "ink small")
    changes = (
        (gathered[0], "all-gather", 0),
        (forward[0], "forward", 1),
        (forward[1], "reshard", 0),
        (again[0], "all-gather", 0),
        (backward[0], "backward", 1),
        (reduced[0], "reshard, reduce-scatter", 0),
        (step[0], "step", 1),
    )
    for place, (at, words, lower) in enumerate(changes, 1):
        y = top - 124 + 16 * lower
        drawing.line([(at, y + 4), (at, top - 22)], "thin dashed s-quiet")
        last = place == len(changes)
        drawing.text(
            right if last else at, y, f"{place} {words}", "ink small end" if last else "ink small"
        )


# ---- meshes

_COLORS = "abcd"
_CELL, _WIDE, _TALL = 14.0, 78.0, 104.0


@dataclass(frozen=True)
class Mesh:
    """Ranks in rows and columns.

    Attributes:
        title: above it.
        shape: rows and columns of ranks.
        columns: what goes on between the ranks of a row.
        rows: what goes on between the ranks of a column, in lines.
        draw: draws what a rank holds: (drawing, x, y, rank).
        notes: lines below it.
    """

    title: str
    shape: tuple[int, int]
    columns: str
    rows: Sequence[str]
    draw: Callable[[Drawing, float, float, int], None]
    notes: Sequence[str]


def _pieces(
    drawing: Drawing, x: float, y: float, shape: tuple[int, int], held: dict[tuple[int, int], str]
) -> None:
    """A parameter as cells; ``held``: the color of the cells that a rank has."""
    for row in range(shape[0]):
        for column in range(shape[1]):
            look = held.get((row, column), "grid")
            at = (x + column * _CELL, y + row * _CELL)
            drawing.rect(*at, _CELL - 1.5, _CELL - 1.5, look)


def _hsdp(drawing: Drawing, x: float, y: float, rank: int) -> None:
    shard = rank % 4
    _pieces(drawing, x + 11, y + 26, (4, 4), {(shard, c): _COLORS[shard] for c in range(4)})


def _tp(drawing: Drawing, x: float, y: float, rank: int) -> None:
    row, column = divmod(rank, 4)
    held = {(2 * row + r, column): _COLORS[column] for r in range(2)}
    _pieces(drawing, x + 11, y + 26, (4, 4), held)


def _experts(drawing: Drawing, x: float, y: float, rank: int) -> None:
    between, within = divmod(rank, 2)
    first = 4 * within + 2 * between
    held = {(0, 4 * within + place): "a pale" for place in range(4)}
    held |= {(0, expert): "a" for expert in (first, first + 1)}
    drawing.text(x + 10, y + 36, "experts", "quiet small")
    _pieces(drawing, x + 10, y + 42, (1, 8), held)
    drawing.text(x + 10, y + 76, "attention, norms", "quiet small")
    _pieces(drawing, x + 10, y + 82, (1, 8), {(0, 2 * rank + place): "c" for place in range(2)})


MESHES = {
    "hsdp": Mesh(
        'HSDP: mesh ("replicate" 2, "shard" 4)',
        (2, 4),
        "shard, within a node: all-gather, reduce-scatter",
        ("all-reduce of", "gradient shards"),
        _hsdp,
        (
            "A row of ranks holds every piece of a parameter once: it is sharded there.",
            "Ranks above each other hold the same piece: it is replicated there.",
        ),
    ),
    "tp": Mesh(
        'Tensor parallelism: mesh ("shard" 2, "tp" 4)',
        (2, 4),
        "tp: the same batch; collectives of activations",
        ("shard: all-gather,", "reduce-scatter"),
        _tp,
        (
            "A column of ranks shares one quarter of a parameter, and fsdp2 shards it there.",
            "While unsharded, a rank has its whole column of pieces, and never the other three.",
        ),
    ),
    "experts": Mesh(
        'Experts: mesh ("efsdp" 2, "ep" 2), all else on ("dp" 4)',
        (2, 2),
        "ep: all-to-all of tokens",
        ("efsdp: all-gather, reduce-", "scatter of experts"),
        _experts,
        (
            "Filled: the pieces that a rank keeps. Pale: what it gathers to compute.",
            "Ranks of a row have different experts; ranks of a column shard the same ones.",
        ),
    ),
}


def meshes(*names: str) -> str:
    """Ranks, what each holds, and which communicate: one mesh below the other."""
    title = "; ".join(MESHES[name].title for name in names)
    heights = [MESHES[name].shape[0] * (_TALL + 16) + 128 for name in names]
    drawing = Drawing(560, sum(heights), title)
    top = 0.0
    for name, height in zip(names, heights, strict=True):
        _mesh(drawing, MESHES[name], top)
        top += height
    return str(drawing)


def _mesh(drawing: Drawing, mesh: Mesh, top: float) -> None:
    rows, columns = mesh.shape
    wide = _WIDE if columns == 4 else 136.0
    left, above = 40.0, top + 62
    drawing.text(16, top + 26, mesh.title, "ink title bold")
    across = columns * (wide + 14)
    drawing.text(left + across / 2 - 7, above - 12, mesh.columns, "b middle")
    for row in range(rows):
        y = above + row * (_TALL + 16)
        drawing.rect(left - 8, y - 6, across + 2, _TALL + 12, "stroke dashed s-b", radius=8)
        for column in range(columns):
            x, rank = left + column * (wide + 14), row * columns + column
            drawing.rect(x, y, wide, _TALL, "panel", radius=5)
            drawing.text(x + 10, y + 17, f"rank {rank}", "ink small bold")
            mesh.draw(drawing, x, y, rank)
    middle = above + _TALL + 8
    for column in range(columns):
        x = left + column * (wide + 14) + wide / 2
        drawing.arrow([(x, middle), (x, middle + 15)], "d")
        drawing.arrow([(x, middle), (x, middle - 15)], "d")
    for place, words in enumerate(mesh.rows):
        drawing.text(left + across + 8, middle - 3 + 15 * place, words, "d")
    for place, note in enumerate(mesh.notes):
        drawing.text(16, above + rows * (_TALL + 16) + 18 + 18 * place, note, "quiet")


# ---- saves in time


def saves(title: str, rows: Sequence[tuple[str, float, float]]) -> str:
    """Two lanes for each way to save: training, and a thread; until the checkpoint is durable.

    ``rows``: name, ms for which training stops, ms after which the checkpoint is durable.
    """
    drawing = Drawing(WIDTH, 96 + 74 * len(rows) + 34, title)
    drawing.text(16, 26, title, "ink title bold")
    looks = (
        ("a", "training runs"),
        ("wait", "training waits for the save"),
        ("c", "a thread writes and syncs"),
    )
    top = drawing.legend(16, 50, looks) + 12
    marks = ticks(0, max(durable for _, _, durable in rows))
    left, right = 152.0, WIDTH - 24.0

    def x(time: float) -> float:
        return left + time / marks[-1] * (right - left)

    bottom = top + 74 * len(rows) - 8
    for mark in marks:
        drawing.line([(x(mark), top), (x(mark), bottom)], "thin s-grid")
        drawing.text(x(mark), bottom + 16, f"{mark:g}", "quiet small middle")
    drawing.text((left + right) / 2, bottom + 36, "milliseconds after the call", "quiet middle")
    for place, (name, stall, durable) in enumerate(rows):
        y = top + 74 * place + 4
        drawing.text(left - 10, y + 14, name, "ink bold end")
        drawing.rect(x(0), y, x(stall) - x(0), 20, "wait")
        drawing.rect(x(stall), y, right - x(stall), 20, "a")
        drawing.text(x(stall) + 8, y + 14, f"goes on after {stall:.0f} ms", "inverse small")
        if durable > stall:
            drawing.rect(x(stall), y + 24, x(durable) - x(stall), 20, "c")
        ready = f"durable after {durable:.0f} ms"
        drawing.line([(x(durable), y - 2), (x(durable), y + 50)], "stroke s-ink")
        inside = x(durable) > right - 130
        drawing.text(x(durable) + (-6 if inside else 6), y + 39, ready, _ready_look(inside))
    return str(drawing)


def _ready_look(inside: bool) -> str:
    return "inverse small end" if inside else "ink small"
