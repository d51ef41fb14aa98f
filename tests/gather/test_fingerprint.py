"""A fingerprint sees every change of contents or places, in any dtype and size."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsdp2.core.device import fingerprint as module
from fsdp2.core.device.fingerprint import fingerprint, fingerprints

pytestmark = pytest.mark.alone

SIZES = [(1,), (7,), (64, 64), (4096 * 17,), (300, 1001)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    drawn = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return (drawn & 1 if dtype is torch.bool else drawn).view(dtype).view(shape)


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_bit_counts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = _values(shape, dtype)
    before = fingerprint([values])
    assert before.dtype is torch.int64
    assert before.shape == ()
    data = values.view(-1).view(torch.uint8)
    for place in {0, 1 % len(data), len(data) // 2, len(data) - 1}:
        for bit in (0, 7):
            data[place] ^= 1 << bit
            assert fingerprint([values]) != before, (place, bit)
            data[place] ^= 1 << bit
    assert fingerprint([values.clone()]) == before


def _flip(values: Tensor, *places: tuple[int, int]) -> None:
    for row, column in places:
        values[row, column].neg_()


def _swap(first: Tensor, second: Tensor) -> None:
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "signs of two": lambda x: _flip(x, (3, 1), (70, 9)),
    "signs of four, in a square": lambda x: _flip(x, (3, 1), (70, 1), (3, 9), (70, 9)),
    "signs of a column": lambda x: x[:, 3].neg_(),
    "all signs": lambda x: x.neg_(),
    "two rows swapped": lambda x: _swap(x[5], x[91]),
    "two columns swapped": lambda x: _swap(x[:, 2], x[:, 9]),
    "neighbours swapped": lambda x: _swap(x[8, 2], x[8, 3]),
    "rows of 4096 bytes swapped": lambda x: _swap(x.view(-1, 4)[:1024], x.view(-1, 4)[-1024:]),
    "scaled": lambda x: x.mul_(2),
    "rolled": lambda x: x.copy_(x.roll(1, 0)),
    "negative zero": lambda x: x[0, 0].neg_(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [128, 1024])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_weaker_sums_miss(change: str, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(100, width).to(dtype)
    values[0, 0] = 0
    before = fingerprint([values])
    CHANGES[change](values)
    assert fingerprint([values]) != before


def test_order_and_layout_of_several_tensors() -> None:
    torch.manual_seed(0)
    first, second, third = torch.randn(3, 300, 300).unbind()
    small = torch.randn(5)
    before = fingerprint([first, small, second])
    assert fingerprint([second, small, first]) != before
    assert fingerprint([first, small, third]) != before
    assert fingerprint([first.t(), small, second]) != before
    assert fingerprint([first.clone(), small, second]) == before
    assert fingerprint([first.t().clone().t(), small, second]) == before


def test_factors_made_under_a_mode_serve_outside() -> None:
    module._positions.cache_clear()
    values = torch.randn(9)
    with torch.inference_mode():
        inside = fingerprint([values])
    assert fingerprint([values]) == inside


def test_a_group_has_the_same_number_beside_others() -> None:
    first, second = torch.randn(300, 300), torch.randn(7)
    both = fingerprints([[first], [second, first]])
    assert both.tolist() == [fingerprint([first]), fingerprint([second, first])]


def test_nothing_has_a_number() -> None:
    assert fingerprints([[], [torch.empty(0)]]).tolist() == [0, 0]
