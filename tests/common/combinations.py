"""Parameters in combination: each value by default, some more in the extended run, then all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import pytest
from _pytest.mark import ParameterSet


def each_once(**values: Sequence[object] | Mapping[str, object]) -> pytest.MarkDecorator:
    """Parametrizes a test with all combinations of some arguments' values.

    The default run takes a few of them, in which every value of every argument is met. Others would
    meet every value once more: the extended run takes half of those. The rest is `exhaustive`.

        @each_once(way=["plain", "nested", "tied"], mixed={"fp32": False, "mixed": True})
        def test_training(way: str, mixed: bool) -> None: ...
        # by default: plain-fp32, nested-mixed, tied-fp32
        # extended: plain-mixed, tied-mixed
    """
    lists = [_named(each) for each in values.values()]
    lengths = [len(each) for each in lists]
    default = _each_once(lengths, set())
    extended = set(sorted(_each_once(lengths, default))[::2])
    cases = []
    for position in itertools.product(*map(range, lengths)):
        picked = [each[at] for each, at in zip(lists, position, strict=True)]
        late = pytest.mark.extended if position in extended else pytest.mark.exhaustive
        marks = [] if position in default else [late]
        name = "-".join(key for key, _ in picked)
        cases.append(pytest.param(*(value for _, value in picked), id=name, marks=marks))
    return pytest.mark.parametrize(tuple(values), cases)


def seldom(values: Sequence[object], extended: int) -> list[ParameterSet]:
    """Values for `parametrize`: that many of the first in the extended run, the rest exhaustive.

    @pytest.mark.parametrize("seed", seldom(range(15), extended=3))
    """
    late = [pytest.mark.exhaustive]
    early = [pytest.mark.extended]
    marked = [(value, early if at < extended else late) for at, value in enumerate(values)]
    return [
        pytest.param(*value, marks=marks)
        if isinstance(value, tuple)
        else pytest.param(value, marks=marks)
        for value, marks in marked
    ]


def often(values: Sequence[object], default: int = 1) -> list[ParameterSet]:
    """Values for `parametrize`: that many of the first by default, the rest in the extended run.

    @pytest.mark.parametrize("debug", often(["OFF", "DETAIL"]))
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if at < default else [pytest.mark.extended],
        )
        for at, value in enumerate(values)
    ]


def _each_once(lengths: list[int], taken: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Positions in lists of these lengths: few, and together all of each list.

    They are none of ``taken`` as long as others bring a value that is missing. The positions are
    gone through so that the longest list goes on with each; the second with each, too; the third
    when the second was through, and so on: so that two short lists do not go in step.
    """
    chosen: set[tuple[int, ...]] = set()
    missing = {(index, at) for index, length in enumerate(lengths) for at in range(length)}
    for position in _in_order(lengths):
        found = set(enumerate(position))
        if position not in taken and (found & missing or not taken):
            chosen.add(position)
            missing -= found
        if not missing:
            break
    return chosen


def _in_order(lengths: list[int]) -> Iterator[tuple[int, ...]]:
    """All positions, each once: first those of `_each_once`'s walk, then what it passes by."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    strides = dict.fromkeys(order, 1)
    stride = 1
    for index in order[1:]:
        strides[index] = stride
        stride *= lengths[index]
    walk = (
        tuple(number // strides[i] % length for i, length in enumerate(lengths))
        for number in range(math.prod(lengths))
    )
    everything = itertools.product(*map(range, lengths))
    yield from dict.fromkeys(itertools.chain(walk, everything))


def _named(values: Sequence[object] | Mapping[str, object]) -> list[tuple[str, object]]:
    if isinstance(values, Mapping):
        return list(values.items())
    return [(str(getattr(value, "__name__", value)), value) for value in values]
