"""Users' hooks on gradients that are reduced, an optimizer among them.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from tests.common import gradients, parity, running
from tests.common.cases import in_turn
from tests.common.errors import raises
from tests.common.workers import ranks


@ranks(2, extended=(4,))
def test_post_accumulate_grad_hooks() -> None:
    """Once per parameter and backward, when its reduced gradient is there; never without sync."""

    def run(api: Any) -> Any:
        model = parity.shard(api, running.mlp(), reshard_after_forward=True)
        fired: list[tuple[str, Tensor]] = []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda p, name=name: fired.append((name, p.grad.to_local().clone()))
            )
        results = []
        # A new gradient, one that is added to it, one that stays back and one that it goes with.
        for sync, zero in ((True, False), (True, True), (False, False), (True, True)):
            model.set_requires_gradient_sync(sync)
            parity.regression_loss(model, parity.my_part(running.one_batch())).backward()
            for name, local in fired:
                parity.assert_equal(model.get_parameter(name).grad.to_local(), local, name)
            results.append(sorted(fired, key=lambda pair: pair[0]))
            fired.clear()
            if zero:
                model.zero_grad()
        return results

    results = parity.same_as_torch(run)
    names = sorted(name for name, _ in running.mlp().named_parameters())
    assert [[name for name, _ in fired] for fired in results] == [names, names, [], names]


@ranks(2)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_hooks_from_before_sharding(mixed: bool) -> None:
    """Those on the gradient see what autograd made here, full; others what was reduced."""

    def doubled(model: nn.Module) -> None:
        for layer in model.layers:
            layer.weight.register_hook(lambda grad: grad * 2)

    def compute(model: nn.Module, rank: int | None = None) -> None:
        parity.regression_loss(
            parity.Bf16(model) if mixed and rank is not None else model, gradients.part(0, rank)
        ).backward()

    plain, model = running.mlp(), running.mlp()
    doubled(plain)
    doubled(model)
    seen: list[tuple[nn.Parameter, Any]] = []
    first: Any = model.layers[0].weight
    handle = first.register_post_accumulate_grad_hook(lambda p: seen.append((p, p.grad)))
    parity.shard(parity.OURS, model, mixed=mixed)
    compute(model)
    gradients.assert_like_unsharded(parity.full_grads(model), plain, compute)
    ((param, grad),) = seen
    assert param is model.layers[0].weight
    assert grad is param.grad
    handle.remove()
    model.zero_grad()
    compute(model)
    assert len(seen) == 1


# -- hooks on gradients, registered on sharded parameters -----------------------------------------


def _hooked(model: Any, hook: Callable[[Tensor], Any]) -> list[Any]:
    return [param.register_hook(hook) for param in model.parameters()]


def _twice(grad: Tensor) -> Tensor:
    return grad * 2


def _sum_over(model: Any, rank: int | None, times: int = 1) -> None:
    for step in range(times):
        parity.regression_loss(model, gradients.part(step, rank)).backward()


def _in_place(grad: Tensor) -> None:
    grad.mul_(2)


HOOKS: dict[str, list[Callable[[Tensor], Any]]] = {
    "twice": [_twice],
    "one after another": [lambda grad: grad + 1, _twice, lambda grad: None],
    "in place": [_in_place],
    "clamped": [lambda grad: grad.clamp(-0.01, 0.01)],
    "without nan": [lambda grad: torch.nan_to_num(grad) / (1 + grad.norm())],
}
WHEN = ("at once", "behind a step", "between", "removed", "removed and registered", "three times")
CASES = {
    **{f"{name}, at once": (name, "at once") for name in HOOKS},
    **{f"twice, {when}": ("twice", when) for when in WHEN[1:]},
}


@ranks(2)
@pytest.mark.parametrize("kept", [False, True])
def test_a_hook_on_a_sharded_gradient(kept: bool) -> None:
    """It sees the reduced gradient and may replace it; in torch's FSDP2 it never runs."""
    in_turn(CASES, lambda case: _check_hooks(*case, kept))


def _check_hooks(name: str, when: str, kept: bool) -> None:
    """Each backward's gradient goes through the hooks, as without sharding."""
    hooks, times = HOOKS[name], 3 if when == "three times" else 1
    model = parity.shard(parity.OURS, running.mlp())
    model.set_tuning(keep_gradients=kept)
    if when.startswith("removed"):
        for handle in _hooked(model, _twice):
            handle.remove()
    if when.startswith(("removed", "behind")):
        _sum_over(model, None)
        model.zero_grad()
    if when not in ("between", "removed"):
        for hook in hooks:
            _hooked(model, hook)
    expected = _averages(hooks if when != "removed" else [], times)
    for _ in range(2):
        model.zero_grad()
        if when == "between":
            loss = parity.regression_loss(model, gradients.part(0))
            handles = _hooked(model, _twice)
            loss.backward()
            for handle in handles:
                handle.remove()
        else:
            _sum_over(model, None, times)
        parity.assert_close(parity.full_grads(model), expected, parity.FP32)


def _averages(hooks: Sequence[Callable[[Tensor], Any]], times: int) -> dict[str, Tensor]:
    """Hooks see the average over ranks of each backward, as a reduction makes it."""
    total: dict[str, Tensor] = {}
    for step in range(times):
        average = gradients.unsharded_grads(
            running.mlp(),
            lambda model, rank, step=step: parity.regression_loss(
                model, gradients.part(step, rank)
            ).backward(),
        )
        for name, found in average.items():
            assert found is not None
            for hook in hooks:
                result = hook(found)
                found = found if result is None else result
            total[name] = total[name] + found if name in total else found
    return total


@ranks(2)
@pytest.mark.parametrize("which", ["replicas", "offloaded", "mixed", "int", "moved", "assigned"])
def test_a_hook_on_a_sharded_gradient_of_other_units(which: str) -> None:
    arguments: dict[str, Any] = {}
    if which == "replicas":
        arguments["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))
    elif which == "offloaded":
        arguments["offload_policy"] = fsdp2.CPUOffloadPolicy(pin_memory=False)
    elif which == "int":
        arguments["reshard_after_forward"] = 1
    model, other = (
        parity.shard(parity.OURS, running.mlp(), mixed=which == "mixed", **arguments)
        for _ in range(2)
    )
    if which == "moved":
        model.to(torch.float64).to(torch.float32)
    elif which == "assigned":
        model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=True)
    _hooked(model, _twice)
    for _ in range(2):
        for each in (model, other):
            each.zero_grad()
            _sum_over(each, None)
        doubled = {n: g * 2 for n, g in parity.full_grads(other).items() if g is not None}
        parity.assert_equal(parity.full_grads(model), doubled, which)


@ranks(4)
def test_a_hook_on_a_parameter_of_a_smaller_group() -> None:
    """Registered between forward and backward, where a third object stands for the parameter."""
    model = parity.shard(parity.OURS, running.mlp(), reshard_after_forward=2)
    other = parity.shard(parity.OURS, running.mlp(), reshard_after_forward=2)
    loss = parity.regression_loss(model, gradients.part(0))
    _hooked(model.layers[0], _twice)
    loss.backward()
    _sum_over(other, None)
    ours, expected = parity.full_grads(model), parity.full_grads(other)
    for name, grad in expected.items():
        factor = 2 if name.startswith("layers.0") else 1
        assert torch.equal(ours[name], grad * factor), name  # type: ignore[operator,arg-type]  # no None


@ranks(2)
@pytest.mark.parametrize("result", [1.0, torch.zeros(2), "half"])
def test_a_hook_that_returns_no_gradient(result: Any) -> None:
    model = parity.shard(parity.OURS, running.mlp())
    _hooked(model, lambda grad: grad.half() if result == "half" else result)
    with raises("gradient-hook-result"):
        _sum_over(model, None)
