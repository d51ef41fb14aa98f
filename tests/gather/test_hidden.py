"""What is gathered stays no longer than it can be used, and never hides gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import grad, vjp
from torch.nn.utils import clip_grad_norm_

import fsdp2
from fsdp2.core.modules.registry import record_of
from fsdp2.core.schedule.states import GroupState
from tests.common import gradients, models, parity
from tests.common.workers import ranks


def _build() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(models.DIM, models.DIM), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(models.DIM, 4))


def _shard(model: nn.Module) -> Any:
    for block in list(model)[:-1]:
        fsdp2.fully_shard(block, mesh=parity.world_mesh())
    return fsdp2.fully_shard(model, mesh=parity.world_mesh())


def _in_memory(model: Any) -> int:
    """How many units' parameters are gathered, registered or not."""
    record: Any = record_of(model)
    return sum(group.state is not GroupState.SHARDED for group in record.scheduler.groups)


def _x(rank: int | None = None) -> Tensor:
    return gradients.part(0, rank)[0]


def _energy(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).sin().sum()


def _by_grad(model: nn.Module, rank: int | None = None) -> Tensor:
    return grad(_energy(model))(_x(rank))


def _by_vjp(model: nn.Module, rank: int | None = None) -> Tensor:
    output, pull = vjp(model, _x(rank))
    (found,) = pull(torch.ones_like(output))
    return found


def _by_autograd(model: nn.Module, rank: int | None = None) -> Tensor:
    x = _x(rank).requires_grad_()
    (found,) = torch.autograd.grad(_energy(model)(x), x, create_graph=True)
    return found


HOW = [_by_grad, _by_vjp, _by_autograd]


def _loss(model: nn.Module, rank: int | None = None) -> None:
    model(gradients.part(0, rank)[0]).square().sum().backward()


@ranks(2)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kept", [True, False])
def test_a_derivative_between_backward_and_clipping(how: Callable[..., Tensor], kept: bool) -> None:
    """Gradients stay in sight, whether or not anybody keeps the derivative and its graph."""
    model = _shard(models.seeded(_build))
    _loss(model)
    norm = fsdp2.optim.get_total_norm([p.grad for p in model.parameters()])
    derivative = how(model)
    if not kept:
        del derivative
    assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())
    found: Any = clip_grad_norm_(model.parameters(), 1e6)
    assert torch.allclose(found.full_tensor(), norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(_x())
    found = clip_grad_norm_(model.parameters(), 1e6)
    assert torch.allclose(found.full_tensor(), norm)
    optimizer.step()
    optimizer.zero_grad()
    _loss(model)
    assert _in_memory(model) == 0
    assert all(p.grad is not None for p in model.parameters())


@ranks(2)
@pytest.mark.parametrize("how", HOW)
def test_a_frozen_model_that_guides(how: Callable[..., Tensor]) -> None:
    model = _shard(models.seeded(_build).requires_grad_(False))
    most: list[int] = []
    for block in list(model)[:-1]:
        block.register_forward_pre_hook(lambda *_: most.append(_in_memory(model)))
    for _ in range(3):
        most.clear()
        found = how(model).detach()
        assert _in_memory(model) <= 2
        assert max(most) <= 3  # the root and two units
    plain = models.seeded(_build).requires_grad_(False)
    assert torch.equal(found, how(plain).detach())


@ranks(2)
@pytest.mark.parametrize("how", HOW)
def test_a_loss_of_a_derivative(how: Callable[..., Tensor]) -> None:
    """Outside of any forward: its backward may reach parameters and no output of a unit."""

    def compute(model: nn.Module, rank: int | None = None) -> None:
        how(model, rank).square().sum().backward()

    for build in (_build, _line):
        model = _shard(models.seeded(build))
        for _ in range(2):
            model.zero_grad()
            compute(model)
            assert _in_memory(model) == 0
        gradients.assert_like_unsharded(parity.full_grads(model), models.seeded(build), compute)


def _line() -> nn.Module:
    """A model whose derivative depends on its parameters, and on nothing that it computes."""
    return nn.Sequential(nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, 4))


@ranks(2)
def test_a_graph_that_is_kept_over_an_optimizer_step() -> None:
    """As without sharding: what it would read has changed."""
    model = _shard(models.seeded(_build))
    _loss(model)
    derivative = _by_autograd(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        model(_x())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        derivative.square().sum().backward()
    model.reset_iter_state()
    model.zero_grad()
    _loss(model)
    assert all(p.grad is not None for p in model.parameters())


@ranks(2)
def test_an_evaluation_between_backward_and_clipping() -> None:
    """The root stays gathered after it: not where that would hide its gradients."""
    model = _shard(models.seeded(_build))
    _loss(model)
    norm: Any = clip_grad_norm_(model.parameters(), 1e6)
    with torch.no_grad():
        model(_x())
    assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())
    again: Any = clip_grad_norm_(model.parameters(), 1e6)
    assert torch.equal(again.full_tensor(), norm.full_tensor())
    grads = copy.deepcopy(parity.full_grads(model))
    model.zero_grad()
    _loss(model)
    for name, expected in parity.full_grads(model).items():
        assert torch.equal(expected, grads[name]), name
