"""Named cases that one test, or one launch of ranks, runs one after another."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def in_turn(cases: Mapping[str, T], check: Callable[[T], object]) -> None:
    """Check each case; an exception is raised from one that names it."""
    for name, case in cases.items():
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"case '{name}'") from error


def each(argument: str, values: Collection[object]) -> Callable[[Any], Any]:
    """As `pytest.mark.parametrize`, but in one test: pytest takes 3 ms per test to report it."""

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def of_all(**given: Any) -> None:
            named = {f"{argument}={value}": value for value in values}
            in_turn(named, lambda value: test(**{argument: value}, **given))

        left = [p for p in inspect.signature(test).parameters.values() if p.name != argument]
        of_all.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return of_all

    return decorate
