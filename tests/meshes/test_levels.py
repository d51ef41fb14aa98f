"""`Levels`: masters over all ranks of a 2-D mesh, gathered and reduced inside a node.

HSDP on the same mesh is the judge: its sums are the same, of the same ranks in the same order. On
two nodes of two ranks that makes gradients equal to the bit.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp2
from tests.common import meshes, models, parity, workers
from tests.common.errors import raises
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks

PARTIAL, FULL = meshes.Flags(all_reduce=False), meshes.Flags()
FOUR = (PARTIAL, PARTIAL, PARTIAL, FULL)
TWO = meshes.flags_in_turn(PARTIAL, FULL)


def _mesh() -> Any:
    return meshes.mesh("node", "local", shape=(2, 2))


def _levels(build: Any, **arguments: Any) -> Any:
    return parity.shard(parity.OURS, build(), mesh=fsdp2.Levels(_mesh()), **arguments)


def _hsdp(build: Any, **arguments: Any) -> Any:
    return parity.shard(parity.OURS, build(), mesh=meshes.hsdp_mesh(2, 2), **arguments)


# -- training -------------------------------------------------------------------------------------

EVEN, ODD = partial(models.seeded, models.MLP), partial(models.seeded, models.OddMLP)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "even": (EVEN, {}),
    "odd": (ODD, {}),
    "mixed": (partial(models.seeded, models.Nested), {"mixed": True}),
    "columns": (ODD, {"shard_placement_fn": lambda p: Shard(-1)}),
    "gathered until backward": (EVEN, {"reshard_after_forward": False}),
}


def _compare(
    build: Any, micro: int, before: Any, outputs: int = 4, change: Any = None, **arguments: Any
) -> None:
    """Levels and HSDP train alike; the first gradients are equal to the bit."""
    steps = meshes.micro_batches(models.DIM, outputs, micro=micro, steps=3)
    done = []
    for make in (_levels, _hsdp):
        model = make(build, **arguments)
        if change is not None:
            change(model)
        done.append(meshes.train_micro(model, steps, before=before))
    ours, theirs = done
    parity.assert_equal(ours[0].grads, theirs[0].grads, "the first gradients")
    mixed = bool(arguments.get("mixed"))
    tolerance = parity.REORDERED_MIXED if mixed else parity.REORDERED_FP32
    parity.assert_close(ours, theirs, tolerance, "HSDP")


@ranks(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [True, False], ids=["kept rows", "rows freed"])
def test_training_is_hsdps(kind: str, keep: bool) -> None:
    build, arguments = KINDS[kind]
    outputs = {"mixed": 3, "odd": 1, "columns": 1}.get(kind, 4)
    _compare(
        build,
        4,
        meshes.flags_in_turn(*FOUR),
        outputs,
        lambda model: model.set_tuning(keep_rows=keep),
        **arguments,
    )


@ranks(4)
def test_parameters_used_on_some_ranks() -> None:
    """Marks cross nodes, too: ``None`` on one rank is ``None`` on all (invariant I15)."""
    build = partial(models.seeded, partial(models.Forked, "tuple"))
    batch = meshes.micro_batches(models.DIM, 2, steps=1)[0][0]
    for one in range(4):
        model, plain = _levels(build), _hsdp(build)
        for each in (model, plain):
            each.used = "left" if dist.get_rank() == one else "right"
            parity.regression_loss(each, parity.my_part(batch)).backward()
        parity.assert_equal(parity.full_grads(model), parity.full_grads(plain), f"rank {one}")


@ranks(4)
def test_frozen_parameters_and_kept_gradients() -> None:
    def change(model: Any) -> None:
        model.set_tuning(keep_gradients=True)
        next(iter(model.parameters())).requires_grad_(False)

    _compare(EVEN, 2, TWO, change=change)


FORMATS = {
    "bf16 between": ({}, {"reduce": "bf16"}),
    "8 bits inside, 4 between": ({"gather": "int8", "reduce": "int8"}, {"reduce": "int4"}),
    "8 bits between": ({}, {"gather": "int8", "reduce": "int8"}),
    "differences inside": ({"gather": "int8", "differences": True}, {"gather": "int8"}),
}
NEAR = parity.Tolerance(rtol=0.25, atol=0.1)


@ranks(4)
@pytest.mark.parametrize("formats", FORMATS)
def test_formats_of_each_level(formats: str) -> None:
    """Near to exact training, and all ranks compute with the same bits."""
    inside, between = FORMATS[formats]
    steps = meshes.micro_batches(models.DIM, 1, micro=2, steps=3)
    model = _levels(ODD)
    model.set_wire_format(**inside, level="inside", exact_below=8)
    model.set_wire_format(**between, level="between", exact_below=8)
    ours = meshes.train_micro(model, steps, before=TWO, make_optimizer=_sgd)
    theirs = meshes.train_micro(_hsdp(ODD), steps, before=TWO, make_optimizer=_sgd)
    parity.assert_close(ours, theirs, NEAR, "exact")
    for layer in model.layers:
        layer.unshard()
        weights = layer.weight.detach().contiguous()
        everyones = [torch.empty_like(weights) for _ in range(4)]
        dist.all_gather(everyones, weights)
        for other in everyones:
            parity.assert_equal(other, weights)
        layer.reshard()


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


# -- what users see -------------------------------------------------------------------------------


@ranks(4)
def test_shards_are_chunks_of_chunks() -> None:
    plain: Any = models.seeded(lambda: nn.Linear(13, 7))
    wholes = {name: param.detach().clone() for name, param in plain.named_parameters()}
    model = fsdp2.fully_shard(plain, mesh=fsdp2.Levels(_mesh()))
    node, local = _mesh().get_coordinate()
    for name, param in model.named_parameters():
        whole = wholes[name]
        assert param.placements == (_StridedShard(0, split_factor=2), Shard(0))
        inside = torch.chunk(whole, 2)[local]
        pieces = torch.chunk(inside, 2)
        own = pieces[node] if node < len(pieces) else inside[:0]
        parity.assert_equal(param.to_local(), own, name)
        parity.assert_equal(param.full_tensor(), whole, name)
    full = {name: tensor.clone() for name, tensor in fsdp2.full_parameters(model)}
    parity.assert_equal(full, wholes)
    with fsdp2.gathered(model):
        parity.assert_equal(dict(model.named_parameters())["weight"].detach(), wholes["weight"])
        model.weight.data.add_(1)
    parity.assert_equal(model.weight.full_tensor(), wholes["weight"] + 1)


@ranks(4)
def test_clipping_and_flat_optimizer() -> None:
    batch = meshes.micro_batches(models.DIM, 1, steps=1)[0][0]
    found = []
    for make in (_levels, _hsdp):
        model = make(ODD)
        optimizer = fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, lr=1e-2)
        for _ in range(3):
            parity.regression_loss(model, parity.my_part(batch)).backward()
            norm = fsdp2.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        found.append([norm.reshape(1), *parity.full_params(model).values()])
    parity.assert_close(*found, parity.REORDERED_FP32, "HSDP")


@ranks(4)
def test_what_is_refused() -> None:
    with raises("levels-mesh"):
        fsdp2.Levels(4)  # type: ignore[arg-type]
    with raises("levels-dims"):
        fsdp2.Levels(parity.world_mesh())
    with raises("levels-named-dims"):
        fsdp2.fully_shard(
            nn.Linear(4, 4),
            mesh=fsdp2.Levels(_mesh()),
            dp_mesh_dims=fsdp2.DataParallelMeshDims("local"),
        )
    layer = nn.Linear(4, 4)
    fsdp2.fully_shard(layer, mesh=meshes.mesh("line", shape=(4,)))
    parallel = nn.Module()
    parallel.weight = nn.Parameter(layer.weight.detach().clone())
    with raises("levels-dtensor"):
        fsdp2.fully_shard(parallel, mesh=fsdp2.Levels(_mesh()))


# -- checkpoints ----------------------------------------------------------------------------------


def _made(levels: bool) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(dist.get_world_size())
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    mesh = fsdp2.Levels(_mesh()) if levels else None
    for module in (model[0], model):
        fsdp2.fully_shard(module, mesh=mesh)
    return model, parity.adamw(model.parameters())


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and states, whole."""
    found = [*model.parameters()]
    found += [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "step")]
    return [parity.full(tensor) for tensor in found]


def _continue(folder: Path, step: int, levels: bool) -> tuple[list[Tensor], list[Tensor]]:
    """What was loaded, and what is saved after some steps that all numbers of ranks share."""
    model, optimizer = _made(levels)
    loaded: list[Tensor] = []
    if step:
        fsdp2.checkpoint.load(folder, model, optimizer)
        model.reshard()
        loaded = _values(model, optimizer)
    for seed in range(2):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    fsdp2.checkpoint.save(folder, model, optimizer, step=step + 1)
    model.reshard()
    return loaded, _values(model, optimizer)


def test_checkpoints_to_two_flat_ranks_and_back(tmp_path: Path) -> None:
    """Shards over all ranks of two levels, read by two ranks of none, and the other way round."""
    saved: list[Tensor] = []
    for step, (count, levels) in enumerate(((4, True), (2, False), (4, True))):
        results = workers.run_on_ranks(count, _continue, tmp_path, step, levels)
        for loaded, _ in results:
            if step:
                parity.assert_equal(loaded, saved)
        saved = results[0][1]


# -- rows of a smaller group ----------------------------------------------------------------------


@ranks(4)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_rows_of_a_smaller_group_are_kept(mixed: bool) -> None:
    """Micro-batches from the second on gather from neighbours alone; same bits as without."""
    steps = meshes.micro_batches(models.DIM, 1, micro=3, steps=3)
    done = []
    for keep in (False, True):
        model: Any = parity.shard(parity.OURS, ODD(), reshard_after_forward=2, mixed=mixed)
        model.set_tuning(keep_rows=keep)
        done.append(meshes.train_micro(model, steps))
    parity.assert_equal(*done, "without")
