"""Several losses, `torch.autograd.grad`, second derivatives, activation checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.core.modules.registry import record_of
from fsdp2.core.schedule.states import GroupState
from tests.common import gradients, models, parity
from tests.common.combinations import each_once
from tests.common.errors import raises
from tests.common.workers import ranks

# -- several losses -------------------------------------------------------------------------------


class _TwoHeads(nn.Module):
    """A trunk of units and two heads that are units; returns both heads' outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = models.MLP(depth=2, out=models.DIM)
        self.left = nn.Linear(models.DIM, 3)
        self.right = nn.Linear(models.DIM, 3)
        self.left.is_unit = self.right.is_unit = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


def _losses(model: nn.Module, rank: int | None = None) -> tuple[Tensor, Tensor]:
    left, right = model(gradients.part(0, rank)[0])
    return left.square().mean(), right.sin().mean()


def _in_turn(model: nn.Module, rank: int | None = None) -> None:
    left, right = _losses(model, rank)
    left.backward(retain_graph=True)
    right.backward()


def _twice(model: nn.Module, rank: int | None = None) -> None:
    left, _ = _losses(model, rank)
    left.backward(retain_graph=True)
    left.backward()


def _together(model: nn.Module, rank: int | None = None) -> None:
    torch.autograd.backward(list(_losses(model, rank)))


def _one_forward_each(model: nn.Module, rank: int | None = None) -> None:
    first, second = _losses(model, rank), _losses(model, rank)
    first[0].backward()
    second[1].backward()


def _out_of_order(model: nn.Module, rank: int | None = None) -> None:
    first, second = _losses(model, rank), _losses(model, rank)
    second[0].backward(retain_graph=True)
    first[1].backward()
    second[1].backward()


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("compute", [_in_turn, _twice, _together, _one_forward_each, _out_of_order])
def test_several_losses(compute: gradients.Compute, reshard_after_forward: bool | None) -> None:
    """Every order of forwards and backwards adds up to the same gradients."""
    model = parity.shard(
        parity.OURS, models.seeded(_TwoHeads), reshard_after_forward=reshard_after_forward
    )
    for _ in range(2):
        model.zero_grad()
        compute(model, None)
    # Each backward is reduced on its own, and averages are added instead of averaging sums.
    parity.assert_close(
        parity.full_grads(model),
        gradients.unsharded_grads(models.seeded(_TwoHeads), compute),
        parity.FP32,
    )


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
        parity.regression_loss(model, gradients.part(0)).backward()
        return [grad, parity.full_grads(model)]

    grad, grads = parity.same_as_torch(run)
    plain = gradients.mlp()
    x = gradients.part(0)[0].requires_grad_()
    parity.assert_equal(grad, torch.autograd.grad(plain(x).square().sum(), x)[0], "unsharded")
    gradients.assert_like_unsharded(
        grads,
        gradients.mlp(),
        lambda m, rank: parity.regression_loss(m, gradients.part(0, rank)).backward(),
    )


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


def _fit_forces(model: nn.Module, rank: int | None = None) -> None:
    x, y = gradients.part(0, rank)
    (model(x.requires_grad_()) - y).square().mean().backward()


@ranks(2)
@pytest.mark.parametrize("create_graph", [True, False])
def test_derivative_by_its_own_input_in_forward(create_graph: bool) -> None:
    """The gradient of a unit's input is there while the unit runs: that does not end its use."""
    make = partial(models.seeded, partial(_Forces, create_graph))
    model = parity.shard(parity.OURS, make())
    for _ in range(2):
        model.zero_grad()
        _fit_forces(model)
    gradients.assert_like_unsharded(parity.full_grads(model), make(), _fit_forces)


class _Recomputed(nn.Module):
    """A checkpoint of what differentiates by a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = _OwnInput()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]


class _OwnInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.linear(own).pow(2).sum(), own)
        return self.linear(x + forces)


@ranks(2)
@pytest.mark.parametrize("root", ["around", "itself"])
def test_derivative_in_a_checkpointed_forward(root: str) -> None:
    """Autograd unpacks what it saved: the unit's forward runs again while it is under way."""
    model: Any = models.seeded(_Recomputed)
    fsdp2.fully_shard(model.block, mesh=parity.world_mesh())
    if root == "around":
        fsdp2.fully_shard(model, mesh=parity.world_mesh())
    for _ in range(2):
        model.zero_grad()
        _fit_forces(model)
    gradients.assert_like_unsharded(
        parity.full_grads(model), models.seeded(_Recomputed), _fit_forces
    )


class _InPlace(nn.Module):
    """Its output is its input: as it is, or changed in place; its weight is used now and then."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((models.DIM,), 0.5))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "as it is":
            return x
        if self.how == "a view":
            return x[:, :]
        return x.mul_(self.weight)


def _around_in_place(how: str) -> nn.Module:
    return nn.Sequential(
        nn.Linear(models.DIM, models.DIM),
        _InPlace(how),
        nn.Linear(models.DIM, models.DIM),
        nn.Linear(models.DIM, 2),
    )


def _through(model: nn.Module, rank: int | None = None) -> None:
    model(gradients.part(0, rank)[0].requires_grad_()).sin().mean().backward()


@ranks(2)
@pytest.mark.parametrize("how", ["as it is", "a view", "in place"])
def test_units_that_return_their_input(how: str) -> None:
    """Their backward begins before it ends, though one tensor's gradient tells both."""
    torch.manual_seed(0)
    plain = _around_in_place(how)
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
    assert states == [GroupState.SHARDED] * 2  # free when the backward of the one before has run
    gradients.assert_like_unsharded(parity.full_grads(model), plain, _through)


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
    parity.regression_loss(plain, gradients.part(0)).backward()
    parity.assert_equal(
        list(grads), [param.grad for param in plain.parameters()], "this rank's own"
    )
    parity.regression_loss(model, gradients.part(0)).backward()
    gradients.assert_like_unsharded(
        parity.full_grads(model),
        gradients.mlp(),
        lambda m, rank: parity.regression_loss(m, gradients.part(0, rank)).backward(),
    )


def group_states(model: Any) -> set[GroupState]:
    """Where the parameters of all units are."""
    scheduler = record_of(model).scheduler  # type: ignore[union-attr]  # it is sharded
    return {group.state for group in scheduler.groups}


# -- second derivatives ---------------------------------------------------------------------------


def _penalised(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    """A loss with the size of the inputs' gradient in it."""
    x = part[0].requires_grad_()
    output = model(x)
    (grad,) = torch.autograd.grad(output.sin().sum(), x, create_graph=True)
    return (output - part[1]).square().mean() + grad.square().mean()


def _penalised_first(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    """The penalty comes before other forwards, one of them without grad, as with critics."""
    x = part[0].requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    with torch.no_grad():
        model(x)
    return (model(x.flip(1)) - part[1]).square().mean() + grad.square().mean()


def _through_two_backwards(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    """Third derivatives: the gradient of a gradient's norm, with a graph again."""
    x = part[0].requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x, create_graph=True)
    return grad.square().mean() + second.square().mean()


@ranks(2, extended=(4,))
@each_once(
    loss=[_penalised, _penalised_first, _through_two_backwards],
    reshard_after_forward=[None, True, False],
)
def test_double_backward(loss: Any, reshard_after_forward: bool | None) -> None:
    """Parameters stay in memory from a backward with create_graph=True to the end of the next one
    without; shards are registered. torch's FSDP2 fails on the freed storage of a parameter."""
    arguments = {"reshard_after_forward": reshard_after_forward}
    parity.check_training(
        gradients.mlp, gradients.mlp_batches(), loss=loss, torch_too=False, **arguments
    )
    model = parity.shard(parity.OURS, gradients.mlp(), **arguments)
    value = loss(model, gradients.part(0))
    assert GroupState.SHARDED not in group_states(model)
    value.backward()
    assert group_states(model) == {GroupState.SHARDED}


@ranks(2)
def test_backward_that_creates_a_graph_reduces_its_gradients() -> None:
    """`loss.backward(create_graph=True)`: the gradients are there, those of a second add up."""

    def compute(plain: nn.Module, rank: int | None = None) -> None:
        x = gradients.part(0, rank)[0].requires_grad_()
        plain(x).sin().sum().backward(create_graph=True)
        x.grad.square().sum().backward()

    model = parity.shard(parity.OURS, gradients.mlp(), reshard_after_forward=True)
    x = gradients.part(0)[0].requires_grad_()
    model(x).sin().sum().backward(create_graph=True)
    for module in models.units(model):
        module.reshard()
    model.reshard()
    grads = parity.full_grads(model)
    gradients.assert_like_unsharded(
        grads,
        gradients.mlp(),
        lambda plain, rank: plain(gradients.part(0, rank)[0]).sin().sum().backward(),
    )
    model.zero_grad()
    compute(model)
    # Two averages are added instead of averaging two sums.
    parity.assert_close(
        parity.full_grads(model),
        gradients.unsharded_grads(gradients.mlp(), compute),
        parity.FP32,
        "both",
    )


# -- activation checkpointing ---------------------------------------------------------------------


class _Layers(nn.Module):
    """Linears, each a unit, that run under `checkpoint` in pairs, within another one if `nested`.

    `wrap` is what each layer is wrapped in before it becomes a unit."""

    def __init__(
        self, reentrant: bool | None, nested: bool, wrap: Callable[[nn.Module], nn.Module]
    ) -> None:
        super().__init__()
        self.reentrant, self.nested = reentrant, nested
        layers = [
            nn.Sequential(nn.Linear(models.DIM, models.DIM), nn.Dropout(0.3), nn.Tanh())
            for _ in range(4)
        ]
        self.layers = nn.ModuleList(wrap(layer) for layer in layers)
        for layer in self.layers:
            layer.is_unit = True
        self.first = nn.Linear(
            models.DIM, models.DIM
        )  # a reentrant checkpoint needs an input that requires grad
        self.head = nn.Linear(models.DIM, 4)

    def checkpointed(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def pair(self, first: int, x: Tensor) -> Tensor:
        for layer in self.layers[first : first + 2]:
            x = self.checkpointed(layer, x) if self.nested else layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for first in (0, 2):
            x = self.checkpointed(partial(self.pair, first), x)
        return self.head(x)


def _train_layers(
    api: Any, reentrant: bool | None, nested: bool, wrap: Callable[[nn.Module], nn.Module]
) -> Any:
    torch.manual_seed(dist.get_rank())  # for dropout
    model = parity.shard(api, models.seeded(partial(_Layers, reentrant, nested, wrap)))
    steps = parity.train_sharded(
        model, parity.adamw, parity.regression_loss, gradients.mlp_batches()
    )
    return [[step.loss, list(step.grads.values()), list(step.params.values())] for step in steps]


@ranks(2)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "nonreentrant"])
def test_checkpoints_over_several_units(reentrant: bool, nested: bool) -> None:
    """Recomputation repeats the same dropout; nothing differs from a run without checkpoints."""
    ours = parity.same_as_torch(
        partial(_train_layers, reentrant=reentrant, nested=nested, wrap=lambda layer: layer)
    )
    parity.assert_equal(
        ours, _train_layers(parity.OURS, None, False, lambda layer: layer), "no checkpoints"
    )


@ranks(2)
@pytest.mark.parametrize("impl", list(CheckpointImpl), ids=lambda impl: impl.name)
def test_checkpoint_wrapper_below_and_above_a_unit(impl: CheckpointImpl) -> None:
    """`fully_shard(checkpoint_wrapper(m))` and `checkpoint_wrapper(fully_shard(m))`."""
    wrap = partial(checkpoint_wrapper, checkpoint_impl=impl)
    reentrant = None  # no checkpoint() calls of the model's own

    def above(api: Any) -> Any:
        def shard_and_wrap(layer: nn.Module) -> nn.Module:
            api.fully_shard(layer, mesh=parity.world_mesh(), reshard_after_forward=True)
            return wrap(layer)

        torch.manual_seed(dist.get_rank())
        model = models.seeded(partial(_Layers, reentrant, False, shard_and_wrap))
        api.fully_shard(model, mesh=parity.world_mesh())
        steps = parity.train_sharded(
            model, parity.adamw, parity.regression_loss, gradients.mlp_batches()
        )
        return [[s.loss, list(s.grads.values()), list(s.params.values())] for s in steps]

    plain = _train_layers(parity.OURS, None, False, lambda layer: layer)
    below = parity.same_as_torch(partial(_train_layers, reentrant=None, nested=False, wrap=wrap))
    parity.assert_equal(below, plain, "wrapper inside the unit")
    parity.assert_equal(parity.same_as_torch(above), plain, "wrapper around the unit")
    assert len(models.units(models.seeded(partial(_Layers, None, False, wrap)))) == 4
