"""`torch.autograd.grad`, derivatives inside of a forward, and units that return their input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.core.modules.registry import record_of
from fsdp2.core.schedule.states import GroupState
from tests.common import gradients, models, parity
from tests.common.cases import in_turn
from tests.common.errors import raises
from tests.common.workers import ranks


def _fit(model: nn.Module, rank: int | None = None) -> None:
    x, y = gradients.part(0, rank)
    parity.regression_loss(model, (x.clone().requires_grad_(), y)).backward()


# -- torch.autograd.grad --------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_autograd_grad_of_inputs(reshard_after_forward: bool | None) -> None:
    """It leaves no gradient on any parameter and reduces nothing, and training goes on."""

    def run(api: Any) -> Any:
        model = parity.shard(api, gradients.mlp(), reshard_after_forward=reshard_after_forward)
        x = gradients.part(0)[0].requires_grad_()
        with parity.CountCollectives() as counted:
            (grad,) = torch.autograd.grad(model(x).square().sum(), x)
        assert counted.reduce_scatters == 0
        assert all(param.grad is None for param in model.parameters())
        _fit(model)
        return [grad, parity.full_grads(model)]

    grad, grads = parity.same_as_torch(run)
    plain = gradients.mlp()
    x = gradients.part(0)[0].requires_grad_()
    parity.assert_equal(grad, torch.autograd.grad(plain(x).square().sum(), x)[0], "unsharded")
    gradients.assert_like_unsharded(grads, gradients.mlp(), _fit)


@ranks(2)
def test_autograd_grad_of_parameters() -> None:
    """Shards are not in the graph, and refused. Gathered parameters are: the gradient is this
    rank's own, neither reduced nor sharded."""
    model = parity.shard(parity.OURS, gradients.mlp(), reshard_after_forward=False)
    shards = list(model.parameters())
    loss = parity.regression_loss(model, gradients.part(0))
    with raises("grad-of-shard"):
        torch.autograd.grad(loss, shards)
    model.reset_iter_state()
    loss = parity.regression_loss(model, gradients.part(0))
    grads = torch.autograd.grad(loss, list(model.parameters()))
    plain = gradients.mlp()
    _fit(plain)
    parity.assert_equal(
        list(grads), [param.grad for param in plain.parameters()], "this rank's own"
    )
    _fit(model)
    gradients.assert_like_unsharded(parity.full_grads(model), gradients.mlp(), _fit)


# -- derivatives in forward -----------------------------------------------------------------------


class _Forces(nn.Module):
    """An energy, and its derivative by the module's own input, taken in forward.

    The scale is used after that.
    """

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.net = models.MLP(3)
        self.scale = nn.Parameter(torch.full((models.DIM,), 0.5))
        self.create_graph = create_graph

    def forward(self, x: Tensor) -> Tensor:
        energy = self.net(x)
        (forces,) = torch.autograd.grad(
            energy.sin().sum(), x, retain_graph=True, create_graph=self.create_graph
        )
        return energy + (forces * self.scale)[:, :4]


class _OwnInput(nn.Module):
    """It differentiates by a tensor of its own."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.linear(own).pow(2).sum(), own)
        return self.linear(x + forces)


class _Recomputed(nn.Module):
    """Autograd unpacks what it saved: the unit's forward runs again while it is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.block = _OwnInput()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]


def _shard_block(model: Any) -> None:
    fsdp2.fully_shard(model.block, mesh=parity.world_mesh())


def _shard_all(model: Any) -> None:
    parity.shard(parity.OURS, model)


FORCES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None]]] = {
    "with a graph": (partial(_Forces, True), _shard_all),
    "without a graph": (partial(_Forces, False), _shard_all),
    "recomputed": (_Recomputed, _shard_all),
    "recomputed, the root itself": (_Recomputed, _shard_block),
}


@ranks(2)
def test_derivatives_in_forward() -> None:
    """The gradient of a unit's input is there while the unit runs: that does not end its use."""

    def check(case: tuple[Callable[[], nn.Module], Callable[[Any], None]]) -> None:
        build, shard = case
        model = models.seeded(build)
        shard(model)
        for _ in range(2):
            model.zero_grad()
            _fit(model)
        gradients.assert_like_unsharded(parity.full_grads(model), models.seeded(build), _fit)

    in_turn(FORCES, check)


class _InPlace(nn.Module):
    """Its output is what `how` makes of its input, and perhaps of its weight."""

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((models.DIM,), 0.5))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x, self.weight)


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as it is": lambda x, _: x,
    "a view": lambda x, _: x[:, :],
    "in place": lambda x, weight: x.mul_(weight),
}


def _through(model: nn.Module, rank: int | None = None) -> None:
    model(gradients.part(0, rank)[0].requires_grad_()).sin().mean().backward()


@ranks(2)
def test_units_that_return_their_input() -> None:
    """Their backward begins before it ends, though one tensor's gradient tells both."""

    def check(how: Callable[[Tensor, Tensor], Tensor]) -> None:
        torch.manual_seed(0)
        before, *behind = (nn.Linear(models.DIM, out) for out in (models.DIM, models.DIM, 2))
        plain = nn.Sequential(before, _InPlace(how), *behind)
        model: Any = copy.deepcopy(plain)
        for module in (*model, model):
            fsdp2.fully_shard(module, mesh=parity.world_mesh())
        record: Any = record_of(model[1])
        states = []
        model[0].weight.register_post_accumulate_grad_hook(
            lambda _: states.append(record.unit.own_groups[0].state)
        )
        for _ in range(2):
            model.zero_grad()
            _through(model)
        assert states == [GroupState.SHARDED] * 2  # free when the one before's backward has run
        gradients.assert_like_unsharded(parity.full_grads(model), plain, _through)

    in_turn(WAYS, check)
