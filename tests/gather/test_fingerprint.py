"""A fingerprint sees every change of contents or places, in any dtype and size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fsdp2.core.device.fingerprint import bind_fingerprint, differ, differ_at_once
from tests.common import cases

pytestmark = pytest.mark.alone

SIZES = [(1,), (7,), (64, 64), (4096 * 17,), (300, 1001), (1100, 1021)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]


def fingerprint(tensors: Sequence[Tensor]) -> list[int]:
    found: list[int] = bind_fingerprint(tensors)().tolist()
    return found


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    drawn = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return (drawn & 1 if dtype is torch.bool else drawn).view(dtype).view(shape)


@cases.each("shape", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_bit_counts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = _values(shape, dtype)
    bound = bind_fingerprint([values])
    before = bound()
    assert (before.dtype, before.dim()) == (torch.int64, 1)
    assert before.nbytes <= 280_000
    data = values.view(-1).view(torch.uint8)
    for place in {0, 1 % len(data), len(data) // 2, len(data) - 1}:
        for bit in (0, 7):
            data[place] ^= 1 << bit
            assert differ([bound()], [before]) == [1], (place, bit)
            data[place] ^= 1 << bit
    assert differ([bound()], [before]) == [0]
    assert fingerprint([values.clone()]) == before.tolist()


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
@cases.each("change", CHANGES)
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


def test_tensors_that_are_not_aligned() -> None:
    values = _values((4001,), torch.int8)
    assert fingerprint([values[1:]]) == fingerprint([values[1:].clone()])
    assert fingerprint([values[1:]]) != fingerprint([values[:-1]])


def test_each_pair_is_compared() -> None:
    parts = torch.randn(4, 300, 300).unbind()
    small = torch.randn(3)
    now = [bind_fingerprint([part])() for part in (parts[0], small, parts[1], parts[2])]
    before = [bind_fingerprint([part])() for part in (parts[0], small, parts[3], parts[2])]
    assert differ(now, before) == differ_at_once(now, before) == [0, 0, 1, 0]
    assert differ_at_once(now, now) == [0] * 4
    assert differ(now, now) == [0] * 4
    assert differ([], []) == []


def test_nothing_has_a_fingerprint() -> None:
    assert fingerprint([]) == fingerprint([torch.empty(0)]) == []
    assert differ([bind_fingerprint([])()], [bind_fingerprint([])()]) == [0]
