"""What all tests run under."""

from __future__ import annotations

import gc

import pytest

from tests.common import upper_bounds
from tests.common.workers import RANK_BODY


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="write the files that tests compare with, as the code makes them now",
    )
    parser.addoption(
        "--lower-bounds",
        action="store_true",
        help="lower the numbers of tests/common/upper_bounds.json to what is measured now",
    )


def pytest_configure(config: pytest.Config) -> None:
    upper_bounds.lowers = config.getoption("--lower-bounds")
    # Simulations are many small objects that refer to each other: walks through them for garbage
    # would take half of their time.
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage() -> None:
    """Spare collections the walk through all that torch has imported.

    Many tests collect, to see what is freed: a million objects of modules would be nine tenths of
    their time.
    """
    gc.collect()
    gc.freeze()


BY_DEFAULT, EXTENDED = 2, 1
"""Cases of one test on ranks that each run takes; see "Tests" in docs/design.md."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the cases of a test over the runs, so that no run grows with their number.

    Ranks are processes that share two cores: a test's first case on them takes a second, and each
    other as long again. What is `exhaustive` by one of its arguments is not `extended` by another.
    """
    cases: dict[object, list[pytest.Item]] = {}
    late: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("exhaustive"):
            _unmark(item)
        if item.get_closest_marker("exhaustive") or item.get_closest_marker("clients"):
            continue
        function = getattr(item, "function", None)
        extended = item.get_closest_marker("extended") is not None
        if extended or hasattr(function, RANK_BODY):
            (late if extended else cases).setdefault(function, []).append(item)
    for function, own in cases.items():
        rest = _all_but(BY_DEFAULT, own)
        late.setdefault(function, [])[:0] = rest
        for item in rest:
            item.add_marker("extended")
    for own in late.values():
        for item in _all_but(EXTENDED, own):
            _unmark(item)
            item.add_marker("exhaustive")


def _all_but(count: int, items: list[pytest.Item]) -> list[pytest.Item]:
    """All but ``count`` of them, which are evenly spread."""
    kept = {round(at * (len(items) - 1) / max(count - 1, 1)) for at in range(count)}
    return [item for at, item in enumerate(items) if at not in kept]


def _unmark(item: pytest.Item) -> None:
    """No longer `extended`."""
    item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "extended"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """No second process for one file: starting it takes longer than most files."""
    return 0 if len(config.args) == 1 and ".py" in config.args[0] else None
