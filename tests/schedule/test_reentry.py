"""Modules inside each other in unusual ways: nested calls, outputs of children, derivatives.

Equality is exact: on two ranks ours does the arithmetic of the reference, rank by rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from fsdp2 import fully_shard
from tests.common import models, parity
from tests.common.errors import raises
from tests.common.workers import ranks


class _Head(nn.Module):
    """Returns what its child returned: the same tensor."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(models.DIM))
        self.linear = nn.Linear(models.DIM, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(models.DIM, models.DIM)
        self.first, self.second = _Head(2 * models.DIM), _Head(3 * models.DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.first(x), self.second(x)


@ranks(2)
@pytest.mark.parametrize("differ", [False, True])
def test_units_that_return_what_a_child_returns(differ: bool) -> None:
    """With zeros for unused parameters, whichever outputs the ranks use."""
    model, plain = models.seeded(_TwoHeads), models.seeded(_TwoHeads)
    for unit in (model.trunk, model.first.linear, model.first, model.second.linear, model.second):
        fully_shard(unit, mesh=parity.world_mesh())
    fully_shard(model, mesh=parity.world_mesh())
    model.set_reduce_scatter_unused_params(True)
    used = [0, 1 if differ else 0]
    x = torch.ones(2, models.DIM)
    model(x)[used[dist.get_rank()]].sum().backward()
    for output in used:
        (plain(x)[output].sum() / 2).backward()
    grads = {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in plain.named_parameters()
    }
    parity.assert_equal(parity.full_grads(model), grads)


class _Nested(nn.Module):
    """Calls itself: a target without grad, or once more with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Linear(models.DIM, models.DIM),
            nn.Linear(models.DIM, models.DIM),
        )
        self.bias = nn.Parameter(torch.ones(models.DIM))

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        if how == "no_grad":
            with torch.no_grad():
                x = x + self(x)
        elif how == "grad":
            x = x + self(x)
        return self.second(torch.tanh(self.first(x))) + self.bias

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self(x)
        return x


def _nested(**arguments: Any) -> Any:
    model: Any = models.seeded(_Nested)
    fully_shard(model.first, mesh=parity.world_mesh(), **arguments)
    fully_shard(model, mesh=parity.world_mesh(), **arguments)
    return model


@ranks(2)
@pytest.mark.parametrize("how", ["no_grad", "grad"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_model_that_calls_itself(how: str, reshard_after_forward: bool) -> None:
    """What backwards without sync left is still there; gradients are those without sharding."""
    model, plain = _nested(reshard_after_forward=reshard_after_forward), models.seeded(_Nested)
    for sync, batch in ((False, 1.0), (True, 2.0), (True, 3.0)):
        model.set_requires_gradient_sync(sync)
        x = torch.full((2, models.DIM), batch, requires_grad=True)
        mine, theirs = model(x, how), plain(x, how)
        parity.assert_equal(mine.detach(), theirs.detach())
        mine.sum().backward()
        theirs.sum().backward()
    model.reshard()
    grads = {name: param.grad for name, param in plain.named_parameters()}
    parity.assert_equal(parity.full_grads(model), grads)


@ranks(2)
def test_a_method_that_calls_the_model() -> None:
    """`generate` between two micro-batches: their gradients are not lost."""
    grads = []
    for generates in (False, True):
        model = _nested()
        fsdp2.register_fsdp_forward_method(model, "generate")
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            model(torch.ones(2, models.DIM)).sum().backward()
            if generates:
                with torch.no_grad():
                    found = model.generate(torch.ones(2, models.DIM))
                parity.assert_equal(
                    found, models.seeded(_Nested).generate(torch.ones(2, models.DIM)).detach()
                )
        model.reshard()
        grads.append(parity.full_grads(model))
    parity.assert_equal(grads[1], grads[0])


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise MemoryError("three rows")
        return self.linear(x)


@ranks(2)
def test_an_exception_in_a_child_that_is_called_on_its_own() -> None:
    """The next call of another child begins a forward: parameters that were kept are not stale."""
    model = models.seeded(lambda: nn.Sequential(_Fails(), nn.Linear(models.DIM, models.DIM)))
    plain = models.seeded(lambda: nn.Sequential(_Fails(), nn.Linear(models.DIM, models.DIM)))
    for unit in (*model, model):
        fully_shard(unit, mesh=parity.world_mesh())
    model.set_reshard_after_backward(False)
    x = torch.ones(2, models.DIM)
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for each, optimizer in zip((model, plain), steps, strict=True):
        each(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(MemoryError):
        model[0](torch.ones(3, models.DIM))
    for _ in range(3):
        outputs = []
        for each, optimizer in zip((model, plain), steps, strict=True):
            outputs.append(each[1](x))
            outputs[-1].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        parity.assert_equal(outputs[0].detach(), outputs[1].detach())


class _Readout(nn.Module):
    """Differentiates, inside its forward, by what its inputs were made of."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.out = nn.Linear(models.DIM, models.DIM), nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor, weights: Tensor | None, source: Any) -> Tensor:
        energy = torch.tanh(self.energy(x if weights is None else x * weights))
        (force,) = torch.autograd.grad(energy.sum(), source.positions, create_graph=True)
        return self.out(energy) + force


class _Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.readout = nn.Linear(models.DIM, models.DIM), _Readout()

    def forward(self, source: Any, two: bool) -> Tensor:
        x = self.embed(source.positions)
        return self.readout(x, x * 2 if two else None, source)


class _Source:
    """Not a container that inputs are looked for in."""

    def __init__(self) -> None:
        self.positions = torch.ones(4, models.DIM, requires_grad=True)


@ranks(2)
@pytest.mark.parametrize("two", [False, True], ids=["one input", "two inputs"])
@pytest.mark.parametrize("unused", [False, True])
def test_a_derivative_inside_of_a_forward(unused: bool, two: bool) -> None:
    model, plain = models.seeded(_Forces), models.seeded(_Forces)
    for unit in (model.embed, model.readout, model):
        fully_shard(unit, mesh=parity.world_mesh())
    if unused:
        model.set_reduce_scatter_unused_params(True)
    for _ in range(2):
        model(_Source(), two).sum().backward()
        plain(_Source(), two).sum().backward()
    grads = {name: param.grad for name, param in plain.named_parameters()}
    parity.assert_equal(parity.full_grads(model), grads)


@ranks(2)
def test_an_optimizer_made_before_parameters_were_taken_over() -> None:
    """It has stepped already: what it knows of its parameters is asked again."""
    model: Any = models.seeded(lambda: nn.Sequential(nn.Linear(models.DIM, models.DIM)))
    fully_shard(model, mesh=parity.world_mesh())
    fsdp2.install()
    try:
        model.append(nn.Linear(models.DIM, models.DIM))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, models.DIM)).sum().backward()
        model.reshard()
        optimizer.step()
        model.shard_new_parameters()
        model(torch.ones(2, models.DIM)).sum().backward()
        model.reshard()
        with raises("stale-optimizer"):
            optimizer.step()
    finally:
        fsdp2.uninstall()
