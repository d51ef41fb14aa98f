"""What gets a gradient: frozen parameters, and units that no loss uses.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from tests.common import models, parity, running
from tests.common.combinations import each_once
from tests.common.workers import ranks


@ranks(2)
@each_once(
    frozen={
        "one": ("layers.1.weight",),
        "one-of-each": ("layers.0.weight", "layers.1.bias", "head.bias"),
        "first-unit": ("layers.0.weight", "layers.0.bias"),
        "middle-unit": ("layers.1.weight", "layers.1.bias"),
        "most": (
            "layers.0.weight",
            "layers.0.bias",
            "layers.1.weight",
            "layers.1.bias",
            "head.weight",
        ),
    },
    reshard_after_forward=[True, False],
)
def test_frozen_parameters(frozen: tuple[str, ...], reshard_after_forward: bool) -> None:
    def build() -> nn.Module:
        model = running.mlp()
        for name, param in model.named_parameters():
            param.requires_grad_(name not in frozen)
        return model

    batches = running.mlp_batches()[:2]
    steps = parity.check_training(build, batches, reshard_after_forward=reshard_after_forward)
    assert {name for name, grad in steps[-1].grads.items() if grad is None} == set(frozen)
    before = parity.full_params(build())
    for name in frozen:
        parity.assert_equal(steps[-1].params[name], before[name], name)


@ranks(2)
def test_frozen_parameters_are_not_reduced() -> None:
    """What is frozen adds nothing to the bytes of a reduction."""

    def reduced(*frozen: str) -> int:
        model = running.mlp()
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        parity.shard(parity.OURS, model)
        with parity.CountCollectives() as counted:
            parity.regression_loss(model, parity.my_part(running.one_batch())).backward()
        return counted.elements["reduce_scatter"]

    weight = (
        models.DIM * models.DIM + models.DIM * models.DIM // 2
    )  # the input of the collective and a rank's half of it
    assert reduced() - reduced("layers.0.weight") == weight
    assert reduced() - reduced("layers.0.weight", "layers.2.weight") == 2 * weight


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_unused_units_and_parameters(reshard_after_forward: bool) -> None:
    """Another choice of units runs in every step; what did not run has no gradient."""
    choices = [("a", "c"), ("b",), ("c", "a"), ("a", "b", "c"), ()]

    def loss(choosing: Any, model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        model.active = next(choosing)
        return parity.regression_loss(model, part)

    def train(api: Any) -> Any:
        model = parity.shard(
            api, models.seeded(models.Choosy), reshard_after_forward=reshard_after_forward
        )
        return parity.train_sharded(model, parity.adamw, partial(loss, iter(choices)), batches)

    batches = parity.regression_batches(models.DIM, 2, steps=len(choices))
    ours = parity.same_as_torch(train)
    plain = parity.train_unsharded(
        models.seeded(models.Choosy), parity.adamw, partial(loss, iter(choices)), batches
    )
    parity.assert_close(ours, plain, parity.FP32, "unsharded")
    for active, step in zip(choices, ours, strict=True):
        without = {name for name, grad in step.grads.items() if grad is None}
        expected = {
            f"choices.{c}.{p}" for c in "abc" if c not in active for p in ("weight", "bias")
        }
        assert without == expected | {"spare.weight", "spare.bias"}
