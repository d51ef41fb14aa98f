"""Fixtures of the unit tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def rare_collections() -> Iterator[None]:
    """Look for garbage less often.

    Simulations are many small objects that refer to each other: half of their time would go into
    walks through them.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    yield
    gc.set_threshold(*thresholds)
