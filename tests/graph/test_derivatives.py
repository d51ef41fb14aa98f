"""Derivatives of a sharded model in graph mode are those of the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import fsdp2
from tests.common import models
from tests.common.parity import FP32, full_all
from tests.common.workers import ranks

Params = dict[str, Any]
Loss = Callable[[nn.Module, Params, Tensor], Tensor]


def _loss(model: nn.Module, params: Params, x: Tensor) -> Tensor:
    return functional_call(model, params, (x,)).square().mean()


def _inner_product(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Over all ranks' rows, as a number that each rank's loss has."""
    total = sum((a * b).sum() for a, b in zip(first, second, strict=True))
    assert isinstance(total, Tensor)
    return total.full_tensor() if isinstance(total, DTensor) else total


def _gradient(model: nn.Module, params: Params, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(_loss(model, params, x), [*params.values()]))


def _of_two_tasks(model: nn.Module, params: Params, x: Tensor) -> list[Tensor]:
    """The second task's gradient, which shares the graph of the first's."""
    output = functional_call(model, params, (x,))
    wanted = [*params.values()]
    torch.autograd.grad(output.square().mean(), wanted, retain_graph=True)
    return list(torch.autograd.grad(output.abs().mean(), wanted))


def _penalty(model: nn.Module, params: Params, x: Tensor) -> list[Tensor]:
    """The gradient of the squared norm of the gradient."""
    first = torch.autograd.grad(_loss(model, params, x), [*params.values()], create_graph=True)
    return list(torch.autograd.grad(_inner_product(first, first), [*params.values()]))


def _hessian_product(model: nn.Module, params: Params, x: Tensor) -> list[Tensor]:
    first = torch.autograd.grad(_loss(model, params, x), [*params.values()], create_graph=True)
    vector = [param.detach().cos() for param in params.values()]
    return list(torch.autograd.grad(_inner_product(first, vector), [*params.values()]))


def _after_an_inner_step(model: nn.Module, params: Params, x: Tensor) -> list[Tensor]:
    """MAML: the gradient of the loss behind a step, with respect to what it started from."""
    first = torch.autograd.grad(_loss(model, params, x), [*params.values()], create_graph=True)
    stepped = {
        name: param - 0.1 * gradient
        for (name, param), gradient in zip(params.items(), first, strict=True)
    }
    loss = _loss(model, stepped, x)
    return list(torch.autograd.grad(loss, [*params.values()]))


DERIVATIVES = (_gradient, _of_two_tasks, _penalty, _hessian_product, _after_an_inner_step)


@ranks(2)
@pytest.mark.parametrize("reshards", [True, False])
def test_derivatives(reshards: bool) -> None:
    """All of them: of the mean over ranks, which see the same, as an unsharded model would.

    Each is compared within the roundings of sums in another order.
    """
    x = torch.randn(3, models.DIM, generator=torch.Generator().manual_seed(1))
    unsharded = models.seeded(models.OddMLP)
    sharded = models.seeded(models.OddMLP)
    for layer in sharded.layers:
        fsdp2.fully_shard(layer, reshard_after_forward=reshards)
    fsdp2.fully_shard(sharded)
    fsdp2.graph_mode(sharded)
    for derivative in DERIVATIVES:
        expected = derivative(unsharded, dict(unsharded.named_parameters()), x)
        found = full_all(derivative(sharded, dict(sharded.named_parameters()), x))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=FP32.rtol, atol=FP32.atol)


@ranks(2)
def test_derivatives_of_other_batches_are_averaged() -> None:
    """Each rank differentiates its own batch: second derivatives average as gradients do."""
    whole = torch.randn(2, 3, models.DIM, generator=torch.Generator().manual_seed(1))
    unsharded = models.seeded(models.OddMLP)
    params = dict(unsharded.named_parameters())
    first = [
        torch.autograd.grad(_loss(unsharded, params, x), [*params.values()], create_graph=True)
        for x in whole
    ]
    mean = [(a + b) / 2 for a, b in zip(*first, strict=True)]
    expected = torch.autograd.grad(_inner_product(mean, mean), [*params.values()])
    sharded = models.seeded(models.OddMLP)
    fsdp2.fully_shard(sharded)
    fsdp2.graph_mode(sharded)
    found = full_all(_penalty(sharded, dict(sharded.named_parameters()), whole[dist.get_rank()]))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=FP32.rtol, atol=FP32.atol)


@ranks(2)
def test_gradients_per_sample_over_gathered_parameters() -> None:
    """`torch.func` works on parameters that are gathered: nothing is gathered inside of it."""
    x = torch.randn(3, models.DIM, generator=torch.Generator().manual_seed(1))
    model = models.seeded(models.OddMLP)

    def loss(params: Params, sample: Tensor) -> Tensor:
        return _loss(model, params, sample[None])

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    expected = per_sample({name: p.detach() for name, p in model.named_parameters()}, x)
    fsdp2.fully_shard(model)
    fsdp2.graph_mode(model)
    whole = full_all(model.parameters())
    params = dict(zip(dict(model.named_parameters()), whole, strict=True))
    for name, gradient in per_sample(params, x).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)
