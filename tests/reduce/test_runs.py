"""Views of a flat tensor, made in as few calls as possible."""

from __future__ import annotations

import math
import random

import pytest
import torch

from fsdp2.core.device.buffers import contiguous_strides
from fsdp2.core.reduce.reduction import views_of
from fsdp2.core.reduce.rows import Run, runs, whole_run

pytestmark = pytest.mark.alone


def _shapes(planned: list[Run]) -> list[tuple[int, ...]]:
    """The shape of each view."""
    return [(size, *run.shape[1:]) for run in planned for size in run.sizes or (run.shape[0],)]


def _one_by_one(
    flat: torch.Tensor, shapes: list[tuple[int, ...]], starts: list[int]
) -> list[torch.Tensor]:
    places = zip(shapes, starts, strict=True)
    return [flat.as_strided(shape, contiguous_strides(shape), start) for shape, start in places]


def _check(shapes: list[tuple[int, ...]], gaps: list[int]) -> list[Run]:
    starts, end = [], 0
    for shape, gap in zip(shapes, gaps, strict=True):
        starts.append(end)
        end += math.prod(shape) + gap
    flat = torch.arange(float(end))
    planned = runs(shapes, starts)
    found = views_of(planned, flat)
    assert _shapes(planned) == shapes
    for view, expected in zip(found, _one_by_one(flat, shapes, starts), strict=True):
        assert view.shape == expected.shape
        assert view.stride() == expected.stride()
        assert torch.equal(view, expected)
        if expected.numel():
            assert view.data_ptr() == expected.data_ptr()
            assert view.untyped_storage()._cdata == flat.untyped_storage()._cdata
    return planned


def test_equal_trailing_dims_are_split_in_one_call() -> None:
    shapes = [(2, 4), (6, 4), (2, 4), (5,)]
    assert _check(shapes, [0] * 4) == [
        Run((10, 4), ((10, 4), (4, 1), 0), (2, 6, 2)),
        Run((5,), ((5,), (1,), 40), None),
    ]


def test_two_alike_are_made_one_by_one() -> None:
    assert [run.sizes for run in _check([(2, 4), (2, 4)], [0, 0])] == [None, None]


def test_padding_ends_a_run() -> None:
    assert [run.sizes for run in _check([(2, 4)] * 7, [0, 0, 3, 0, 0, 0, 0])] == [
        (2, 2, 2),
        (2, 2, 2, 2),
    ]


def test_ranks_without_rows_have_empty_views() -> None:
    _check([(0, 4), (2, 4), (0, 4), (0,), (0,), (0,), (2, 0), (1, 0), (3, 0)], [0] * 9)


@pytest.mark.parametrize("shapes", [[(2, 4)], [(2, 4), (2, 4)], [(0, 3), (2, 3), (1, 3)], [(5,)]])
def test_views_of_all_of_a_tensor(shapes: list[tuple[int, ...]]) -> None:
    run = whole_run(shapes)
    assert run is not None
    flat = torch.arange(float(math.prod(run.shape))).view(run.shape)
    found = views_of([run], flat)
    assert (
        [view.shape for view in found] == [torch.Size(shape) for shape in shapes] == _shapes([run])
    )
    assert torch.equal(torch.cat([view.reshape(-1) for view in found]), flat.reshape(-1))
    assert all(view.untyped_storage()._cdata == flat.untyped_storage()._cdata for view in found)


def test_parts_that_differ_beyond_dim_0_are_not_one_tensor() -> None:
    assert whole_run([(2, 4), (2, 3)]) is None
    assert whole_run([(2, 4), (8,)]) is None


def test_nothing_needs_nothing() -> None:
    assert runs([], []) == []


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture(seed: int) -> None:
    generator = random.Random(seed)
    inner: list[tuple[int, ...]] = [(), (4,), (3,), (2, 3), (0,)]
    shapes, gaps = [], []
    for _ in range(generator.randrange(1, 30)):
        shapes.append(
            (generator.randrange(4), *generator.choice(inner[: generator.randrange(1, 6)]))
        )
        gaps.append(generator.choice((0, 0, 0, 5)))
    _check(shapes, gaps)
