"""Several losses and derivatives of derivatives: each graph is read as long as it lives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2.core.modules.registry import record_of
from fsdp2.core.schedule.states import GroupState
from tests.common import gradients, models, parity
from tests.common.cases import in_turn
from tests.common.workers import ranks

Program = Callable[[Any, "int | None"], Any]
mlp = partial(models.seeded, partial(models.MLP, out=1))  # rank 1 has no row of its head


def _shard(model: nn.Module, reshard_after_forward: bool | None) -> Any:
    return parity.shard(parity.OURS, model, reshard_after_forward=reshard_after_forward)


def _sharded(model: nn.Module) -> bool:
    """Whether no unit's parameters are in memory."""
    record: Any = record_of(model)
    return all(group.state is GroupState.SHARDED for group in record.scheduler.groups)


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


def _two_losses(model: nn.Module, rank: int | None) -> tuple[Tensor, Tensor]:
    left, right = model(gradients.part(0, rank)[0])
    return left.square().mean(), right.sin().mean()


def _in_turn(model: nn.Module, rank: int | None) -> None:
    left, right = _two_losses(model, rank)
    left.backward(retain_graph=True)
    right.backward()


def _twice(model: nn.Module, rank: int | None) -> None:
    left, _ = _two_losses(model, rank)
    left.backward(retain_graph=True)
    left.backward()


def _together(model: nn.Module, rank: int | None) -> None:
    torch.autograd.backward(list(_two_losses(model, rank)))


def _one_forward_each(model: nn.Module, rank: int | None) -> None:
    first, second = _two_losses(model, rank), _two_losses(model, rank)
    first[0].backward()
    second[1].backward()


def _out_of_order(model: nn.Module, rank: int | None) -> None:
    first, second = _two_losses(model, rank), _two_losses(model, rank)
    second[0].backward(retain_graph=True)
    first[1].backward()
    second[1].backward()


# -- gradients of gradients -----------------------------------------------------------------------


def _input_and_gradient(
    model: nn.Module, rank: int | None, step: int = 0, through_output: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """An input, the output, and the gradient of its sum, which has a graph.

    That does not lead through the output, unless it is asked for.
    """
    x = gradients.part(step, rank)[0].clone().requires_grad_()
    output = model(x)
    total = (output.sin() if through_output else output).sum()
    (grad,) = torch.autograd.grad(total, x, create_graph=True)
    return x, output, grad


def _penalty(model: nn.Module, rank: int | None, step: int = 0) -> Tensor:
    _, _, grad = _input_and_gradient(model, rank, step)
    return (grad.norm(2, 1) - 1).square().mean()


def _losses(model: nn.Module, rank: int | None) -> Tensor:
    first, second = (model(gradients.part(step, rank)[0]).mean() for step in (0, 1))
    loss: Tensor = first - second
    return loss


def _evaluate(model: nn.Module, rank: int | None) -> None:
    with torch.no_grad():
        model(gradients.part(1, rank)[0])


def _penalised(model: nn.Module, rank: int | None) -> Tensor:
    """A loss with the size of the inputs' gradient in it."""
    _, output, grad = _input_and_gradient(model, rank, through_output=True)
    return (output - gradients.part(0, rank)[1]).square().mean() + grad.square().mean()


def _penalised_at_once(model: nn.Module, rank: int | None) -> None:
    _penalised(model, rank).backward()


def _penalised_first(model: nn.Module, rank: int | None) -> None:
    """The penalty comes before other forwards, one of them without grad, as with critics."""
    penalty = _penalty(model, rank)
    _evaluate(model, rank)
    (_losses(model, rank) + penalty).backward()


def _through_two_backwards(model: nn.Module, rank: int | None) -> None:
    """Third derivatives: the gradient of a gradient's norm, with a graph again."""
    x, _, grad = _input_and_gradient(model, rank, through_output=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x, create_graph=True)
    (grad.square().mean() + second.square().mean()).backward()


def _penalty_first(model: nn.Module, rank: int | None) -> None:
    penalty = _penalty(model, rank)
    _losses(model, rank).backward()
    penalty.backward()


def _penalty_last(model: nn.Module, rank: int | None) -> None:
    _losses(model, rank).backward()
    _penalty(model, rank).backward()


def _losses_apart(model: nn.Module, rank: int | None) -> None:
    penalty = _penalty(model, rank)
    model(gradients.part(0, rank)[0]).mean().backward()
    (-model(gradients.part(1, rank)[0]).mean()).backward()
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
    _, output, grad = _input_and_gradient(model, rank)
    output.mean().backward(retain_graph=True)
    grad.square().sum().backward()


def _penalty_twice(model: nn.Module, rank: int | None) -> None:
    penalty = _penalty(model, rank)
    penalty.backward(retain_graph=True)
    penalty.backward()


def _evaluated_in_between(model: nn.Module, rank: int | None) -> None:
    penalty = _penalty(model, rank)
    _evaluate(model, rank)
    _losses(model, rank).backward()
    _evaluate(model, rank)
    penalty.backward()


def _dropped(model: nn.Module, rank: int | None) -> None:
    """A graph that nobody reads: the next forward sees that it is gone."""
    penalty = _penalty(model, rank)
    _losses(model, rank).backward()
    del penalty
    _losses(model, rank).backward()


def _third(model: nn.Module, rank: int | None) -> None:
    x, _, first = _input_and_gradient(model, rank)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    _losses(model, rank).backward()
    first.square().mean().backward(retain_graph=True)
    second.square().mean().backward()


def _through_a_backward(model: nn.Module, rank: int | None) -> None:
    """`loss.backward(create_graph=True)`: the gradients of a second one add up."""
    x = gradients.part(0, rank)[0].clone().requires_grad_()
    model(x).sin().sum().backward(create_graph=True)
    x.grad.square().sum().backward()


ONE_BACKWARD = (_together, _penalised_at_once, _penalised_first, _through_two_backwards)
"""To the bit. Others add averages, each reduced on its own, instead of averaging sums."""

PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        *ONE_BACKWARD,
        _in_turn,
        _twice,
        _one_forward_each,
        _out_of_order,
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
        _through_a_backward,
    )
}
OF_TWO_HEADS = (_together, _in_turn, _twice, _one_forward_each, _out_of_order)


def _check(program: Program, reshard_after_forward: bool | None) -> None:
    build = partial(models.seeded, _TwoHeads) if program in OF_TWO_HEADS else mlp
    model = _shard(build(), reshard_after_forward)
    for _ in range(2):
        model.zero_grad()
        program(model, None)
    assert _sharded(model), "parameters are in memory when the last graph was read"
    grads = parity.full_grads(model)
    if program in ONE_BACKWARD:
        gradients.assert_like_unsharded(grads, build(), program)
    else:
        parity.assert_close(grads, gradients.unsharded_grads(build(), program), parity.FP32)


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_gradients_of_several_backwards(reshard_after_forward: bool | None) -> None:
    """As unsharded, in every order of forwards and backwards."""
    in_turn(PROGRAMS, partial(_check, reshard_after_forward=reshard_after_forward))


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_parameters_stay_for_a_second_backward(reshard_after_forward: bool | None) -> None:
    """In memory from a backward with create_graph=True to the end of the next one without."""
    model = _shard(mlp(), reshard_after_forward)
    value = _penalised(model, None)
    assert not _sharded(model)
    value.backward()
    assert _sharded(model)


@ranks(2)
def test_backward_that_creates_a_graph_reduces_its_gradients() -> None:
    def compute(model: nn.Module, rank: int | None = None, creates: bool = False) -> None:
        x = gradients.part(0, rank)[0].clone().requires_grad_()
        model(x).sin().sum().backward(create_graph=creates)

    model = _shard(mlp(), True)
    compute(model, creates=True)
    for module in (*models.units(model), model):
        module.reshard()
    gradients.assert_like_unsharded(parity.full_grads(model), mlp(), compute)


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("graph", [{"retain_graph": True}, {"create_graph": True}])
def test_products_with_the_hessian(
    graph: dict[str, bool], reshard_after_forward: bool | None
) -> None:
    """Several of one graph, as Hutchinson's estimate takes them."""

    def products(model: nn.Module) -> list[Tensor]:
        x, _, grad = _input_and_gradient(model, None)
        rows = [grad[:, i].sum() for i in range(3)]
        return [torch.autograd.grad(row, x, **graph)[0].detach() for row in rows]

    model = _shard(mlp(), reshard_after_forward)
    parity.assert_equal(products(model), products(mlp()))
    model(gradients.part(0)[0]).sum().backward()
    assert _sharded(model)
