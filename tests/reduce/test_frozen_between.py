"""`requires_grad` switched off and on between a unit's forward and its backward, and anywhere else.

As without sharding: autograd drops the gradient of a parameter that requires none when its backward
comes, and a forward records those that require one when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.common import combinations, gradients, models, parity
from tests.common.workers import ranks


class Adapted(nn.Module):
    """A frozen layer and its adapter, which may be off."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(models.DIM, models.DIM).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, models.DIM) / 4)
        self.b = nn.Parameter(torch.randn(models.DIM, 3) / 4)
        self.on = True
        self.freezes_itself = False

    def forward(self, x: Tensor) -> Tensor:
        if self.freezes_itself:
            self.a.requires_grad_(not self.a.requires_grad)
        base: Tensor = self.base(x)
        return base + (x @ self.a.t()) @ self.b.t() if self.on else base


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(3))
        self.head = nn.Linear(models.DIM, 4)
        self.checkpointed = False
        self.between: Callable[[int], None] = lambda _: None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            self.between(index)
            x = torch.tanh(
                checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            )
        x = self.head(x)
        self.between(len(self.layers))
        return x


Program = Callable[[Any, "int | None"], None]


def _adapters(model: Any, on: bool) -> None:
    for layer in model.layers:
        layer.on = on
        layer.a.requires_grad_(on)
        layer.b.requires_grad_(on)


def _reference(model: Any, x: Tensor) -> Tensor:
    """A forward of the frozen model alone, as with DPO and LoRA."""
    _adapters(model, False)
    with torch.no_grad():
        y: Tensor = model(x)
    _adapters(model, True)
    return y


def _x(rank: int | None, step: int = 0) -> Tensor:
    x: Tensor = gradients.part(step, rank)[0]
    return x


def _reference_last(model: Any, rank: int | None) -> None:
    y = model(_x(rank))
    (y - _reference(model, _x(rank))).square().mean().backward()


def _reference_first(model: Any, rank: int | None) -> None:
    r = _reference(model, _x(rank))
    (model(_x(rank)) - r).square().mean().backward()


def _reference_in_the_middle(model: Any, rank: int | None) -> None:
    chosen, rejected = model(_x(rank)), model(_x(rank, 1))
    r = _reference(model, _x(rank))
    third = model(_x(rank, 2))
    (chosen - rejected + third - r).square().mean().backward()


def _reference_recorded(model: Any, rank: int | None) -> None:
    """With gradients of the head, which both forwards use."""
    y = model(_x(rank))
    _adapters(model, False)
    r = model(_x(rank))
    _adapters(model, True)
    (y - r).square().mean().backward()


def _of_inputs(model: Any, rank: int | None) -> None:
    """Everything is frozen around a forward whose inputs require grad."""
    y = model(_x(rank))
    flags = [param.requires_grad for param in model.parameters()]
    model.requires_grad_(False)
    x = _x(rank).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    for param, flag in zip(model.parameters(), flags, strict=True):
        param.requires_grad_(flag)
    (y.square().mean() + (y * grad[:, :4]).mean()).backward()


def _frozen_before_backward(model: Any, rank: int | None) -> None:
    y = model(_x(rank))
    model.layers[0].a.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    y.square().mean().backward()
    model.layers[0].a.requires_grad_(True)
    model.head.bias.requires_grad_(True)


def _frozen_by_a_forward(model: Any, rank: int | None) -> None:
    """Frozen, seen so by a forward, and still so in backward."""
    y = model(_x(rank))
    model.layers[1].a.requires_grad_(False)
    with torch.no_grad():
        model(_x(rank))
    y.square().mean().backward()
    model.layers[1].a.requires_grad_(True)


def _thawed_before_backward(model: Any, rank: int | None) -> None:
    model.layers[2].b.requires_grad_(False)
    y = model(_x(rank))
    model.layers[2].b.requires_grad_(True)
    y.square().mean().backward()


def _between_micro_batches(model: Any, rank: int | None) -> None:
    for step in range(3):
        model.layers[step].a.requires_grad_(False)
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(step == 2)
        model(_x(rank, step)).square().mean().backward()
        model.layers[step].a.requires_grad_(True)


def _between_backwards(model: Any, rank: int | None) -> None:
    y, z = model(_x(rank)), model(_x(rank, 1))
    y.square().mean().backward()
    r = _reference(model, _x(rank))
    (z - r).square().mean().backward()


def _by_assignment(model: Any, rank: int | None) -> None:
    y = model(_x(rank))
    for layer in model.layers:
        layer.a.requires_grad = False
    with torch.no_grad():
        model(_x(rank, 1))
    for layer in model.layers:
        layer.a.requires_grad = True
    y.square().mean().backward()


def _by_held_parameters(model: Any, rank: int | None) -> None:
    """Found once, as an optimizer has them."""
    held = model.__dict__.setdefault("held", list(model.parameters()))
    y = model(_x(rank))
    flags = [param.requires_grad for param in held]
    for param in held:
        param.requires_grad_(False)
    with torch.no_grad():
        model(_x(rank, 1))
    for param, flag in zip(held, flags, strict=True):
        param.requires_grad_(flag)
    y.square().mean().backward()


def _inside_the_forward_around(model: Any, rank: int | None) -> None:
    def between(index: int) -> None:
        if index < len(model.layers):
            model.layers[index].a.requires_grad_(index != 1)
        else:
            model.layers[1].a.requires_grad_(True)

    model.between = between
    y = model(_x(rank))
    del model.between
    model.between = lambda _: None
    y.square().mean().backward()


def _inside_its_own_forward(model: Any, rank: int | None) -> None:
    """Off in one call, on in the next."""
    model.layers[1].freezes_itself = True
    y, z = model(_x(rank)), model(_x(rank, 1))
    model.layers[1].freezes_itself = False
    (y.square().mean() + z.square().mean()).backward()


def _off_inside_on_outside(model: Any, rank: int | None) -> None:
    model.layers[1].freezes_itself = True
    model(_x(rank)).square().mean().backward()
    model.layers[1].freezes_itself = False
    model.layers[1].a.requires_grad_(True)
    model(_x(rank, 1)).square().mean().backward()


def _root_in_between(model: Any, rank: int | None) -> None:
    """The root's stays unsharded after forward: off there, and on again when it is sharded."""
    y = model(_x(rank))
    model.head.weight.requires_grad_(False)
    with torch.no_grad():
        model(_x(rank))
    model.head.weight.requires_grad_(True)
    y.square().mean().backward()


def _root_stays_frozen(model: Any, rank: int | None) -> None:
    y = model(_x(rank))
    model.head.weight.requires_grad_(False)
    y.square().mean().backward()
    assert not model.head.weight.requires_grad
    model(_x(rank, 1)).square().mean().backward()
    model.head.weight.requires_grad_(True)


def _checkpointed(model: Any, rank: int | None) -> None:
    model.checkpointed = True
    _reference_last(model, rank)


def _checkpointed_twice(model: Any, rank: int | None) -> None:
    model.checkpointed = True
    _reference_in_the_middle(model, rank)


def _adapter_of_one_layer(model: Any, rank: int | None) -> None:
    """Layers are trained in turn."""
    for index in range(3):
        for at, layer in enumerate(model.layers):
            layer.a.requires_grad_(at == index)
            layer.b.requires_grad_(at == index)
        model(_x(rank, index)).square().mean().backward()
    _adapters(model, True)


PROGRAMS: list[Program] = [
    _reference_last,
    _reference_first,
    _reference_in_the_middle,
    _reference_recorded,
    _of_inputs,
    _frozen_before_backward,
    _frozen_by_a_forward,
    _thawed_before_backward,
    _between_micro_batches,
    _between_backwards,
    _by_assignment,
    _by_held_parameters,
    _inside_the_forward_around,
    _inside_its_own_forward,
    _off_inside_on_outside,
    _root_in_between,
    _root_stays_frozen,
    _checkpointed,
    _checkpointed_twice,
    _adapter_of_one_layer,
]


def _build() -> nn.Module:
    return models.seeded(Model)


def _tied() -> nn.Module:
    model: Any = models.seeded(Model)
    model.layers[2].a = model.layers[0].a
    return model  # type: ignore[no-any-return]  # a Model


def _shard(model: Any, **arguments: Any) -> Any:
    for layer in model.layers:
        fsdp2.fully_shard(layer, mesh=parity.world_mesh(), **arguments)
    return fsdp2.fully_shard(model, mesh=parity.world_mesh(), **arguments)


def _check(model: Any, build: Callable[[], nn.Module], program: Program) -> None:
    """Twice: what the first leaves of flags and bound reductions counts in the second."""
    for _ in range(2):
        model.zero_grad()
        program(model, None)
        expected = gradients.unsharded_grads(build(), program)
        # Averages of several backwards are added, instead of averaging sums.
        parity.assert_close(parity.full_grads(model), expected, parity.FP32, program.__name__)


@ranks(2)
@combinations.each_once(program=PROGRAMS, reshard_after_forward=[None, True, False])
def test_frozen_and_thawed(program: Program, reshard_after_forward: bool | None) -> None:
    model = _shard(_build(), reshard_after_forward=reshard_after_forward)
    _check(model, _build, program)


@ranks(2)
def test_frozen_and_thawed_where_parameters_are_tied() -> None:
    for program in PROGRAMS:
        _check(_shard(_tied()), _tied, program)


@ranks(4)
def test_frozen_and_thawed_in_a_smaller_group() -> None:
    for program in PROGRAMS:
        _check(_shard(_build(), reshard_after_forward=2), _build, program)
