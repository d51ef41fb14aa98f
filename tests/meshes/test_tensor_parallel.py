"""Tensor parallel parameters: sharded on one mesh dim by DTensor, on another by fully_shard."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp2.core.modules.registry import record_of
from tests.common import combinations, meshes, models, parity
from tests.common.observing import observe
from tests.common.workers import ranks

BUILD = partial(models.seeded, meshes.ParallelModel)
VOCAB = 16


def _mesh() -> Any:
    """Two ranks: both tensor parallel. Four: two by two. Eight: two copies of that."""
    size = dist.get_world_size()
    if size == 8:
        return meshes.mesh("replicate", "shard", "tp", shape=(2, 2, 2))
    return meshes.mesh("shard", "tp", shape=(size // 2, 2))


def _data_mesh() -> Any:
    full = _mesh()
    return full["shard"] if full.ndim == 2 else full["replicate", "shard"]


def _part() -> tuple[int, int]:
    """Which part of a batch this rank sees: the same on all ranks of a tensor parallel group."""
    return dist.get_rank() // 2, dist.get_world_size() // 2


def _sharded(api: Any, kind: str, build: Any = BUILD, **arguments: Any) -> Any:
    model = meshes.parallelize(build(), _mesh()["tp"], kind)
    return parity.shard(api, model, mesh=_data_mesh(), **arguments)


def _steps(micro: int = 1, steps: int = 3) -> list[list[Tensor]]:
    flat = parity.language_batches(VOCAB, steps=steps * micro)
    return [flat[i * micro : (i + 1) * micro] for i in range(steps)]


def _train(api: Any, kind: str, micro: int = 1, before: Any = None, **arguments: Any) -> Any:
    model = _sharded(api, kind, **arguments)
    with loss_parallel() if kind == "loss" else nullcontext():
        return meshes.train_micro(
            model, _steps(micro), loss=meshes.parallel_loss, part=_part(), before=before
        )


def _plain(micro: int = 1, build: Any = BUILD, **arguments: Any) -> Any:
    return meshes.train_plain(
        build(), _steps(micro), loss=meshes.parallel_loss, parts=_part()[1], **arguments
    )


# -- training -------------------------------------------------------------------------------------


@ranks(4, extended=(2, 8))
@pytest.mark.parametrize("kind", combinations.often(["sequence", "loss", "linears"], default=2))
def test_training(kind: str) -> None:
    """With `sequence`, gradients of norms are sums over pieces of the sequence still to be made."""
    order = parity.REORDERED_FP32 if dist.get_world_size() == 8 else None
    ours = meshes.like_torch(partial(_train, kind=kind), order)
    parity.assert_close(ours, _plain(), parity.FP32, "unsharded")


# -- placements -----------------------------------------------------------------------------------


@ranks(2, 4, extended=(8,))
@pytest.mark.parametrize("kind", ["linears", "sequence"])
def test_placements_are_torchs(kind: str) -> None:
    meshes.like_torch(lambda api: meshes.specs(_sharded(api, kind)))


@ranks(4)
def test_strided_where_both_cut_the_same_dim() -> None:
    model = _sharded(parity.OURS, "linears")
    block = model.blocks[0]
    assert block.up.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert block.down.weight.placements == (Shard(0), Shard(1))
    assert block.down.bias.placements == (Shard(0), Replicate())
    assert block.norm.weight.placements == (Shard(0),)
    whole = BUILD()
    parity.assert_equal(parity.full_params(model), parity.full_params(whole), "assembled")


@ranks(4)
def test_gathered_parameters_are_dtensors_on_the_model_parallel_mesh() -> None:
    model = _sharded(parity.OURS, "linears", mixed=True)
    layer = model.blocks[0].up
    before = layer.weight
    model.blocks[0].unshard()
    assert isinstance(layer.weight, DTensor)
    assert layer.weight.device_mesh == _mesh()["tp"]
    assert layer.weight.placements == (Shard(0),)
    assert layer.weight.dtype == torch.bfloat16
    rows = BUILD().blocks[0].up.weight.chunk(2)[dist.get_rank() % 2]
    parity.assert_equal(layer.weight.to_local().detach(), rows.detach().bfloat16(), "gathered")
    model.blocks[0].reshard()
    assert layer.weight is before


# -- what else touches the parameters -------------------------------------------------------------


@ranks(4)
@pytest.mark.parametrize("kind", ["linears", "sequence"])
def test_evaluations_of_kept_units_gather_what_was_written(kind: str) -> None:
    """Nothing while nobody writes; what one rank writes into its shard, those that gather it."""
    model = _sharded(parity.OURS, kind, reshard_after_forward=False)
    ids = parity.my_part(_steps()[0][0], *_part())
    gathers: list[str] = []

    def heard(what: str, name: str) -> None:
        if what == "all_gather":
            gathers.append(name)

    with torch.no_grad():
        first = meshes.parallel_loss(model, ids)
        observe(record_of(model).scheduler.units, heard)  # type: ignore[union-attr]  # sharded
        for _ in range(2):
            parity.assert_equal(meshes.parallel_loss(model, ids), first, "the same weights")
        assert gathers == []
        weight = model.blocks[0].up.weight
        if dist.get_rank() == 0:
            weight._local_tensor.mul_(2)
        plain = BUILD()
        for name, full in parity.full_params(model).items():
            plain.get_parameter(name).copy_(full)
        loss = meshes.parallel_loss(model, ids)
    written = int(dist.get_rank() % 2 == 0)  # by the ranks with the same part of the weight
    assert len(gathers) == written
    parity.assert_close(loss, meshes.parallel_loss(plain, ids).detach(), parity.FP32, "written")


@ranks(4)
def test_frozen_and_tied_parameters() -> None:
    """A frozen tensor parallel weight is gathered and not reduced; one that is tied trains once."""

    def tie(model: meshes.ParallelModel) -> meshes.ParallelModel:
        model.blocks[1].up.weight = model.blocks[0].up.weight
        model.blocks[0].down.weight.requires_grad_(False)
        for block in model.blocks:
            block.is_unit = False
        return model

    def scenario(api: Any) -> Any:
        model = tie(meshes.parallelize(BUILD(), _mesh()["tp"], "linears"))
        parity.shard(api, model, mesh=_data_mesh())
        return meshes.train_micro(model, _steps(), loss=meshes.parallel_loss, part=_part())

    ours = meshes.like_torch(scenario)
    parity.assert_close(ours, _plain(build=lambda: tie(BUILD())), parity.FP32, "unsharded")


@ranks(4)
def test_recovery_drops_model_parallel_gradients_without_communication() -> None:
    """One rank may fail alone: what the others have to do for it must not involve it."""
    model = _sharded(parity.OURS, "sequence", mixed=True)
    ids = parity.my_part(_steps()[0][0], *_part())
    model.set_requires_gradient_sync(False)
    meshes.parallel_loss(model, ids).backward()
    with parity.CountCollectives() as count:
        model.reset_iter_state()
    assert count.total == 0
    model.set_requires_gradient_sync(True)
    meshes.parallel_loss(model, ids).backward()
    fresh = _sharded(parity.OURS, "sequence", mixed=True)
    meshes.parallel_loss(fresh, ids).backward()
    parity.assert_equal(parity.full_grads(model), parity.full_grads(fresh), "nothing of the first")
