"""Training that goes on after an exception.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.common import parity, running
from tests.common.combinations import each_once
from tests.common.models import (
    DIM,
)
from tests.common.workers import ranks


class _BoomError(Exception):
    """What the tests below throw."""


@ranks(2)
@each_once(phase=["forward", "backward"], unit=[0, 2], reshard_after_forward=[None, True, False])
def test_recovery_from_an_exception(
    phase: str, unit: int, reshard_after_forward: bool | None
) -> None:
    """After reset_iter_state() the next iteration is that of a fresh model.

    torch's FSDP2 adds the gradients that a failed backward left on whole parameters.
    """

    def boom(*_: Any) -> None:
        if armed:
            raise _BoomError

    model = parity.shard(parity.OURS, running.mlp(), reshard_after_forward=reshard_after_forward)
    if phase == "forward":
        model.layers[unit].register_forward_pre_hook(boom)
    else:
        model.layers[unit].register_forward_hook(
            lambda _, __, output: output.register_hook(boom) and None
        )
    fresh = parity.shard(parity.OURS, running.mlp(), reshard_after_forward=reshard_after_forward)
    for batch in running.mlp_batches()[:2]:
        armed = True
        with pytest.raises(_BoomError):
            parity.regression_loss(model, parity.my_part(batch)).backward()
        armed = False
        model.reset_iter_state()
        assert [running.is_sharded(module) for module in running.fsdp_modules(model)] == [True] * 4
        model.zero_grad()
        results = []
        for recovered in (model, fresh):
            with parity.CountCollectives() as counted:
                loss = parity.regression_loss(recovered, parity.my_part(batch))
                loss.backward()
            results.append([loss.detach(), parity.full_grads(recovered), counted.counts])
            recovered.zero_grad()
        parity.assert_equal(results[0], results[1], "a fresh model's iteration")


@ranks(2)
def test_reset_iter_state_is_for_the_root() -> None:
    model = parity.shard(parity.OURS, running.mlp())
    model(torch.randn(2, DIM)).sum().backward()
    with pytest.raises((RuntimeError, ValueError), match="root"):
        model.layers[0].reset_iter_state()
    grads = parity.full_grads(model)
    model.reset_iter_state()
    parity.assert_equal(parity.full_grads(model), grads, "gradients that were complete")
