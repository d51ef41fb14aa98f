"""Strategies of `shard_model`: what they communicate, and that all of them train alike."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import shard_model
from tests.common import parity
from tests.common.errors import raises
from tests.common.workers import ranks

STEPS, MICRO, DIM = 3, 2, 16


class Tied(nn.Module):
    """The first and the last block share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight  # type: ignore[index]
        self.out = nn.Linear(DIM, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def _batches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(8, DIM, generator=generator) for _ in range(MICRO)] for _ in range(STEPS)]


def _train(model: Any, count: bool = False) -> tuple[list[Any], list[tuple[int, ...]]]:
    """Gradients and parameters of each step; collectives of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps, counts = [], []
    for micro in _batches():
        with parity.CountCollectives() as counted:
            for i, batch in enumerate(micro):
                model.set_requires_gradient_sync(i == len(micro) - 1)
                model(parity.my_part(batch)).square().mean().backward()
        counts.append(tuple(counted.counts.values()))
        grads = parity.full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((grads, parity.full_params(model)))
    return steps, counts


def _train_unsharded(model: nn.Module) -> list[Any]:
    """Each rank's part by itself, summed as the ranks sum: first what one rank accumulates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    size, steps = dist.get_world_size(), []
    params = dict(model.named_parameters())
    for micro in _batches():
        total = {name: torch.zeros_like(param) for name, param in params.items()}
        for rank in range(size):
            for batch in micro:
                model(parity.my_part(batch, rank, size)).square().mean().backward()
            for name, param in params.items():
                assert param.grad is not None
                total[name] += param.grad
                param.grad = None
        for name, param in params.items():
            param.grad = total[name] / size
        grads = parity.full_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((grads, parity.full_params(model)))
    return steps


def _model() -> Tied:
    torch.manual_seed(3)
    return Tied()


def _check(strategy: Any, exact: bool) -> tuple[int, ...]:
    model = _model()
    report = shard_model(model, {nn.Sequential}, strategy=strategy)
    assert len(report.groups) == UNITS
    steps, counts = _train(model)
    expected = _train_unsharded(_model())
    if exact:
        parity.assert_equal(steps, expected, strategy)
    else:
        parity.assert_close(steps, expected, parity.REORDERED_FP32, strategy)
    assert counts[-1] == counts[-2]
    return counts[-1]


UNITS = 3  # the tied layers, the block between, the root, which stays gathered till backward


@ranks(2)
@pytest.mark.parametrize(
    ("strategy", "gathers", "reduces", "all_reduces"),
    [
        ("zero3", MICRO * UNITS + MICRO * (UNITS - 1), UNITS, 0),
        ("zero2", MICRO * UNITS, UNITS, 0),
        ("zero1", UNITS, UNITS, MICRO - 1),  # whether shards were written
        ("replicated", 0, 0, UNITS),
    ],
)
def test_strategies(strategy: str, gathers: int, reduces: int, all_reduces: int) -> None:
    found = _check(strategy, exact=True)
    assert found == (gathers, reduces, all_reduces), found


@ranks(2, 4)
@pytest.mark.parametrize("strategy", ["hybrid", "hybrid-zero2"])
def test_hybrids(strategy: str) -> None:
    """Shards within two ranks, of one node; copies across two nodes."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        gathers, reduces, all_reduces = _check(strategy, exact=dist.get_world_size() == 2)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    assert reduces == UNITS
    assert gathers == MICRO * UNITS + (MICRO * (UNITS - 1) if strategy == "hybrid" else 0)
    assert all_reduces == (UNITS if dist.get_world_size() == 4 else 0)


@ranks(2)
def test_zero1_gathers_anew_after_a_step_and_not_before() -> None:
    """An evaluation between backward and step gathers nothing; one behind the step does.

    The first such evaluation gathers: forwards take fingerprints from there on.
    """
    model: Any = _model()
    shard_model(model, {nn.Sequential}, strategy="zero1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = parity.my_part(_batches()[0][0])
    for _ in range(2):
        before = model(batch)
        before.sum().backward()
        with parity.CountCollectives() as counted, torch.no_grad():
            parity.assert_equal(model(batch), before.detach(), "the same parameters")
        optimizer.step()
    assert counted.counts == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 1}  # a question
    with parity.CountCollectives() as counted, torch.no_grad():
        assert not torch.equal(model(batch), before)
    assert counted.counts == {"all_gather": UNITS, "reduce_scatter": 0, "all_reduce": 0}


@ranks(2)
def test_nodes_that_differ() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_rank() + 1)
    try:
        with raises("local-world-sizes"):
            shard_model(_model(), {nn.Sequential}, strategy="hybrid")
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
