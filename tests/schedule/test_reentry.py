"""Modules inside each other in unusual ways: nested calls, outputs of children.

Equality is exact: on two ranks ours does the arithmetic of the reference, rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from tests.common import models, parity
from tests.common.errors import raises
from tests.common.models import DIM
from tests.common.workers import ranks


def both(build: Callable[[], nn.Module], **arguments: Any) -> tuple[Any, nn.Module]:
    """A sharded model, its units those that say so, and a plain one."""
    return parity.shard(parity.OURS, models.seeded(build), **arguments), models.seeded(build)


class _Head(nn.Module):
    """Returns what its child returned: the same tensor."""

    is_unit = True

    def __init__(self, out: int) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(DIM)), nn.Linear(DIM, out)
        self.linear.is_unit = True

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(DIM, DIM)
        self.trunk.is_unit = True
        self.first, self.second = _Head(2 * DIM), _Head(3 * DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.first(x), self.second(x)


@ranks(2)
@pytest.mark.parametrize("differ", [False, True])
def test_units_that_return_what_a_child_returns(differ: bool) -> None:
    """With zeros for unused parameters, whichever outputs the ranks use."""
    model, plain = both(_TwoHeads)
    model.set_reduce_scatter_unused_params(True)
    used = [0, 1 if differ else 0]
    x = torch.ones(2, DIM)
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
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.first.is_unit = True
        self.bias = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        if how:
            with torch.set_grad_enabled(how == "grad"):
                x = x + self(x)
        return self.second(torch.tanh(self.first(x))) + self.bias

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self(x)
        return x


@ranks(2)
@pytest.mark.parametrize("how", ["no_grad", "grad"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_model_that_calls_itself(how: str, reshard_after_forward: bool) -> None:
    """What backwards without sync left is still there; gradients are those without sharding."""
    model, plain = both(_Nested, reshard_after_forward=reshard_after_forward)
    for sync, batch in ((False, 1.0), (True, 2.0), (True, 3.0)):
        model.set_requires_gradient_sync(sync)
        x = torch.full((2, DIM), batch, requires_grad=True)
        mine, theirs = model(x, how), plain(x, how)
        parity.assert_equal(mine.detach(), theirs.detach())
        mine.sum().backward()
        theirs.sum().backward()
    model.reshard()
    parity.assert_equal(parity.full_grads(model), parity.full_grads(plain))


@ranks(2)
def test_a_method_that_calls_the_model() -> None:
    """`generate` between two micro-batches: their gradients are not lost."""
    model, plain = both(_Nested)
    fsdp2.register_fsdp_forward_method(model, "generate")
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        for each in (model, plain):
            each(torch.ones(2, DIM)).sum().backward()
        with torch.no_grad():
            found, expected = (each.generate(torch.ones(2, DIM)) for each in (model, plain))
        parity.assert_equal(found, expected)
    model.reshard()
    parity.assert_equal(parity.full_grads(model), parity.full_grads(plain))


class _Fails(nn.Linear):
    is_unit = True

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise MemoryError("three rows")
        return super().forward(x)


@ranks(2)
def test_an_exception_in_a_child_that_is_called_on_its_own() -> None:
    """The next call of another child begins a forward: parameters that were kept are not stale."""
    model, plain = both(lambda: nn.Sequential(_Fails(DIM, DIM), _Fails(DIM, DIM)))
    model.set_reshard_after_backward(False)
    x = torch.ones(2, DIM)
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]

    def step(*called: Any) -> None:
        outputs = []
        for each, optimizer in zip(called, steps, strict=True):
            outputs.append(each(x))
            outputs[-1].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        parity.assert_equal(outputs[0].detach(), outputs[1].detach())

    step(model, plain)
    with pytest.raises(MemoryError):
        model[0](torch.ones(3, DIM))
    for _ in range(3):
        step(model[1], plain[1])


@ranks(2)
def test_an_optimizer_made_before_parameters_were_taken_over() -> None:
    """It has stepped already: what it knows of its parameters is asked again."""
    model, _ = both(lambda: nn.Sequential(nn.Linear(DIM, DIM)))
    fsdp2.install()
    try:
        model.append(nn.Linear(DIM, DIM))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, DIM)).sum().backward()
        model.reshard()
        optimizer.step()
        model.shard_new_parameters()
        model(torch.ones(2, DIM)).sum().backward()
        model.reshard()
        with raises("stale-optimizer"):
            optimizer.step()
    finally:
        fsdp2.uninstall()
