"""Tests that need a GPU; two gloo ranks share one where there is no second."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    marker = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(marker)
