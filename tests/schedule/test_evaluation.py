"""Evaluation without gradients, before and between training steps.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.common.parity import (
    FP32,
    OURS,
    adamw,
    assert_close,
    my_part,
    regression_loss,
    same_as_torch,
    shard,
    train_sharded,
    train_unsharded,
)
from tests.common.running import (
    mlp,
    mlp_batches,
)
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_no_grad_evaluation_between_training_steps(reshard_after_forward: bool | None) -> None:
    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=reshard_after_forward)
        outputs = []

        def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
            with torch.no_grad():
                outputs.append(model(part[0]))
                outputs.append(model(part[0].flip(0)))
            assert not outputs[-1].requires_grad
            return regression_loss(model, part)

        return [train_sharded(model, adamw, loss, mlp_batches()), outputs]

    steps, outputs = same_as_torch(run)
    unsharded = train_unsharded(mlp(), adamw, regression_loss, mlp_batches())
    assert_close(steps, unsharded, FP32, "unsharded")
    assert_close(outputs[0], mlp()(my_part(mlp_batches()[0])[0]).detach(), FP32, "evaluation")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_inference_mode_then_training(reshard_after_forward: bool | None) -> None:
    """The very first gather happens in inference mode, and no inference tensor may survive it.

    The unsharded model is the judge: it trains after an evaluation like that.
    """
    model = shard(OURS, mlp(), reshard_after_forward=reshard_after_forward)
    optimizer = adamw(model.parameters())  # before an evaluation can leave whole parameters behind
    plain = mlp()
    for x, _ in mlp_batches()[:2]:
        with torch.inference_mode():
            assert_close(model(x).clone(), plain(x), FP32, "evaluation")
    steps = train_sharded(model, lambda _: optimizer, regression_loss, mlp_batches())
    unsharded = train_unsharded(plain, adamw, regression_loss, mlp_batches())
    assert_close(steps, unsharded, FP32, "training")
    with torch.inference_mode():
        assert_close(model(x).clone(), plain(x), FP32, "evaluation after training")
