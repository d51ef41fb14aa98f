"""Named cases that one launch of ranks runs one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def in_turn(cases: Mapping[str, T], check: Callable[[T], object]) -> None:
    """Check each case; an exception is raised from one that names it."""
    for name, case in cases.items():
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"case '{name}'") from error
