"""Users' hooks on gradients that are reduced, an optimizer among them.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.common.gradients import assert_like_unsharded, part
from tests.common.parity import (
    OURS,
    Bf16,
    assert_equal,
    full_grads,
    full_params,
    my_part,
    regression_loss,
    same_as_torch,
    shard,
    train_unsharded,
)
from tests.common.running import (
    mlp,
    mlp_batches,
    one_batch,
)
from tests.common.workers import ranks


@ranks(2, extended=(4,))
def test_post_accumulate_grad_hooks() -> None:
    """Once per parameter and backward, when its reduced gradient is there; never without sync."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=True)
        fired: list[tuple[str, Tensor]] = []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda p, name=name: fired.append((name, p.grad.to_local().clone()))
            )
        results = []
        # A new gradient, one that is added to it, one that stays back and one that it goes with.
        for sync, zero in ((True, False), (True, True), (False, False), (True, True)):
            model.set_requires_gradient_sync(sync)
            regression_loss(model, my_part(one_batch())).backward()
            for name, local in fired:
                assert_equal(model.get_parameter(name).grad.to_local(), local, name)
            results.append(sorted(fired, key=lambda pair: pair[0]))
            fired.clear()
            if zero:
                model.zero_grad()
        return results

    results = same_as_torch(run)
    names = sorted(name for name, _ in mlp().named_parameters())
    assert [[name for name, _ in fired] for fired in results] == [names, names, [], names]


@ranks(2)
def test_optimizer_in_backward() -> None:
    """A post-accumulate-grad hook that steps and frees the gradient at once."""
    model, plain = shard(OURS, mlp()), mlp()
    optimizers = {}
    for param in model.parameters():
        optimizers[param] = torch.optim.SGD([param], lr=0.1)

        def step(param: nn.Parameter) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        param.register_post_accumulate_grad_hook(step)
    for batch in mlp_batches():
        regression_loss(model, my_part(batch)).backward()
        assert all(param.grad is None for param in model.parameters())
    sgd = partial(torch.optim.SGD, lr=0.1)
    expected = train_unsharded(plain, sgd, regression_loss, mlp_batches(), slices=True)
    assert_equal(full_params(model), expected[-1].params, "unsharded")


@ranks(2)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_hooks_from_before_sharding(mixed: bool) -> None:
    """Those on the gradient see what autograd made here, full; others what was reduced."""

    def doubled(model: nn.Module) -> None:
        for layer in model.layers:
            layer.weight.register_hook(lambda grad: grad * 2)

    def compute(model: nn.Module, rank: int | None = None) -> None:
        regression_loss(
            Bf16(model) if mixed and rank is not None else model, part(0, rank)
        ).backward()

    plain, model = mlp(), mlp()
    doubled(plain)
    doubled(model)
    seen: list[tuple[nn.Parameter, Any]] = []
    first: Any = model.layers[0].weight
    handle = first.register_post_accumulate_grad_hook(lambda p: seen.append((p, p.grad)))
    shard(OURS, model, mixed=mixed)
    compute(model)
    assert_like_unsharded(full_grads(model), plain, compute)
    ((param, grad),) = seen
    assert param is model.layers[0].weight
    assert grad is param.grad
    handle.remove()
    model.zero_grad()
    compute(model)
    assert len(seen) == 1
