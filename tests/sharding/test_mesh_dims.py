"""`dp_mesh_dims`: parameters are DTensors on a full mesh of which some dims are data parallel."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from tests.common import combinations, meshes, models, parity
from tests.common.workers import ranks

# name -> (names and sizes of the full mesh for four ranks, shard dims, replicate dims)
CASES: dict[str, tuple[dict[str, int], Any, Any]] = {
    "shard": ({"shard": 4}, "shard", None),
    "shard, tp": ({"shard": 2, "tp": 2}, "shard", None),
    "tp before shard": ({"tp": 2, "shard": 2}, "shard", None),
    "two shard dims": ({"fsdp": 2, "cp": 2}, ("fsdp", "cp"), None),
    "two shard dims, tp of one": ({"fsdp": 2, "cp": 2, "tp": 1}, ("fsdp", "cp"), None),
    "replicate, shard": ({"replicate": 2, "shard": 2}, "shard", "replicate"),
    "replicate only": ({"replicate": 4}, None, "replicate"),
    "replicate, tp": ({"replicate": 2, "tp": 2}, None, "replicate"),
    "two replicate dims": ({"r": 2, "q": 2}, None, ("r", "q")),
}
WIDE: dict[str, tuple[dict[str, int], Any, Any]] = {  # for eight ranks
    "copies, two shard dims": ({"r": 2, "fsdp": 2, "cp": 2}, ("fsdp", "cp"), "r"),
    "shard dims on both sides of tp": ({"fsdp": 2, "tp": 2, "cp": 2}, ("fsdp", "cp"), None),
    "two of each": ({"r": 2, "q": 1, "fsdp": 2, "cp": 2}, ("fsdp", "cp"), ("r", "q")),
    "copies, shard, tp": ({"r": 2, "shard": 2, "tp": 2}, "shard", "r"),
}
CASES_OF = {4: CASES, 8: WIDE}


class Layers(nn.Module):
    """Two linears and a norm; `up` is cut by rows and `down` by columns where there is tp."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(models.DIM)
        self.up = nn.Linear(models.DIM, 2 * models.DIM)
        self.down = nn.Linear(2 * models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layers()
        self.second = Layers()
        for layers in (self.first, self.second):
            layers.is_unit = True
        self.head = nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))


def _cut(name: str, module: nn.Module, where: DeviceMesh) -> None:
    """For `distribute_module`: tp dims cut the two linears, all others replicate."""
    names = where.mesh_dim_names or ()
    kind = name.rpartition(".")[2]
    for key, param in list(module.named_parameters(recurse=False)):
        at = {("up", "weight"): Shard(0), ("up", "bias"): Shard(0), ("down", "weight"): Shard(1)}
        tp = at.get((kind, key), Replicate())
        placements = [tp if dim == "tp" else Replicate() for dim in names]
        module.register_parameter(key, nn.Parameter(distribute_tensor(param, where, placements)))


def _case(case: str) -> Any:
    return CASES_OF[dist.get_world_size()][case]


def _full_mesh(case: str) -> DeviceMesh:
    sizes = _case(case)[0]
    return meshes.mesh(*sizes, shape=tuple(sizes.values()))


def _model(api: Any, case: str, **arguments: Any) -> Any:
    _, shard, replicate = _case(case)
    where = _full_mesh(case)
    model = distribute_module(models.seeded(Net), where, _cut)
    dims = api.DataParallelMeshDims(shard=shard, replicate=replicate)
    for unit in (model.first, model.second, model):
        api.fully_shard(unit, mesh=where, dp_mesh_dims=dims, **arguments)
    return model


def _data_dims(case: str) -> list[int]:
    return [i for i, name in enumerate(_case(case)[0]) if name != "tp"]


def _part(case: str) -> tuple[int, int]:
    """This rank's position on the data-parallel dims, and how many there are."""
    where = _full_mesh(case)
    coordinate = where.get_coordinate()
    assert coordinate is not None
    at, number = 0, 1
    for dim in _data_dims(case):
        at, number = at * where.size(dim) + coordinate[dim], number * where.size(dim)
    return at, number


def _loss(case: str, model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over this rank's part, which is a piece of a DTensor on the full mesh."""
    inputs, targets = part
    where = _full_mesh(case)
    placements = [Shard(0) if i in _data_dims(case) else Replicate() for i in range(where.ndim)]
    output = model(DTensor.from_local(inputs, where, placements, run_check=False))
    local = output.redistribute(placements=placements).to_local()
    return (local - targets).square().mean()


def _train(api: Any, case: str) -> Any:
    return meshes.train_micro(
        _model(api, case),
        meshes.micro_batches(models.DIM, models.DIM),
        loss=partial(_loss, case),
        part=_part(case),
    )


since_torchs = pytest.mark.skipif(
    meshes.TORCH_VERSION < (2, 13), reason="torch has DataParallelMeshDims since 2.13"
)
DEFAULT = ("two shard dims", "replicate, tp")


def _check(case: str) -> None:
    ours = _train(parity.OURS, case)
    expected = meshes.train_plain(
        models.seeded(Net), meshes.micro_batches(models.DIM, models.DIM), parts=_part(case)[1]
    )
    parity.assert_close(ours, expected, parity.FP32, "unsharded")


@ranks(4)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.extended]) for c in CASES]
)
def test_training(case: str) -> None:
    _check(case)


@ranks(8, timeout=400)  # DTensor tries all placements of each tensor on four mesh dims: slow
@pytest.mark.parametrize("case", combinations.seldom(WIDE, extended=1))
def test_training_on_eight_ranks(case: str) -> None:
    _check(case)


@ranks(4)
@since_torchs
@pytest.mark.parametrize("case", CASES)
def test_placements_are_torchs(case: str) -> None:
    found = meshes.like_torch(lambda api: meshes.specs(_model(api, case)))
    assert found


@ranks(4)
@since_torchs
@pytest.mark.parametrize("case", combinations.often(["shard, tp", "replicate, shard"]))
def test_training_is_torchs(case: str) -> None:
    """Where every axis has two ranks, to the bit."""
    meshes.like_torch(partial(_train, case=case))


@ranks(4)
@pytest.mark.parametrize("case", ["replicate only", "replicate, tp"])
def test_only_replicated(case: str) -> None:
    """Nothing is gathered or scattered; gradients are averaged by one all-reduce a unit."""
    model = _model(parity.OURS, case)
    whole = {name: param.to_local().shape for name, param in model.named_parameters()}
    assert whole["head.weight"] == (models.DIM, models.DIM)
    batch = meshes.micro_batches(models.DIM, models.DIM)[0][0]
    rank, size = _part(case)
    mine = tuple(part.chunk(size)[rank] for part in batch)
    loss = _loss(case, model, mine)
    with parity.CountCollectives() as count:
        loss.backward()
    if case == "replicate only":  # tensor parallelism has collectives of its own
        assert (count.all_gathers, count.reduce_scatters) == (0, 0)
        assert count.counts["all_reduce"] == 3 + 1  # the first compares replicas
    parity.assert_equal(
        parity.full_params(model), parity.full_params(models.seeded(Net)), "parameters"
    )
