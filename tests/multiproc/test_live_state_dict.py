"""State dicts taken and loaded in the middle of training.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from tests.common.models import (
    MLP,
    seeded,
)
from tests.common.parity import (
    FP32,
    OURS,
    adamw,
    assert_close,
    assert_equal,
    full,
    full_grads,
    full_params,
    my_part,
    regression_loss,
    same_as_torch,
    shard,
    train_sharded,
    train_unsharded,
)
from tests.common.running import (
    is_sharded,
    mlp,
    mlp_batches,
    one_batch,
)
from tests.common.workers import ranks


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_state_dict_while_parameters_are_whole(reshard_after_forward: bool | None) -> None:
    """state_dict() has the shards at any time; taking it in the middle of a step does no harm."""

    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=reshard_after_forward)
        loss = regression_loss(model, my_part(one_batch()))
        assert not is_sharded(model)
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        loss.backward()
        return [{name: full(value) for name, value in state.items()}, full_grads(model)]

    state, grads = same_as_torch(run)
    plain = mlp()
    regression_loss(plain, one_batch()).backward()
    assert_equal(state, dict(plain.state_dict()), "state dict")
    assert_close(grads, full_grads(plain), FP32, "unsharded")


@ranks(2)
def test_state_dict_stays_live() -> None:
    """Its tensors share storage with the parameters, so they follow the training."""
    model = shard(OURS, mlp())
    state = model.state_dict()
    steps = train_sharded(model, adamw, regression_loss, mlp_batches())
    assert_equal({name: full(value) for name, value in state.items()}, steps[-1].params, "live")


@ranks(2)
def test_load_state_dict_between_steps() -> None:
    """Shards go in, by value and by assignment; the next forward computes with them."""
    source, plain = shard(OURS, seeded(MLP, seed=7)), seeded(MLP, seed=7)
    for assign in (False, True):
        model = shard(OURS, mlp())
        regression_loss(model, my_part(one_batch())).backward()
        model.zero_grad()
        state = {name: value.clone() for name, value in source.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        steps = train_sharded(model, adamw, regression_loss, mlp_batches())
        expected = train_unsharded(
            seeded(MLP, seed=7), adamw, regression_loss, mlp_batches(), slices=True
        )
        assert_equal(steps, expected, f"assign={assign}")
    assert_equal(full_params(source), full_params(plain), "the source")
