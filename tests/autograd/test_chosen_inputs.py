"""Backwards to chosen parameters, and under compiled autograd: the unsharded model's gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import get_gradient_edge

import fsdp2
from tests.common import compiling, gradients, models, parity
from tests.common.errors import raises
from tests.common.workers import ranks


def _build() -> nn.Module:
    return models.seeded(
        lambda: nn.Sequential(*(nn.Linear(models.DIM, models.DIM) for _ in range(4)), nn.Tanh())
    )


def _shard(**arguments: Any) -> Any:
    model = _build()
    for layer in list(model.children())[:3]:
        fsdp2.fully_shard(layer, mesh=parity.world_mesh(), **arguments)
    return fsdp2.fully_shard(model, mesh=parity.world_mesh(), **arguments)


def _loss(model: nn.Module, rank: int) -> Tensor:
    x: Tensor = gradients.part(0, rank)[0]
    return model(x).square().sum()


def _train(model: nn.Module, rank: int) -> None:
    _loss(model, rank).backward()


CHOICES = {
    "last": ["3.weight"],
    "first": ["0.weight"],
    "between": ["1.bias", "2.weight"],
    "all": [f"{layer}.{name}" for layer in range(4) for name in ("weight", "bias")],
}


@ranks(2, 4, timeout=120)
@pytest.mark.parametrize(
    "arguments", [{}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}], ids=str
)
@pytest.mark.parametrize("read_before", [True, False])
def test_backward_to_shards(read_before: bool, arguments: dict[str, Any]) -> None:
    """A backward whose ``inputs`` are sharded parameters, or edges to them, then one to all."""
    model = _shard(**arguments)
    shards = dict(model.named_parameters())
    for number, chosen in enumerate(CHOICES.values()):

        def compute(plain: nn.Module, rank: int, chosen: list[str] = chosen) -> None:
            found = dict(plain.named_parameters())
            _loss(plain, rank).backward(inputs=[found[name] for name in chosen])

        loss = _loss(model, dist.get_rank())
        found = shards if read_before else dict(model.named_parameters())
        inputs: list[Any] = [found[name] for name in chosen]
        loss.backward(inputs=list(map(get_gradient_edge, inputs)) if number % 2 else inputs)
        ours = parity.full_grads(model)
        ours = {name: ours.get(name) for name in shards}
        gradients.assert_like_unsharded(ours, _build(), compute)
        model.zero_grad()
        _train(model, dist.get_rank())
        gradients.assert_like_unsharded(parity.full_grads(model), _build(), _train, "after")
        model.zero_grad()


@ranks(2, timeout=120)
def test_gradients_of_shards_are_returned_by_no_one() -> None:
    """`torch.autograd.grad` names the parameter, and the graph is as it was."""
    model = _shard()
    shards = list(model.parameters())
    x: Tensor = gradients.part(0)[0].requires_grad_()
    loss = model(x).square().sum()
    for asked in ([shards[2]], [x, *model.parameters()], [get_gradient_edge(shards[2])]):
        with raises("grad-of-shard"):
            torch.autograd.grad(loss, asked, allow_unused=True)
    loss.backward()
    gradients.assert_like_unsharded(parity.full_grads(model), _build(), _train)


@ranks(2, timeout=240)
def test_compiled_autograd_is_off_for_sharded_models() -> None:
    """Its graphs would trace hooks; a model without sharded modules is compiled as before."""
    with compiling.fresh_dynamo():
        model, compiler = _shard(), compiling.Compiler("aot_eager", fullgraph=False)
        enable: Callable[[], Any] = lambda: compiled_autograd._enable(compiler.wrap)  # noqa: E731
        for forward_too in (True, True, False, False):
            with enable() if forward_too else nullcontext():
                loss = _loss(model, dist.get_rank())
                if forward_too:
                    loss.backward()
            if not forward_too:
                with enable():
                    loss.backward()
            gradients.assert_like_unsharded(parity.full_grads(model), _build(), _train)
            model.zero_grad()
        assert compiler.graphs == 0
        plain = nn.Linear(2, 2)
        with enable():
            plain(torch.ones(2, 2)).sum().backward()
        assert compiler.counter.frame_count == 1
        assert plain.weight.grad is not None
