"""The position of this rank's rows in a flat result, and views of them in few calls.

flat   [ rows of A | rows of B | pad | marks ]      A, B: members of a reduction
Run    └────── split into views ─┘
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fsdp2.core.device.buffers import Strided, row_major
from fsdp2.core.layout.layout import COLLECTIVE_ALIGN_BYTES, Slot
from fsdp2.core.pieces import round_up


class Run(NamedTuple):
    """Consecutive views in a flat tensor that differ only in dim 0.

    They have ``shape`` and, in a larger tensor, ``place`` together; ``sizes`` of each in dim 0,
    unless the run is a single view.
    """

    shape: tuple[int, ...]
    place: Strided | None
    sizes: tuple[int, ...] | None


SHORTEST_RUN = 3
"""A view costs 0.8 µs; one that a split makes 0.3, after 1.3 for the first (torch 2.13, CPU)."""


def runs(shapes: Sequence[tuple[int, ...]], starts: Sequence[int]) -> list[Run]:
    """The fewest calls that make contiguous views of ``shapes`` from ``starts``, in elements.

    Example: shapes (2, 4), (6, 4), (2, 4) and (5,) from 0, 8, 32 and 40 are two runs, one of sizes
    (2, 6, 2) over (10, 4) from 0, and one over (5,) from 40.
    """
    found: list[list[int]] = []
    behind = -1
    for index, (shape, start) in enumerate(zip(shapes, starts, strict=True)):
        if start == behind and shape[1:] == shapes[found[-1][0]][1:]:
            found[-1].append(index)
        else:
            found.append([index])
        behind = start + math.prod(shape)
    planned: list[Run] = []
    for run in found:
        together = [run] if len(run) >= SHORTEST_RUN else [[index] for index in run]
        for indices in together:
            sizes = tuple(shapes[index][0] for index in indices)
            shape = (sum(sizes), *shapes[indices[0]][1:])
            place = row_major(shape, starts[indices[0]])
            planned.append(Run(shape, place, sizes if len(sizes) > 1 else None))
    return planned


def whole_run(shapes: Sequence[tuple[int, ...]]) -> Run | None:
    """The run of views that cover a tensor; ``None`` if they differ in other dims than 0.

    Example: (2, 4), (6, 4) and (2, 4) are the parts, of sizes (2, 6, 2), of a tensor of (10, 4).
    """
    inner = shapes[0][1:]
    if any(shape[1:] != inner for shape in shapes):
        return None
    sizes = tuple(shape[0] for shape in shapes)
    return Run((sum(sizes), *inner), None, sizes if len(sizes) > 1 else None)


# ---- the flat result


@dataclass(frozen=True)
class FlatPlan:
    """A flat result; lengths and offsets in elements.

    Attributes:
        payload: length of the members' rows, which begin at ``starts``.
        rows_width: length of all rows, filled up to what collectives want; ``width`` with marks.
        marks_start: where marks begin (`presence_marks`); ``None``: they are not in it.
        marks_width: numbers that a rank receives: one per member, and padding; 0 with one rank.
        shape: in which it is made.
        runs: of the views of the members' rows.
    """

    payload: int
    starts: list[int]
    rows_width: int
    width: int
    marks_start: int | None
    marks_width: int
    shape: tuple[int, ...]
    runs: list[Run]


def plan_flat(
    slots: Sequence[Slot],
    rank: int,
    dtype: torch.dtype,
    sent: bool,
    needs_flat: bool,
    all_direct: bool,
    carries_marks: bool,
    between: bool = False,
) -> FlatPlan:
    """Lay the result out, shared by several ranks if ``sent``.

    It ``needs_flat`` if it is used in any other form than the members' rows. ``all_direct``: the
    collective writes the rows of each member separately. ``carries_marks``: marks need no separate
    collective. If it is ``between`` nodes, marks are there even if rows are empty.
    """
    starts = [*itertools.accumulate((slot.shard_numel for slot in slots), initial=0)]
    payload = starts.pop()
    multiple = max(COLLECTIVE_ALIGN_BYTES // dtype.itemsize, 1)
    rows_width = width = round_up(payload, multiple) if sent else payload
    marks_start, marks_width = None, 0
    if payload and sent and all_direct and not needs_flat:
        # Apart, as one more tensor of the launch (decision 20), so that rows need no flat tensor.
        marks_width = round_up(len(slots), multiple)
    elif between or (payload and (sent or needs_flat)):
        marks_start = payload if carries_marks else rows_width
        width = round_up(marks_start + len(slots), multiple)
        marks_width = width - marks_start
    shapes = [slot.local_shape(rank) for slot in slots]
    together = whole_run(shapes) if all_direct and not needs_flat else None
    # Made in the shape of the rows together: they are one split of it, without a view in between.
    if together is not None and payload == width:
        shape, planned = together.shape, [together]
    else:
        shape, planned = (width,), runs(shapes, starts)
    return FlatPlan(payload, starts, rows_width, width, marks_start, marks_width, shape, planned)
