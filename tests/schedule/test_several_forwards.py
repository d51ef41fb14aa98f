"""Units that run several times, and forwards and backwards in any number.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from tests.common.backends import packs
from tests.common.models import (
    DIM,
    Repeated,
    seeded,
)
from tests.common.parity import (
    FP32,
    OURS,
    CountCollectives,
    assert_close,
    check_training,
    full_grads,
    my_part,
    regression_batches,
    regression_loss,
    same_as_torch,
    shard,
)
from tests.common.running import (
    STEPS,
    fsdp_modules,
    mlp,
    mlp_batches,
    one_batch,
    unsharded_grads,
)
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_unit_called_several_times_in_a_forward(reshard_after_forward: bool | None) -> None:
    build = partial(seeded, Repeated)
    batches = regression_batches(DIM, 2, steps=STEPS)
    check_training(build, batches, reshard_after_forward=reshard_after_forward)


@ranks(2)
def test_unit_called_several_times_mixed() -> None:
    batches = regression_batches(DIM, 2, steps=STEPS)
    check_training(partial(seeded, Repeated), batches, mixed=True, reshard_after_forward=True)


@packs
@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_two_forwards_before_one_backward(reshard_after_forward: bool | None) -> None:
    """Each group is reduced once, when both contributions are there."""

    def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        x, y = part
        return (model(x) * model(x.flip(1)) - y).square().mean()

    arguments = {"reshard_after_forward": reshard_after_forward}
    check_training(mlp, mlp_batches(), loss=loss, **arguments)
    model = shard(OURS, mlp(), **arguments)
    value = loss(model, my_part(one_batch()))
    with CountCollectives() as backward:
        value.backward()
    assert backward.reduce_scatters == len(fsdp_modules(model)) == 4


@ranks(2)
def test_two_backwards_after_two_forwards() -> None:
    """The first backward frees parameters that the second needs again; gradients add up."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=True)
        x, y = my_part(one_batch())
        first, second = model(x), model(x.flip(1))
        (first - y).square().mean().backward()
        (second + y).square().mean().backward()
        return full_grads(model)

    ours = same_as_torch(run)

    def compute(plain: nn.Module, rank: int) -> None:
        x, y = my_part(one_batch(), rank)
        (plain(x) - y).square().mean().backward()
        (plain(x.flip(1)) + y).square().mean().backward()

    assert_close(ours, unsharded_grads(mlp(), compute), FP32, "unsharded")


@ranks(2)
def test_backward_twice_through_one_forward() -> None:
    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=True)
        loss = regression_loss(model, my_part(one_batch()))
        loss.backward(retain_graph=True)
        loss.backward()
        return full_grads(model)

    ours = same_as_torch(run)
    once = unsharded_grads(
        mlp(), lambda m, rank: regression_loss(m, my_part(one_batch(), rank)).backward()
    )
    doubled = {name: None if grad is None else 2 * grad for name, grad in once.items()}
    assert_close(ours, doubled, FP32, "unsharded")
