"""Gradient accumulation, and what gradients are divided by.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.common import parity, running
from tests.common.backends import packs
from tests.common.combinations import each_once
from tests.common.workers import ranks

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
        model = parity.shard(
            api, running.mlp(), mixed=mixed, reshard_after_forward=reshard_after_forward
        )
        results = []
        for batches in (running.mlp_batches(), running.mlp_batches()[::-1]):
            for i, batch in enumerate(batches[:MICROBATCHES]):
                last = i == MICROBATCHES - 1
                model.set_requires_gradient_sync(sync_every or last)
                loss = parity.regression_loss(model, parity.my_part(batch))
                with parity.CountCollectives() as backward:
                    loss.backward()
                assert backward.reduce_scatters == (4 if sync_every or last else 0)
            results.append(parity.full_grads(model))
            model.zero_grad()
        return results

    ours = parity.same_as_torch(run, mixed=mixed)

    def compute(plain: nn.Module, rank: int) -> None:
        for batch in running.mlp_batches()[:MICROBATCHES]:
            used = parity.Bf16(plain) if mixed else plain
            parity.regression_loss(used, parity.my_part(batch, rank)).backward()

    # Only the order of the sum differs. A sum taken in bf16 would be off by 2**-9 of a gradient.
    parity.assert_close(
        ours[0], running.unsharded_grads(running.mlp(), compute), parity.REORDERED_FP32, "unsharded"
    )


@ranks(2)
def test_gradient_sync_of_one_unit_only() -> None:
    """`recurse=False` holds back the unit it is called on, and its children reduce."""

    def run(api: Any) -> Any:
        model = parity.shard(api, running.mlp(), reshard_after_forward=True)
        model.set_requires_gradient_sync(False, recurse=False)
        parity.regression_loss(model, parity.my_part(running.one_batch())).backward()
        first = parity.full_grads(model)
        model.set_requires_gradient_sync(True)
        parity.regression_loss(model, parity.my_part(running.one_batch())).backward()
        return [first, parity.full_grads(model)]

    first, second = parity.same_as_torch(run)
    assert {name for name, grad in first.items() if grad is None} == {"head.weight", "head.bias"}
    plain = running.mlp()
    parity.regression_loss(plain, running.one_batch()).backward()
    doubled = {name: 2 * param.grad for name, param in plain.named_parameters()}
    parity.assert_close(second, doubled, parity.FP32, "unsharded")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_set_reshard_after_backward(mixed: bool, sync: bool) -> None:
    """Parameters stay whole between microbatches: the next forward and backward gather nothing.

    But for the first time, when ours has taken no fingerprints yet.
    """
    steps = [(step, i) for step in range(2) for i in range(MICROBATCHES)]

    def run(api: Any) -> Any:
        model = parity.shard(api, running.mlp(), mixed=mixed)
        batches = running.mlp_batches()
        results = []
        for step, i in steps:
            batch = batches[i]
            last = i == MICROBATCHES - 1
            model.set_requires_gradient_sync(sync or last)
            model.set_reshard_after_backward(last)
            model.set_reshard_after_forward(False)
            with parity.CountCollectives() as forward:
                loss = parity.regression_loss(model, parity.my_part(batch))
            with parity.CountCollectives() as backward:
                loss.backward()
            shown = api is parity.OURS and sync  # with the gradients
            assert [running.is_sharded(module) for module in running.fsdp_modules(model)] == [
                last or shown
            ] * 4
            first = api is parity.OURS and (step, i) == (0, 1)
            assert (forward.all_gathers > 0) == (i == 0 or first)
            assert backward.all_gathers == 0
            results.append(loss.detach())
            if sync and not last:
                # The gradients lie on the shards, which torch does not register now.
                assert all((param.grad is not None) is shown for param in model.parameters())
        return [results, parity.full_grads(model)]

    parity.same_as_torch(run, mixed=mixed)


@ranks(2, extended=(4,))
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
@pytest.mark.parametrize("factor", [1.0, 3.0, "world size"])
def test_set_gradient_divide_factor(factor: float | str, mixed: bool) -> None:
    """The sum over ranks, divided by the factor. torch's FSDP2 knows gloo only the world size."""

    def run(api: Any) -> Any:
        model = parity.shard(api, running.mlp(), mixed=mixed)
        for module in running.fsdp_modules(model):
            module.set_gradient_divide_factor(divide)
        parity.regression_loss(model, parity.my_part(running.one_batch())).backward()
        return parity.full_grads(model)

    divide = float(dist.get_world_size()) if isinstance(factor, str) else factor
    ours = parity.same_as_torch(run, mixed=mixed) if isinstance(factor, str) else run(parity.OURS)

    def compute(plain: nn.Module, rank: int) -> None:
        part = parity.my_part(running.one_batch(), rank)
        parity.regression_loss(parity.Bf16(plain) if mixed else plain, part).backward()

    mean = running.unsharded_grads(running.mlp(), compute)
    scale = dist.get_world_size() / divide
    expected = {name: None if grad is None else grad * scale for name, grad in mean.items()}
    parity.assert_close(ours, expected, parity.REORDERED_FP32, "sum / factor")


@ranks(2)
def test_gradient_divide_factor_is_not_recursive() -> None:
    model = parity.shard(parity.OURS, running.mlp())
    model.set_gradient_divide_factor(1.0)
    parity.regression_loss(model, parity.my_part(running.one_batch())).backward()
    plain = running.mlp()
    parity.regression_loss(plain, running.one_batch()).backward()
    expected = {
        name: param.grad * (2 if name.startswith("head") else 1)
        for name, param in plain.named_parameters()
    }
    parity.assert_close(
        parity.full_grads(model), expected, parity.FP32, "the root sums, its children average"
    )
