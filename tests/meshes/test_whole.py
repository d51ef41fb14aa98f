"""Parameters that stay whole among sharded ones: the same training, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import fsdp2
from tests.common import meshes, models, parity
from tests.common.cases import in_turn
from tests.common.workers import ranks

SMALL = 2 * models.DIM
"""Norms, biases; not matrices."""

Flags = meshes.Flags
BUILD = partial(models.seeded, partial(models.Transformer, blocks=2))


def shard(model: nn.Module, whole: bool, **arguments: Any) -> nn.Module:
    if whole:
        arguments["shard_placement_fn"] = fsdp2.whole_below(SMALL)
    return parity.shard(parity.OURS, model, **arguments)


def batches(micro: int = 1, steps: int = 3) -> list[list[Tensor]]:
    flat = parity.language_batches(13, steps=steps * micro)
    return [flat[i * micro : (i + 1) * micro] for i in range(steps)]


def train(
    whole: bool,
    build: Callable[[], nn.Module] = BUILD,
    flags: tuple[Flags, ...] = (Flags(),),
    factor: float | None = None,
    **settings: Any,
) -> Any:
    model: Any = shard(build(), whole, **settings)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    before = meshes.flags_in_turn(*flags)
    return meshes.train_micro(model, batches(len(flags)), loss=parity.language_loss, before=before)


def check(**settings: Any) -> Any:
    """Whole and sharded train alike: sums of two ranks, in one backward, have one order."""
    whole, sharded = train(True, **settings), train(False, **settings)
    if dist.get_world_size() == 2 and "flags" not in settings:
        parity.assert_equal(whole, sharded, "sharded")
    else:
        mixed = settings.get("mixed", False)
        tolerance = parity.REORDERED_MIXED if mixed else parity.REORDERED_FP32
        parity.assert_close(whole, sharded, tolerance, "sharded")
    return whole


@ranks(2, extended=(4,))
def test_training() -> None:
    whole = check()
    plain = meshes.train_plain(BUILD(), batches(), loss=parity.language_loss)
    if dist.get_world_size() == 2:
        parity.assert_equal(whole, plain, "unsharded")


NO, PARTIAL, FULL = Flags(sync=False), Flags(all_reduce=False), Flags()
SETTINGS: dict[str, dict[str, Any]] = {
    "mixed, by three": {"mixed": True, "factor": 3.0},
    "by two": {"factor": 2.0},
    "not divided": {"factor": 1.0},
    "no sync, mixed": {"flags": (NO, NO, FULL), "mixed": True},
    "sync": {"flags": (FULL, FULL, FULL)},
    "no all-reduce, mixed, by three": {
        "flags": (PARTIAL, PARTIAL, FULL),
        "mixed": True,
        "factor": 3.0,
    },
    "both": {"flags": (NO, PARTIAL, FULL)},
}


@ranks(2)
def test_factors_dtypes_and_accumulation() -> None:
    in_turn(SETTINGS, lambda settings: check(**settings))


@ranks(4)
def test_hsdp() -> None:
    mesh = meshes.hsdp_mesh(2, 2)
    model = shard(BUILD(), True, mesh=mesh)
    weight = model.get_parameter("norm.weight")
    assert isinstance(weight, DTensor)
    assert weight.placements == (Replicate(), Replicate())
    assert weight.device_mesh == mesh
    check(mesh=mesh, flags=(FULL, FULL))
    check(mesh=mesh, flags=(PARTIAL, FULL))


@ranks(2, extended=(4,))
def test_tied() -> None:
    """An embedding that the head uses too, in another unit; whole, as everything is."""

    def scenario(whole: bool) -> Any:
        model = models.seeded(partial(models.Transformer, blocks=1, tied=True))
        placed = fsdp2.whole_below(1 << 30) if whole else None
        for unit in (model.embed, *models.units(model), model.head):
            fsdp2.fully_shard(unit, mesh=parity.world_mesh(), shard_placement_fn=placed)
        fsdp2.fully_shard(model, mesh=parity.world_mesh(), shard_placement_fn=placed)
        return meshes.train_micro(model, batches(), loss=parity.language_loss)

    if dist.get_world_size() == 2:
        parity.assert_equal(scenario(True), scenario(False), "sharded")
    else:
        parity.assert_close(scenario(True), scenario(False), parity.REORDERED_FP32, "sharded")


@ranks(4)
@pytest.mark.parametrize("kind", ["linears", "sequence"])
def test_tensor_parallel(kind: str) -> None:
    mesh = meshes.mesh("dp", "tp", shape=(2, 2))

    def scenario(whole: bool) -> Any:
        model = meshes.parallelize(models.seeded(meshes.ParallelModel), mesh["tp"], kind)
        shard(model, whole, mesh=mesh["dp"])
        norm = model.norm.weight
        assert isinstance(norm, DTensor)
        if whole and kind == "sequence":
            assert norm.placements == (Replicate(), Replicate())
        part = (mesh["dp"].get_local_rank(), 2)
        flat = parity.language_batches(16, steps=3)
        return meshes.train_micro(
            model, [[batch] for batch in flat], loss=meshes.parallel_loss, part=part
        )

    parity.assert_equal(scenario(True), scenario(False), "sharded")


class Choosy(nn.Module):
    """Of two norms, each rank uses the one of its number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(models.DIM), nn.LayerNorm(models.DIM)
        self.never = nn.LayerNorm(models.DIM)
        self.out = nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor, first: bool) -> Tensor:
        return self.out(self.first(x) if first else self.second(x))


@ranks(2)
@pytest.mark.parametrize("fills", [False, True])
def test_used_on_one_rank(fills: bool) -> None:
    model = models.seeded(Choosy)
    plain = models.seeded(Choosy)
    placed = fsdp2.whole_below(SMALL)
    for unit in (model.first, model.second, model):
        fsdp2.fully_shard(unit, mesh=parity.world_mesh(), shard_placement_fn=placed)
    model.set_reduce_scatter_unused_params(fills)  # type: ignore[operator]
    x = torch.randn(2, 3, models.DIM, generator=torch.Generator().manual_seed(5))
    rank = dist.get_rank()
    model(x[rank], rank == 0).square().sum().backward()
    for each in (0, 1):
        plain(x[each], each == 0).square().sum().div(2).backward()
    found, wanted = parity.full_grads(model), parity.full_grads(plain)
    if fills:
        zeros = torch.zeros(models.DIM)
        wanted["never.weight"] = wanted["never.bias"] = zeros
    parity.assert_equal(found, wanted, "unsharded")


@ranks(2)
def test_state_is_the_same_on_all_ranks() -> None:
    model = shard(BUILD(), True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for (batch,) in batches():
        parity.language_loss(model, parity.my_part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    norm = model.get_parameter("norm.weight")
    tensors = [norm, *optimizer.state[norm].values()]
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        both: list[Any] = [None, None]
        dist.all_gather_object(both, local.detach().numpy().tobytes())
        assert both[0] == both[1]
