"""`set_tuning(keep_gradients=True)`: the same bits as without it, in memory that stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2 import CPUOffloadPolicy
from tests.common import combinations, gradients, meshes, parity
from tests.common.workers import ranks

STEPS = 4

Loop = Callable[[nn.Module], Any]

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "mixed": {"mixed": True},
    "gathered until backward": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
}


def _usual(model: nn.Module) -> Any:
    return parity.train_sharded(
        model, parity.adamw, parity.regression_loss, gradients.mlp_batches(steps=STEPS)
    )


def _by_hand(
    model: nn.Module, every: int = 1, set_to_none: bool = True, freezes: bool = False
) -> Any:
    """A step ``every`` so many backwards; a weight that takes gradients in every second one."""
    optimizer, seen = parity.adamw(model.parameters()), []
    for i, batch in enumerate(gradients.mlp_batches(steps=STEPS)):
        model.get_parameter("layers.1.weight").requires_grad_(not freezes or i % 2 == 0)
        parity.regression_loss(model, parity.my_part(batch)).backward()
        seen.append(parity.full_grads(model))
        if (i + 1) % every == 0:
            optimizer.step()
            model.zero_grad(set_to_none)
    return seen, parity.full_params(model)


def _in_backward(model: nn.Module) -> Any:
    """Each parameter is stepped, and its gradient dropped, by a hook."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for batch in gradients.mlp_batches(steps=STEPS):
        parity.regression_loss(model, parity.my_part(batch)).backward()
    return parity.full_params(model)


def _flat_optimizer(model: nn.Module) -> Any:
    optimizer = fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, lr=0.01)
    for batch in gradients.mlp_batches(steps=STEPS):
        parity.regression_loss(model, parity.my_part(batch)).backward()
        fsdp2.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return parity.full_params(model)


LOOPS: dict[str, Loop] = {
    "usual": _usual,
    "accumulating": partial(_by_hand, every=2),
    "zeroing": partial(_by_hand, set_to_none=False),
    "freezing": partial(_by_hand, freezes=True),
    "in backward": _in_backward,
    "flat optimizer": _flat_optimizer,
}


def _trained(
    run: Loop, keep: bool, make: Callable[[], nn.Module] = gradients.mlp, **arguments: Any
) -> Any:
    model: Any = parity.shard(parity.OURS, make(), **arguments)
    model.set_tuning(keep_gradients=keep)
    return run(model)


@combinations.each_once(loop=[*LOOPS], case=[*CASES])
@ranks(2)
def test_results_are_the_same(loop: str, case: str) -> None:
    run = LOOPS[loop]
    parity.assert_equal(_trained(run, True, **CASES[case]), _trained(run, False, **CASES[case]))


@pytest.mark.parametrize("loop", combinations.often([*LOOPS]))
@ranks(4)
def test_results_are_the_same_with_copies(loop: str) -> None:
    run, mesh = LOOPS[loop], meshes.hsdp_mesh(2, 2)
    parity.assert_equal(_trained(run, True, mesh=mesh), _trained(run, False, mesh=mesh))


@ranks(4)
def test_partial_sums_and_kept_gradients() -> None:
    mesh = meshes.hsdp_mesh(2, 2)

    def run(model: Any) -> Any:
        seen = []
        for i, batch in enumerate(gradients.mlp_batches(steps=STEPS)):
            model.set_requires_all_reduce(i % 2 == 1)
            parity.regression_loss(model, parity.my_part(batch)).backward()
            if i % 2:
                seen.append(parity.full_grads(model))
                model.zero_grad()
        return seen

    parity.assert_equal(_trained(run, True, mesh=mesh), _trained(run, False, mesh=mesh))


@ranks(2)
def test_the_same_objects_until_it_is_switched_off() -> None:
    model: Any = parity.shard(parity.OURS, gradients.mlp())
    model.set_tuning(keep_gradients=True)
    found = []
    for batch in gradients.mlp_batches(steps=STEPS):
        parity.regression_loss(model, parity.my_part(batch)).backward()
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()
        assert all(param.grad is None for param in model.parameters())
    assert all(now is first for later in found for now, first in zip(later, found[0], strict=True))
    first = weakref.ref(found[0][0])
    found.clear()
    gc.collect()
    assert first() is not None
    model.set_tuning(keep_gradients=False)
    gc.collect()
    assert first() is None
    objects = []
    for batch in gradients.mlp_batches(steps=2):
        parity.regression_loss(model, parity.my_part(batch)).backward()
        objects.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert all(now is not then for now, then in zip(*objects, strict=True))


@ranks(2)
def test_after_an_exception_in_a_hook() -> None:
    model: Any = parity.shard(parity.OURS, gradients.mlp())
    model.set_tuning(keep_gradients=True)
    (batch,) = gradients.mlp_batches(steps=1)
    parity.regression_loss(model, parity.my_part(batch)).backward()
    wanted = parity.full_grads(model)
    before = [param.grad for param in model.parameters()]
    model.zero_grad()

    def fail(param: Tensor) -> None:
        raise KeyError("hook")

    handle = model.layers[1].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyError):
        parity.regression_loss(model, parity.my_part(batch)).backward()
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    parity.regression_loss(model, parity.my_part(batch)).backward()
    parity.assert_equal(parity.full_grads(model), wanted)
    after = [param.grad for param in model.parameters()]
    assert all(now is then for now, then in zip(after, before, strict=True))
