"""Parameters in combination: each value by default, all combinations in the extended run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest


def each_once(**values: Sequence[object] | Mapping[str, object]) -> pytest.MarkDecorator:
    """Parametrizes a test with all combinations of some arguments' values.

    The default run takes a few of them, in which every value of every argument is met. The others
    are marked `extended`.

        @each_once(way=["plain", "nested", "tied"], mixed={"fp32": False, "mixed": True})
        def test_training(way: str, mixed: bool) -> None: ...
        # by default: plain-fp32, nested-mixed, tied-fp32

    Args:
        values: the values of each argument; a mapping gives them names, for the test's id.
    """
    lists = [_named(each) for each in values.values()]
    chosen = _each_once([len(each) for each in lists])
    cases = []
    for position in itertools.product(*(range(len(each)) for each in lists)):
        picked = [each[at] for each, at in zip(lists, position, strict=True)]
        marks = [] if position in chosen else [pytest.mark.extended]
        name = "-".join(key for key, _ in picked)
        cases.append(pytest.param(*(value for _, value in picked), id=name, marks=marks))
    return pytest.mark.parametrize(tuple(values), cases)


def _each_once(lengths: list[int]) -> set[tuple[int, ...]]:
    """Positions in lists of these lengths: few, and together all of each list.

    The longest list goes on with each; the second with each, too; the third when the second was
    through, and so on: so that two short lists do not go in step.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    strides = dict.fromkeys(order, 1)
    stride = 1
    for index in order[1:]:
        strides[index] = stride
        stride *= lengths[index]
    chosen: set[tuple[int, ...]] = set()
    missing = {(index, at) for index, length in enumerate(lengths) for at in range(length)}
    for number in itertools.count():
        if not missing:
            return chosen
        position = tuple(number // strides[i] % length for i, length in enumerate(lengths))
        chosen.add(position)
        missing -= set(enumerate(position))
    raise AssertionError("unreachable")


def _named(values: Sequence[object] | Mapping[str, object]) -> list[tuple[str, object]]:
    if isinstance(values, Mapping):
        return list(values.items())
    return [(str(getattr(value, "__name__", value)), value) for value in values]
