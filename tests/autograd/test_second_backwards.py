"""Derivatives of derivatives by several backwards: each graph is read as long as it lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.core.modules.registry import record_of
from fsdp2.core.schedule.states import GroupState
from tests.common import gradients, models, parity
from tests.common.workers import ranks

Program = Callable[[Any, "int | None"], Any]


def _build() -> nn.Module:
    return models.seeded(
        lambda: nn.Sequential(
            nn.Linear(models.DIM, models.DIM),
            nn.Tanh(),
            nn.Linear(models.DIM, models.DIM),
            nn.Tanh(),
            nn.Linear(models.DIM, 1),
        )
    )


def _shard(reshard_after_forward: bool | None) -> Any:
    model = _build()
    arguments = {"mesh": parity.world_mesh(), "reshard_after_forward": reshard_after_forward}
    for layer in (model[0], model[2]):  # type: ignore[index]  # a Sequential
        fsdp2.fully_shard(layer, **arguments)
    return fsdp2.fully_shard(model, **arguments)


def _x(rank: int | None, step: int = 0) -> Tensor:
    x: Tensor = gradients.part(step, rank)[0]
    return x.clone()


def _penalty(model: nn.Module, rank: int | None, step: int = 0) -> Tensor:
    x = _x(rank, step).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (grad.norm(2, 1) - 1).square().mean()


def _losses(model: nn.Module, rank: int | None) -> Tensor:
    loss: Tensor = model(_x(rank)).mean() - model(_x(rank, 1)).mean()
    return loss


def _penalty_first(model: nn.Module, rank: int | None) -> None:
    penalty = _penalty(model, rank)
    _losses(model, rank).backward()
    penalty.backward()


def _penalty_last(model: nn.Module, rank: int | None) -> None:
    _losses(model, rank).backward()
    _penalty(model, rank).backward()


def _losses_apart(model: nn.Module, rank: int | None) -> None:
    penalty = _penalty(model, rank)
    model(_x(rank)).mean().backward()
    (-model(_x(rank, 1)).mean()).backward()
    penalty.backward()


def _two_penalties(model: nn.Module, rank: int | None) -> None:
    first, second = _penalty(model, rank), _penalty(model, rank, 1)
    first.backward()
    second.backward()


def _two_penalties_last_first(model: nn.Module, rank: int | None) -> None:
    first, second = _penalty(model, rank), _penalty(model, rank, 1)
    second.backward()
    first.backward()


def _three_penalties_and_losses(model: nn.Module, rank: int | None) -> None:
    penalties = [_penalty(model, rank, step) for step in range(3)]
    _losses(model, rank).backward()
    for penalty in penalties:
        penalty.backward()


def _one_forward(model: nn.Module, rank: int | None) -> None:
    x = _x(rank).requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    y.mean().backward(retain_graph=True)
    grad.square().sum().backward()


def _penalty_twice(model: nn.Module, rank: int | None) -> None:
    penalty = _penalty(model, rank)
    penalty.backward(retain_graph=True)
    penalty.backward()


def _evaluated_in_between(model: nn.Module, rank: int | None) -> None:
    penalty = _penalty(model, rank)
    with torch.no_grad():
        model(_x(rank, 1))
    _losses(model, rank).backward()
    with torch.no_grad():
        model(_x(rank, 1))
    penalty.backward()


def _dropped(model: nn.Module, rank: int | None) -> None:
    """A graph that nobody reads."""
    penalty = _penalty(model, rank)
    _losses(model, rank).backward()
    del penalty


def _third(model: nn.Module, rank: int | None) -> None:
    x = _x(rank).requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    _losses(model, rank).backward()
    first.square().mean().backward(retain_graph=True)
    second.square().mean().backward()


PROGRAMS = [
    _penalty_first,
    _penalty_last,
    _losses_apart,
    _two_penalties,
    _two_penalties_last_first,
    _three_penalties_and_losses,
    _one_forward,
    _penalty_twice,
    _evaluated_in_between,
    _dropped,
    _third,
]


def _sharded(model: nn.Module) -> bool:
    record: Any = record_of(model)
    return all(group.state is GroupState.SHARDED for group in record.scheduler.groups)


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_of_several_backwards(
    program: Program, reshard_after_forward: bool | None
) -> None:
    """As unsharded; and no parameter is in memory when the last graph was read.

    Of a graph that nobody read, the next forward sees that it is gone.
    """
    model = _shard(reshard_after_forward)
    for _ in range(2):
        model.zero_grad()
        program(model, None)
        if program is _dropped:
            with torch.no_grad():
                model(_x(None))
        assert _sharded(model)
        expected = gradients.unsharded_grads(_build(), program)
        parity.assert_close(parity.full_grads(model), expected, parity.FP32, program.__name__)


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("graph", [{"retain_graph": True}, {"create_graph": True}])
def test_products_with_the_hessian(
    graph: dict[str, bool], reshard_after_forward: bool | None
) -> None:
    """Several of one graph, as Hutchinson's estimate takes them."""

    def products(model: nn.Module) -> list[Tensor]:
        x = _x(None).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        rows = [grad[:, i].sum() for i in range(3)]
        return [torch.autograd.grad(row, x, **graph)[0].detach() for row in rows]

    model = _shard(reshard_after_forward)
    for ours, expected in zip(products(model), products(_build()), strict=True):
        assert torch.equal(ours, expected)
    model(_x(None)).sum().backward()
    assert _sharded(model)
