"""Whole tensors take the memory that the documentation says, on each of two ranks."""

from __future__ import annotations

import pytest
import torch

from benchmarks.full_memory import SLACK, LiveBytes, measure


def test_storages_are_counted_once_and_until_they_are_gone() -> None:
    with LiveBytes() as count:
        first = torch.ones(256)
        again = first.view(16, 16).detach()[1:]
        second = first + 1
        assert count.live == 2048
        del first, second
        assert count.live == 1024
        assert count.peak == 2048
        assert again.numel() == 240


@pytest.mark.extended
def test_peaks_are_within_their_bounds() -> None:
    rows = measure(2, blocks=4, dim=256)
    assert len(rows) == 7
    for row in rows:
        pairs = zip(row["peaks"], row["bounds"], strict=True)
        assert all(0 < peak <= bound * (1 + SLACK) for peak, bound in pairs), row
