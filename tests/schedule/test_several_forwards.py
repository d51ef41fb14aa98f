"""Units that run several times, and forwards and backwards in any number.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from tests.common import models, parity, running
from tests.common.backends import packs
from tests.common.workers import ranks


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_unit_called_several_times_in_a_forward(reshard_after_forward: bool | None) -> None:
    build = partial(models.seeded, models.Repeated)
    batches = parity.regression_batches(models.DIM, 2, steps=running.STEPS)
    parity.check_training(build, batches, reshard_after_forward=reshard_after_forward)


@packs
@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_two_forwards_before_one_backward(reshard_after_forward: bool | None) -> None:
    """Each group is reduced once, when both contributions are there."""

    def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        x, y = part
        return (model(x) * model(x.flip(1)) - y).square().mean()

    arguments = {"reshard_after_forward": reshard_after_forward}
    parity.check_training(running.mlp, running.mlp_batches(), loss=loss, **arguments)
    model = parity.shard(parity.OURS, running.mlp(), **arguments)
    value = loss(model, parity.my_part(running.one_batch()))
    with parity.CountCollectives() as backward:
        value.backward()
    assert backward.reduce_scatters == len(running.fsdp_modules(model)) == 4


@ranks(2)
def test_backward_twice_through_one_forward() -> None:
    def run(api: Any) -> Any:
        model = parity.shard(api, running.mlp(), reshard_after_forward=True)
        loss = parity.regression_loss(model, parity.my_part(running.one_batch()))
        loss.backward(retain_graph=True)
        loss.backward()
        return parity.full_grads(model)

    ours = parity.same_as_torch(run)
    once = running.unsharded_grads(
        running.mlp(),
        lambda m, rank: parity.regression_loss(
            m, parity.my_part(running.one_batch(), rank)
        ).backward(),
    )
    doubled = {name: None if grad is None else 2 * grad for name, grad in once.items()}
    parity.assert_close(ours, doubled, parity.FP32, "unsharded")
