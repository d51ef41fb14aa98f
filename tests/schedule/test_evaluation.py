"""Evaluation without gradients, before and between training steps.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

import pytest
import torch

from tests.common import parity, running
from tests.common.workers import ranks


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_inference_mode_then_training(reshard_after_forward: bool | None) -> None:
    """The very first gather happens in inference mode, and no inference tensor may survive it.

    The unsharded model is the judge: it trains after an evaluation like that.
    """
    model = parity.shard(parity.OURS, running.mlp(), reshard_after_forward=reshard_after_forward)
    optimizer = parity.adamw(
        model.parameters()
    )  # before an evaluation can leave whole parameters behind
    plain = running.mlp()
    for x, _ in running.mlp_batches()[:2]:
        with torch.inference_mode():
            parity.assert_close(model(x).clone(), plain(x), parity.FP32, "evaluation")
    steps = parity.train_sharded(
        model, lambda _: optimizer, parity.regression_loss, running.mlp_batches()
    )
    unsharded = parity.train_unsharded(
        plain, parity.adamw, parity.regression_loss, running.mlp_batches()
    )
    parity.assert_close(steps, unsharded, parity.FP32, "training")
    with torch.inference_mode():
        parity.assert_close(model(x).clone(), plain(x), parity.FP32, "evaluation after training")
