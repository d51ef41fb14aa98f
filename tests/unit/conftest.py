"""Fixtures of the unit tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def rare_collections() -> Iterator[None]:
    """Look for garbage less often, and not in what is there already.

    Simulations are many small objects that refer to each other: half of their time would go into
    walks through them and through all that torch has imported.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
