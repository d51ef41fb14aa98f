"""Ranks of these tests have the stand-in for a device with streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdp2.testing.stand_in import device
from tests.common import workers


@pytest.fixture(scope="package", autouse=True)
def _own_ranks() -> Iterator[None]:
    """They serve no other tests: they know the device."""
    if device.missing_tool() is not None:
        pytest.skip("needs c++ and ninja")
    device.build()  # once, and not on two ranks at a time
    workers.close_pools()
    yield
    workers.close_pools()
