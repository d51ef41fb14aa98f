"""Optimizers that were made before `fully_shard`: refused by name, re-pointed on request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from fsdp2 import DataParallelMeshDims, fully_shard
from fsdp2.errors import ShardingStateError
from fsdp2.optim import repoint_optimizer
from tests.common import gradients, meshes, models, parity
from tests.common.combinations import each_once
from tests.common.workers import ranks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adam": partial(torch.optim.Adam, lr=1e-2, foreach=False),
}


def assert_trains(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int = 0) -> None:
    """With AdamW, from a step on as the unsharded model."""
    batches = gradients.mlp_batches()
    loss, make = parity.regression_loss, OPTIMIZERS["adamw"]
    ours = parity.train_sharded(model, lambda _: optimizer, loss, batches[begin:])
    plain = parity.train_unsharded(gradients.mlp(), make, loss, batches, slices=True)
    parity.assert_equal(ours, plain[begin:], "unsharded")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_training_goes_on_with_a_repointed_optimizer(name: str, steps_before: int) -> None:
    """As if the model had been sharded from the start; uneven rows and empty shards included."""
    make = OPTIMIZERS[name]
    batches = parity.regression_batches(models.DIM, 1, steps=4)
    model: nn.Module = models.seeded(models.OddMLP)
    optimizer = make(model.parameters())
    plain = parity.train_unsharded(
        models.seeded(models.OddMLP), make, parity.regression_loss, batches, slices=True
    )
    if steps_before:
        first = batches[:steps_before]
        parity.train_unsharded(
            model, lambda _: optimizer, parity.regression_loss, first, slices=True
        )
    groups = optimizer.param_groups
    parity.shard(parity.OURS, model)
    with parity.CountCollectives() as counted:
        repoint_optimizer(optimizer)
    assert counted.total == 0
    assert optimizer.param_groups is groups
    assert list(groups[0]["params"]) == list(model.parameters())
    assert all(isinstance(param, DTensor) for param in optimizer.state)
    ours = parity.train_sharded(
        model, lambda _: optimizer, parity.regression_loss, batches[steps_before:]
    )
    parity.assert_close(ours, plain[steps_before:], parity.REORDERED_FP32, "unsharded")


@ranks(2)
def test_state_is_sharded_like_its_parameter() -> None:
    model: Any = gradients.mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parity.regression_loss(
        model, gradients.part(0, rank=0)
    ).backward()  # the same state on both ranks
    optimizer.step()
    before = [dict(optimizer.state[param]) for param in model.parameters()]
    fully_shard(model, mesh=parity.world_mesh())
    repoint_optimizer(optimizer)
    for param, old in zip(model.parameters(), before, strict=True):
        state = optimizer.state[param]
        assert list(state) == list(old)
        assert state["step"] is old["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            local = state[key].to_local()
            assert state[key].placements == param.placements
            assert local.shape == param.to_local().shape
            assert local.untyped_storage().nbytes() == local.nbytes, "no view of the whole"
            parity.assert_equal(parity.full_all([state[key]])[0], old[key], key)
    groups = optimizer.param_groups[0]["params"]
    kept = list(groups)
    repoint_optimizer(optimizer)  # again: nothing to do
    assert all(a is b for a, b in zip(groups, kept, strict=True))
    state = optimizer.state_dict()
    assert isinstance(state["state"][0]["exp_avg"], DTensor)
    loose = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(loose.parameters(), lr=0.1)
    repoint_optimizer(optimizer)  # of other parameters
    assert list(optimizer.param_groups[0]["params"]) == list(loose.parameters())


@ranks(4)
@each_once(kind=["linears", "uneven", "sequence"], name=["momentum", "adam"])
def test_state_of_tensor_parallel_parameters(kind: str, name: str) -> None:
    """Sharded before the first step or after it, with `sequence` of sums that are still to be made.

    Data-parallel ranks see the same in the first step.
    """
    where = meshes.mesh("shard", "tp", shape=(2, 2))
    make = partial(OPTIMIZERS[name], foreach=False)  # torch's foreach takes no mixture of meshes

    def run(late: bool) -> Any:
        hidden = 2 * models.DIM + 1 if kind == "uneven" else 2 * models.DIM
        model: Any = meshes.parallelize(
            models.seeded(partial(meshes.ParallelModel, hidden=hidden)), where["tp"], kind
        )
        if not late:
            parity.shard(parity.OURS, model, mesh=where["shard"])
        optimizer = make(model.parameters())
        first, *others = parity.language_batches(16, steps=3)
        meshes.parallel_loss(model, first).backward()
        optimizer.step()
        optimizer.zero_grad()
        if late:
            parity.shard(parity.OURS, model, mesh=where["shard"])
            repoint_optimizer(optimizer)
        for batch in others:
            meshes.parallel_loss(model, parity.my_part(batch, dist.get_rank() // 2, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for param in model.parameters():
            for value in optimizer.state[param].values():
                if value.dim():
                    assert value.placements == param.placements
                    assert value._local_tensor.shape == param._local_tensor.shape
                    assert (
                        value._local_tensor.untyped_storage().nbytes() == value._local_tensor.nbytes
                    )
        return parity.full_params(model)

    parity.assert_close(
        run(late=True), run(late=False), parity.REORDERED_FP32, "sharded from the start"
    )


@ranks(4)
@pytest.mark.parametrize("names", [("shard", "tp"), ("tp", "shard")])
def test_state_on_a_full_mesh(names: tuple[str, str]) -> None:
    """Parameters and state are replicated on the data-parallel dim, then sharded on it."""
    where = meshes.mesh(*names, shape=(2, 2))
    placements = [Shard(0) if dim == "tp" else Replicate() for dim in names]
    dims = DataParallelMeshDims(shard="shard")
    model: Any = distribute_module(
        models.seeded(partial(nn.Linear, 5, 7)), where, partial(_distributed, placements)
    )
    optimizer = OPTIMIZERS["adam"](model.parameters())
    for param in model.parameters():
        param.grad = distribute_tensor(_counting(param.shape), where, placements)
    optimizer.step()
    expected = {
        n: parity.full_all(optimizer.state[p].values()) for n, p in model.named_parameters()
    }
    fully_shard(model, mesh=where, dp_mesh_dims=dims)
    repoint_optimizer(optimizer)
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        assert state["exp_avg"].placements == param.placements
        parity.assert_equal(parity.full_all(state.values()), expected[name], name)


def _distributed(placements: Any, _: str, module: nn.Module, where: Any) -> None:
    for key, param in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(param, where, placements)
        module.register_parameter(key, nn.Parameter(whole))


def _counting(shape: torch.Size) -> torch.Tensor:
    return torch.arange(1.0, shape.numel() + 1).view(shape)


@ranks(2)
@pytest.mark.parametrize("stepped", [False, True])
def test_stepping_without_repointing_raises(stepped: bool) -> None:
    """Also if the optimizer was looked at before, and if only one group is old."""
    fully_shard(nn.Linear(2, 2), mesh=parity.world_mesh())  # so that optimizers are watched already
    model: Any = gradients.mlp()
    optimizer = torch.optim.SGD(
        [{"params": [model.head.bias]}, {"params": model.layers.parameters(), "lr": 0.2}], lr=0.1
    )
    if stepped:
        parity.regression_loss(model, gradients.part(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    fully_shard(model.layers[1], mesh=parity.world_mesh())
    match = r"SGD holds parameter 'weight' as it was before.*fsdp2\.optim\.repoint_optimizer"
    with pytest.raises(ShardingStateError, match=match):
        optimizer.step()
    parity.shard(parity.OURS, models.seeded(partial(nn.Linear, 2, 2)))
    with pytest.raises(ShardingStateError, match=match):
        optimizer.step()
    repoint_optimizer(optimizer)
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


@ranks(2)
def test_after_loading_by_assignment() -> None:
    """`load_state_dict(assign=True)` replaces the parameters that an optimizer holds."""
    model = parity.shard(parity.OURS, gradients.mlp())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    parity.regression_loss(model, gradients.part(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    parity.regression_loss(model, gradients.part(1)).backward()
    with pytest.raises(ShardingStateError, match=r"AdamW holds parameter '.*' as it was before"):
        optimizer.step()
    model.zero_grad()
    repoint_optimizer(optimizer)
    assert_trains(model, optimizer, begin=1)


@ranks(2)
def test_after_loading_by_assignment_what_it_holds() -> None:
    """The parameters that were replaced come back: the optimizer is right as it was made."""
    model = parity.shard(parity.OURS, gradients.mlp())
    own = model.state_dict(keep_vars=True)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    model.load_state_dict({name: value.clone() for name, value in own.items()}, assign=True)
    model.load_state_dict(own, assign=True)
    assert_trains(model, optimizer)


@ranks(2)
def test_an_optimizer_made_while_parameters_are_gathered() -> None:
    model = parity.shard(parity.OURS, gradients.mlp())
    with torch.no_grad():
        model(gradients.part(0)[0])
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    repoint_optimizer(optimizer)
    assert_trains(model, optimizer)


@ranks(2)
def test_tied_parameters_and_schedules() -> None:
    """A tied parameter is there once; a schedule made before still sets the learning rate."""
    build = partial(models.seeded, partial(models.Transformer, blocks=1, vocab=13, tied=True))
    batches = parity.language_batches(13, steps=3)

    def train(model: nn.Module, optimizer: Any, schedule: Any, parts: Any) -> list[float]:
        rates = []
        for batch in batches:
            mine = parts(batch)
            for of_rank in mine:
                (parity.language_loss(model, of_rank) / len(mine)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    results = []
    for sharded in (True, False):
        model = build()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if sharded:
            parity.shard(parity.OURS, model)
            repoint_optimizer(optimizer)
        assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
        parts = (
            (lambda b: [parity.my_part(b)])
            if sharded
            else (lambda b: [parity.my_part(b, 0), parity.my_part(b, 1)])
        )
        rates = train(model, optimizer, schedule, parts)
        results.append([rates, parity.full_all(list(model.parameters()))])
    parity.assert_close(results[0], results[1], parity.REORDERED_FP32, "unsharded")
