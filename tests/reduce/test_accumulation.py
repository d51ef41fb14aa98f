"""Gradient accumulation, and what gradients are divided by.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.common.backends import packs
from tests.common.combinations import each_once
from tests.common.parity import (
    FP32,
    OURS,
    REORDERED_FP32,
    Bf16,
    CountCollectives,
    assert_close,
    assert_equal,
    full_grads,
    my_part,
    regression_loss,
    same_as_torch,
    shard,
)
from tests.common.running import (
    fsdp_modules,
    is_sharded,
    mlp,
    mlp_batches,
    one_batch,
    unsharded_grads,
)
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks

MICROBATCHES = 3


@packs
@ranks(2, extended=(4,))
@each_once(
    sync_every={"sync-last": False, "sync-every": True},
    mixed={"fp32": False, "mixed": True},
    reshard_after_forward=[None, False],
)
def test_gradient_accumulation(
    sync_every: bool, mixed: bool, reshard_after_forward: bool | None
) -> None:
    """Without sync, gradients add up on each rank, in the reduce dtype, and nothing is reduced."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), mixed=mixed, reshard_after_forward=reshard_after_forward)
        results = []
        for batches in (mlp_batches(), mlp_batches()[::-1]):
            for i, batch in enumerate(batches[:MICROBATCHES]):
                last = i == MICROBATCHES - 1
                model.set_requires_gradient_sync(sync_every or last)
                loss = regression_loss(model, my_part(batch))
                with CountCollectives() as backward:
                    loss.backward()
                assert backward.reduce_scatters == (4 if sync_every or last else 0)
            results.append(full_grads(model))
            model.zero_grad()
        return results

    ours = same_as_torch(run, mixed=mixed)

    def compute(plain: nn.Module, rank: int) -> None:
        for batch in mlp_batches()[:MICROBATCHES]:
            used = Bf16(plain) if mixed else plain
            regression_loss(used, my_part(batch, rank)).backward()

    # Only the order of the sum differs. A sum taken in bf16 would be off by 2**-9 of a gradient.
    assert_close(ours[0], unsharded_grads(mlp(), compute), REORDERED_FP32, "unsharded")


@ranks(2)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_zero_grad_clears_what_was_not_reduced_yet(mixed: bool) -> None:
    """With torch's FSDP2, gradients of before zero_grad() appear at the next sync."""
    model, fresh = shard(OURS, mlp(), mixed=mixed), shard(OURS, mlp(), mixed=mixed)
    first, second = mlp_batches()[:2]
    model.set_requires_gradient_sync(False)
    regression_loss(model, my_part(first)).backward()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    for trained in (model, fresh):
        regression_loss(trained, my_part(second)).backward()
    assert_equal(full_grads(model), full_grads(fresh), "the second batch alone")


@ranks(2)
def test_gradient_sync_of_one_unit_only() -> None:
    """`recurse=False` holds back the unit it is called on, and its children reduce."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=True)
        model.set_requires_gradient_sync(False, recurse=False)
        regression_loss(model, my_part(one_batch())).backward()
        first = full_grads(model)
        model.set_requires_gradient_sync(True)
        regression_loss(model, my_part(one_batch())).backward()
        return [first, full_grads(model)]

    first, second = same_as_torch(run)
    assert {name for name, grad in first.items() if grad is None} == {"head.weight", "head.bias"}
    plain = mlp()
    regression_loss(plain, one_batch()).backward()
    doubled = {name: 2 * param.grad for name, param in plain.named_parameters()}
    assert_close(second, doubled, FP32, "unsharded")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_set_reshard_after_backward(mixed: bool, sync: bool) -> None:
    """Parameters stay whole between microbatches: the next forward and backward gather nothing."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), mixed=mixed)
        results = []
        for i, batch in enumerate(mlp_batches()[:MICROBATCHES]):
            last = i == MICROBATCHES - 1
            model.set_requires_gradient_sync(sync or last)
            model.set_reshard_after_backward(last)
            model.set_reshard_after_forward(False)
            with CountCollectives() as forward:
                loss = regression_loss(model, my_part(batch))
            with CountCollectives() as backward:
                loss.backward()
            assert [is_sharded(module) for module in fsdp_modules(model)] == [last] * 4
            assert (forward.all_gathers > 0) == (i == 0)
            assert backward.all_gathers == 0
            results.append(loss.detach())
            if sync and not last:
                # The gradients lie on the shards, which are not what the module registers now.
                assert all(param.grad is None for param in model.parameters())
        return [results, full_grads(model)]

    same_as_torch(run, mixed=mixed)


@ranks(2)
def test_gradients_on_shards_while_parameters_are_whole() -> None:
    model = shard(OURS, mlp())
    shards = dict(model.named_parameters())
    model.set_reshard_after_backward(False)
    regression_loss(model, my_part(one_batch())).backward()
    for name, param in model.named_parameters():
        assert param is not shards[name]
        assert param.grad is None, name
        assert isinstance(shards[name].grad, DTensor), name
    for module in fsdp_modules(model):
        module.reshard()
    for name, param in model.named_parameters():
        assert param is shards[name]
    plain = mlp()
    regression_loss(plain, one_batch()).backward()
    assert_close(full_grads(model), full_grads(plain), FP32, "unsharded")


@ranks(2)
@pytest.mark.parametrize("sync_every", [False, True])
def test_set_is_last_backward(sync_every: bool) -> None:
    def run(api: Any) -> Any:
        model = shard(api, mlp())
        results = []
        for _ in range(2):
            for i, batch in enumerate(mlp_batches()[:MICROBATCHES]):
                last = i == MICROBATCHES - 1
                model.set_is_last_backward(last)
                model.set_requires_gradient_sync(sync_every or last)
                regression_loss(model, my_part(batch)).backward()
            results.append(full_grads(model))
            model.zero_grad()
        return results

    first, second = same_as_torch(run)
    assert_equal(first, second, "the second round, with what the first one left behind")

    def compute(plain: nn.Module, rank: int) -> None:
        for batch in mlp_batches()[:MICROBATCHES]:
            regression_loss(plain, my_part(batch, rank)).backward()

    assert_close(first, unsharded_grads(mlp(), compute), FP32, "unsharded")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
@pytest.mark.parametrize("factor", [1.0, 3.0, "world size"])
def test_set_gradient_divide_factor(factor: float | str, mixed: bool) -> None:
    """The sum over ranks, divided by the factor. torch's FSDP2 knows gloo only the world size."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), mixed=mixed)
        for module in fsdp_modules(model):
            module.set_gradient_divide_factor(divide)
        regression_loss(model, my_part(one_batch())).backward()
        return full_grads(model)

    divide = float(dist.get_world_size()) if isinstance(factor, str) else factor
    ours = same_as_torch(run, mixed=mixed) if isinstance(factor, str) else run(OURS)

    def compute(plain: nn.Module, rank: int) -> None:
        part = my_part(one_batch(), rank)
        regression_loss(Bf16(plain) if mixed else plain, part).backward()

    mean = unsharded_grads(mlp(), compute)
    scale = dist.get_world_size() / divide
    expected = {name: None if grad is None else grad * scale for name, grad in mean.items()}
    assert_close(ours, expected, REORDERED_FP32, "sum / factor")


@ranks(2)
def test_gradient_divide_factor_is_not_recursive() -> None:
    model = shard(OURS, mlp())
    model.set_gradient_divide_factor(1.0)
    regression_loss(model, my_part(one_batch())).backward()
    plain = mlp()
    regression_loss(plain, one_batch()).backward()
    expected = {
        name: param.grad * (2 if name.startswith("head") else 1)
        for name, param in plain.named_parameters()
    }
    assert_close(full_grads(model), expected, FP32, "the root sums, its children average")
