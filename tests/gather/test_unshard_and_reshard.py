"""Whether parameters are whole: after forward, and where a user gathers or frees them.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import UnshardHandle
from tests.common import models, parity, running
from tests.common.combinations import each_once
from tests.common.workers import ranks


@ranks(2, extended=(4,))
@pytest.mark.parametrize(
    ("argument", "children", "root"),
    [
        (None, True, False),
        (True, True, True),
        (False, False, False),
        ("world size", True, True),
        (1, False, False),
    ],
)
def test_registered_parameters_after_forward(
    argument: bool | int | str | None, children: bool, root: bool
) -> None:
    """Shards where the forward reshards, whole parameters where it does not.

    Shards after a forward under no_grad: they may be written next. An int is the size of the group
    that keeps the parameters: all ranks, or each for itself.
    """
    if argument == "world size":
        argument = dist.get_world_size()
    model = parity.shard(parity.OURS, running.mlp(), reshard_after_forward=argument)
    x = torch.randn(2, models.DIM)
    for _ in range(2):
        for module in running.fsdp_modules(model):
            module.reshard()
        loss = model(x).sum()
        assert [running.is_sharded(m) for m in running.fsdp_modules(model)] == [root] + [
            children
        ] * 3
        loss.backward()
        assert [running.is_sharded(m) for m in running.fsdp_modules(model)] == [True] * 4
        with torch.no_grad():
            model(x)
            assert [running.is_sharded(m) for m in running.fsdp_modules(model)] == [True] * 4
            model.zero_grad()
            model(x)
        assert [running.is_sharded(m) for m in running.fsdp_modules(model)] == [True] * 4
    model(x)
    whole = model.head.weight
    assert isinstance(whole, nn.Parameter)
    assert whole.requires_grad
    assert whole.shape == (4, models.DIM)


@ranks(2, extended=(4,))
def test_set_reshard_after_forward() -> None:
    def run(api: Any) -> Any:
        model = parity.shard(api, running.mlp())
        results = []
        for value, recurse in ((True, True), (False, True), (True, False), (False, False)):
            model.set_reshard_after_forward(value, recurse=recurse)
            with parity.CountCollectives() as forward:
                loss = parity.regression_loss(model, parity.my_part(running.one_batch()))
            states = [running.is_sharded(module) for module in running.fsdp_modules(model)]
            with parity.CountCollectives() as backward:
                loss.backward()
            results.append([states, parity.full_grads(model), forward.counts, backward.counts])
        return results

    states = [result[0] for result in parity.same_as_torch(run)]
    assert states == [[True] * 4, [False] * 4, [True, False, False, False], [False] * 4]


# -- unshard and reshard by hand ------------------------------------------------------------------


@ranks(2, extended=(4,))
@each_once(mixed={"fp32": False, "mixed": True}, async_op=[True, False])
def test_unshard_and_reshard(mixed: bool, async_op: bool) -> None:
    """Not recursive; gathers in the compute dtype; works before the first forward and after it."""
    plain = running.mlp()
    model = parity.shard(parity.OURS, running.mlp(), mixed=mixed)
    dtype = torch.bfloat16 if mixed else torch.float32
    for _ in range(2):
        shards = [model.head.weight, model.head.bias]
        handle = model.unshard(async_op=async_op)
        if async_op:
            assert isinstance(handle, UnshardHandle)
            handle.wait()
            handle.wait()  # a second wait has nothing to do
        else:
            assert handle is None
        assert [running.is_sharded(module) for module in running.fsdp_modules(model)] == [
            False,
            True,
            True,
            True,
        ]
        parity.assert_equal(
            model.head.weight.detach(), plain.head.weight.detach().to(dtype), "whole"
        )
        parity.assert_equal(model.head.bias.detach(), plain.head.bias.detach().to(dtype), "whole")
        with parity.CountCollectives() as counted:
            model.unshard()
        assert counted.all_gathers == 0, "it is unsharded already"
        model.reshard()
        model.reshard()
        assert running.is_sharded(model)
        assert model.head.weight is shards[0]
        assert model.head.bias is shards[1]
    steps = parity.train_sharded(model, parity.adamw, parity.regression_loss, running.mlp_batches())
    unsharded = parity.train_unsharded(
        running.mlp(),
        parity.adamw,
        parity.regression_loss,
        running.mlp_batches(),
        slices=True,
        mixed=mixed,
    )
    if dist.get_world_size() == 2:
        parity.assert_equal(steps, unsharded, "training after that")
    parity.assert_close(
        steps[0].grads, unsharded[0].grads, parity.REORDERED_FP32, "training after that"
    )


@ranks(2)
def test_handle_that_is_never_waited_for() -> None:
    """reshard() takes back an unshard still in flight."""
    model = parity.shard(parity.OURS, running.mlp())
    model.unshard(async_op=True)
    model.reshard()
    assert running.is_sharded(model)
    steps = parity.train_sharded(model, parity.adamw, parity.regression_loss, running.mlp_batches())
    plain = parity.train_unsharded(
        running.mlp(), parity.adamw, parity.regression_loss, running.mlp_batches()
    )
    parity.assert_close(steps, plain, parity.FP32, "unsharded")


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_whole_parameter_is_one_object(reshard_after_forward: bool) -> None:
    """Whoever keeps the whole parameter, as autograd does, sees the same one at every unshard."""
    model = parity.shard(parity.OURS, running.mlp(), reshard_after_forward=reshard_after_forward)
    seen: list[list[nn.Parameter]] = []
    model.layers[1].register_forward_pre_hook(lambda m, _: seen.append([m.weight, m.bias]))
    for batch in running.mlp_batches():
        parity.regression_loss(model, parity.my_part(batch)).backward()
    with torch.no_grad():
        model(torch.randn(2, models.DIM))
    model.layers[1].unshard()
    seen.append([model.layers[1].weight, model.layers[1].bias])
    assert len(seen) == running.STEPS + 2
    for weight, bias in seen:
        assert isinstance(weight, nn.Parameter)
        assert not isinstance(weight, DTensor)
        assert weight is seen[0][0]
        assert bias is seen[0][1]


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_optimizer_step_reaches_parameters_that_are_whole(
    reshard_after_forward: bool | None,
) -> None:
    """An evaluation between backward and step leaves parameters gathered, with their old values.

    torch's FSDP2 goes on computing with those, so the unsharded model is the only judge.
    """
    plain = running.mlp()
    model = parity.shard(parity.OURS, running.mlp(), reshard_after_forward=reshard_after_forward)
    x, _ = batch = running.one_batch()
    for trained, part in ((plain, batch), (model, parity.my_part(batch))):
        optimizer = parity.adamw(trained.parameters())
        parity.regression_loss(trained, part).backward()
        with torch.no_grad():
            trained(x)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        parity.assert_close(model(x), plain(x), parity.FP32, "after the step")
