"""The walk over modules, and the rule by which lengths are cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp2.core.modules.registry import walk
from fsdp2.core.pieces import ceil_div, piece_of, round_up
from fsdp2.wrap.choices import children_first

pytestmark = pytest.mark.alone


def _model() -> nn.Module:
    """a (with c, and b's d again), b (with d)"""
    model = nn.Module()
    model.a, model.b = nn.Module(), nn.Module()
    model.a.c, model.b.d = nn.Module(), nn.Module()
    model.a.d = model.b.d
    return model


def test_orders() -> None:
    """Each module once, by the first name that the order comes to."""
    parents, depth = (walk(_model(), lambda _: False, by_depth) for by_depth in (False, True))
    assert [prefix for _, prefix in parents] == ["", "a.", "a.c.", "a.d.", "b."]
    assert [prefix for _, prefix in depth] == ["", "a.", "b.", "a.c.", "a.d."]
    children = [prefix for _, prefix in children_first(_model())]
    assert children == ["a.c.", "a.d.", "a.", "b.", ""]


@pytest.mark.parametrize("by_depth", [False, True])
def test_what_is_left_out_may_be_reached_otherwise(by_depth: bool) -> None:
    model = _model()
    found = {prefix for _, prefix in walk(model, lambda m: m is model.a, by_depth)}
    assert found == {"", "b.", "b.d."}


@pytest.mark.parametrize("length", range(9))
@pytest.mark.parametrize("count", [1, 3, 4])
def test_pieces_are_those_of_chunk(length: int, count: int) -> None:
    chunks = torch.arange(length).chunk(count) if length else ()
    for index in range(count):
        start, size = piece_of(length, count, index)
        expected = chunks[index].tolist() if index < len(chunks) else []
        assert list(range(length))[start : start + size] == expected
    assert ceil_div(length, count) * count >= length
    assert round_up(length, count) == ceil_div(length, count) * count
