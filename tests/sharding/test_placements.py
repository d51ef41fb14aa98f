"""Placements and rows on every kind of mesh, compared with torch's `fully_shard` rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp2
from fsdp2 import DataParallelMeshDims
from fsdp2.core.layout.layout import ROWS, Cut
from fsdp2.core.layout.mesh import gradient_placements, smaller_mesh
from fsdp2.sharding.meshes import axes_of_info, resolve_axes
from fsdp2.testing.null_group import null_world
from tests.common.tensors import Bf16Weight

pytestmark = pytest.mark.alone

SHAPES = [(8,), (3,), (16, 4), (7, 6), (64, 8), (2, 5), (4, 12, 6)]


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    """DTensor remembers results by the value of a mesh: with groups that are gone by now."""
    _clear_sharding_prop_cache()


Wrap = Callable[[int, torch.Tensor], torch.Tensor]


def _model(wrap: Wrap = lambda _, values: values) -> nn.Module:
    """One parameter a shape, every element different, each perhaps a DTensor."""
    model = nn.Module()
    start = 0
    for number, shape in enumerate(SHAPES):
        numel = torch.Size(shape).numel()
        values = torch.arange(start, start + numel, dtype=torch.float32).view(shape)
        model.register_parameter(f"p{number}", nn.Parameter(wrap(number, values)))
        start += numel
    return model


def _place(dim: int) -> Callable[[nn.Parameter], Shard | None]:
    return lambda param: Shard(dim) if param.ndim > dim else None


def _assert_alike(ours: nn.Module, theirs: nn.Module) -> None:
    wanted = dict(theirs.named_parameters())
    for name, param in ours.named_parameters():
        other = wanted[name]
        assert isinstance(param, DTensor)
        assert isinstance(other, DTensor)
        mesh = param.device_mesh
        assert mesh == other.device_mesh, name
        assert mesh.mesh_dim_names == other.device_mesh.mesh_dim_names, name
        assert param.placements == other.placements, name
        assert (param.shape, param.stride()) == (other.shape, other.stride()), name
        assert torch.equal(param.to_local(), other.to_local()), name


def _shard_both(mesh: DeviceMesh, wrap: Wrap, dims: dict[str, Any] | None = None) -> nn.Module:
    """A model after our `fully_shard`, compared with one after torch's."""
    ours, theirs = _model(wrap), _model(wrap)
    named = {} if dims is None else {"dp_mesh_dims": DataParallelMeshDims(**dims)}
    fsdp2.fully_shard(ours, mesh=mesh, **named)
    named = (
        {}
        if dims is None
        else {"dp_mesh_dims": torch.distributed.fsdp.DataParallelMeshDims(**dims)}
    )
    torch_fully_shard(theirs, mesh=mesh, **named)
    _assert_alike(ours, theirs)
    return ours


def _plain(_: int, values: torch.Tensor) -> torch.Tensor:
    return values


@pytest.mark.parametrize(
    ("world_size", "rank"), [(1, 0), (2, 1), (3, 2), (4, 3), (64, 5), (64, 63)]
)
@pytest.mark.parametrize("names", [None, ("shard",)])
def test_one_dim(world_size: int, rank: int, names: tuple[str, ...] | None) -> None:
    with null_world(world_size, rank):
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=names)
        model = _shard_both(mesh, _plain)
        assert model.p0.placements == (Shard(0),)


@pytest.mark.parametrize(
    ("shape", "rank"), [((2, 1), 1), ((1, 2), 1), ((2, 2), 3), ((4, 16), 37), ((16, 4), 2)]
)
@pytest.mark.parametrize("names", [None, ("replicate", "shard")])
@pytest.mark.parametrize("dim", [0, 1])
def test_two_dims(
    dim: int, names: tuple[str, ...] | None, shape: tuple[int, int], rank: int
) -> None:
    with null_world(shape[0] * shape[1], rank):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = _model()
        fsdp2.fully_shard(model, mesh=mesh, shard_placement_fn=_place(dim))
        wanted = [Replicate(), Shard(dim)]
        whole = distribute_tensor(_model().p2.detach(), mesh, wanted, src_data_rank=None)
        assert list(model.p2.placements) == wanted
        assert torch.equal(model.p2.to_local(), whole.to_local())
        if names is not None:  # torch demands them
            _shard_both(mesh, _plain)


# ---- tensor parallel below


def _parallel(mesh: DeviceMesh, choices: Sequence[Placement]) -> Wrap:
    """Each parameter a DTensor on a model-parallel mesh; a dim that it lacks is replicated."""

    def wrap(number: int, values: torch.Tensor) -> torch.Tensor:
        placement = choices[number % len(choices)]
        if isinstance(placement, Shard) and (
            placement.dim >= values.ndim or values.shape[placement.dim] % mesh.size()
        ):
            placement = Replicate()
        return distribute_tensor(values, mesh, [placement], src_data_rank=None)

    return wrap


@pytest.mark.parametrize(
    ("shape", "names", "rank"),
    [
        ((2, 2), ("shard", "tp"), 3),
        ((4, 2), ("shard", "tp"), 5),
        ((2, 2, 2), ("replicate", "shard", "tp"), 6),
        ((2, 4, 8), ("replicate", "shard", "tp"), 61),
    ],
)
@pytest.mark.parametrize("choices", [[Shard(0)], [Shard(1), Shard(0)], [Replicate()]])
def test_tensor_parallel(
    choices: list[Placement], shape: tuple[int, ...], names: tuple[str, ...], rank: int
) -> None:
    world_size = torch.Size(shape).numel()
    with null_world(world_size, rank):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        data = mesh[names[:-1]] if len(names) > 2 else mesh["shard"]
        model = _shard_both(data, _parallel(mesh["tp"], choices))
        if choices == [Shard(0)]:
            strided = _StridedShard(0, split_factor=shape[-1])
            assert model.p0.placements[-2:] == (strided, Shard(0))


@pytest.mark.parametrize("rank", [0, 3])
def test_shard_dim_that_tensor_parallel_does_not_cut(rank: int) -> None:
    with null_world(4, rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        wrap = _parallel(mesh["tp"], [Shard(0)])
        model = _model(wrap)
        fsdp2.fully_shard(model, mesh=mesh["shard"], shard_placement_fn=_place(1))
        assert model.p2.placements == (Shard(1), Shard(0))
        whole = _model().p2.detach()
        tp, shard = rank % 2, rank // 2
        wanted = whole.chunk(2, 0)[tp].chunk(2, 1)[shard]
        assert torch.equal(model.p2.to_local(), wanted)


# ---- the full mesh


FULL = [
    ((2, 2), ("shard", "tp"), {"shard": "shard"}),
    ((2, 2, 2), ("replicate", "shard", "tp"), {"shard": "shard", "replicate": "replicate"}),
    ((2, 2, 2), ("a", "b", "tp"), {"shard": ("a", "b")}),
    ((2, 2, 2, 2), ("r", "a", "b", "tp"), {"shard": ("a", "b"), "replicate": "r"}),
    ((2, 2, 2), ("r", "s", "tp"), {"shard": ("r", "s")}),
    ((2, 2, 4, 2), ("q", "r", "s", "tp"), {"shard": "s", "replicate": ("q", "r")}),
    ((4, 2), ("replicate", "tp"), {"replicate": "replicate"}),
    ((64, 1), ("shard", "tp"), {"shard": "shard"}),
]


@pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"),
    reason="this torch has no such meshes to compare with; ours are in test_mesh_dims.py",
)
@pytest.mark.parametrize(("shape", "names", "dims"), FULL)
@pytest.mark.parametrize("cut", [0, 1, None])
@pytest.mark.parametrize("last", [True, False])
def test_full_mesh(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    dims: dict[str, Any],
    cut: int | None,
    last: bool,
) -> None:
    world_size = torch.Size(shape).numel()
    with null_world(world_size, world_size - 1 if last else 1):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

        def wrap(number: int, values: torch.Tensor) -> torch.Tensor:
            fits = cut is not None and cut < values.ndim and values.shape[cut] % shape[-1] == 0
            own: Placement = Shard(cut) if fits and cut is not None else Replicate()
            placements = [*[Replicate()] * (len(shape) - 1), own]
            return distribute_tensor(values, mesh, placements, src_data_rank=None)

        _shard_both(mesh, wrap, dims)


def test_gradients_are_placed_as_parameters_but_on_data_parallel_dims() -> None:
    with null_world(8):
        names = ("replicate", "shard", "tp")
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        param = distribute_tensor(
            torch.zeros(8, 4), mesh, [Replicate(), Replicate(), Shard(0)], src_data_rank=None
        )
        found = (Partial(), Partial(), Replicate())
        named = resolve_axes(mesh, DataParallelMeshDims("shard", "replicate"))
        assert gradient_placements(named, param._spec, found) == (Partial(), Partial(), Shard(0))
        below = distribute_tensor(torch.zeros(8, 4), mesh["tp"], [Shard(0)], src_data_rank=None)
        axes = resolve_axes(mesh["replicate", "shard"])
        assert gradient_placements(axes, below._spec, (Replicate(),)) == (Shard(0),)


# ---- axes


def test_axes_of_meshes() -> None:
    with null_world(8, 5):
        flat = resolve_axes(init_device_mesh("cpu", (8,)))
        assert (flat.size, flat.rank, flat.copies, flat.replicas) == (8, 5, 1, None)
        assert flat.placements(Cut(1)) == (Shard(1),)
        assert flat.shard_mesh is flat.mesh
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        both = resolve_axes(mesh)
        assert (both.size, both.rank, both.copies) == (4, 1, 2)
        assert both.placements(ROWS) == (Replicate(), Shard(0))
        assert both.shard_mesh == mesh["shard"]
        copies = resolve_axes(mesh, DataParallelMeshDims(replicate="replicate"))
        assert (copies.group, copies.size, copies.rank, copies.copies) == (None, 1, 0, 2)
        assert copies.placements(ROWS) == (Replicate(),)
        joined = resolve_axes(mesh, DataParallelMeshDims(shard=("replicate", "shard")))
        assert (joined.size, joined.rank, joined.copies) == (8, 5, 1)
        info = fsdp2.FSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        other = axes_of_info("w", info)
        assert (other.size, other.rank, other.copies) == (4, 1, 2)
        for wrong in (
            fsdp2.FSDPMeshInfo(mesh, shard_mesh_dim=0, replicate_mesh_dim=1),
            fsdp2.FSDPMeshInfo(mesh, shard_mesh_dim=0),
            fsdp2.FSDPMeshInfo(mesh["shard"]),
        ):
            with pytest.raises(ValueError, match="for parameter 'w', with shard_mesh_dim="):
                axes_of_info("w", wrong)


@pytest.mark.parametrize(("shape", "size", "rank"), [((8,), 2, 5), ((8,), 4, 3), ((2, 4), 2, 6)])
def test_smaller_mesh(shape: tuple[int, ...], size: int, rank: int) -> None:
    with null_world(8, rank):
        mesh = smaller_mesh(init_device_mesh("cpu", shape), size)
        assert mesh.shape == (8 // size, size)
        assert mesh.mesh.flatten().tolist() == list(range(8))
        assert tuple(mesh.get_coordinate()) == (rank // size, rank % size)
        neighbours = dist.get_process_group_ranks(mesh.get_group("shard"))
        assert neighbours == list(range(rank - rank % size, rank - rank % size + size))
        copies = dist.get_process_group_ranks(mesh.get_group("replicate"))
        assert copies == list(range(rank % size, 8, size))


def test_a_dtensor_has_no_smaller_group() -> None:
    with null_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
        data, model = mesh["replicate", "shard"]._flatten("data"), nn.Module()
        rows = DTensor.from_local(torch.ones(8, 8), mesh["tp"], [Replicate()], run_check=False)
        model.p0 = nn.Parameter(rows)
        with pytest.raises(ValueError, match="cannot be used with parameter 'p0'"):
            fsdp2.fully_shard(model, mesh=data, reshard_after_forward=2)


def test_meshes_of_a_new_world_have_its_process_groups() -> None:
    """Equal meshes of two worlds, one after the other: the first one's groups are gone."""
    groups = []
    for _ in range(2):
        _clear_sharding_prop_cache()
        with null_world(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
            model = _shard_both(mesh["shard"], _parallel(mesh["tp"], [Shard(0)]))
            assert model.p0.device_mesh.get_group("tp") is mesh.get_group("tp")
            smaller = smaller_mesh(init_device_mesh("cpu", (4,)), 2)
            assert smaller is smaller_mesh(init_device_mesh("cpu", (4,)), 2)
            banded = resolve_axes(init_device_mesh("cpu", (4,))).mesh_of(Cut(1, 2))
            assert banded is resolve_axes(init_device_mesh("cpu", (4,))).mesh_of(Cut(1, 2))
            groups.append((smaller.get_group("shard"), banded.get_group("bands")))
    assert groups[0][0] is not groups[1][0]
    assert groups[0][1] is not groups[1][1]


# ---- two shard dims


@pytest.mark.parametrize(("shape", "rank"), [((8,), 5), ((2, 4), 6)])
def test_bands(shape: tuple[int, ...], rank: int) -> None:
    """A piece is what DTensor makes of the two placements on the mesh with a dim for the bands."""
    whole = torch.arange(2 * 12 * 30_000, dtype=torch.float32).view(2, 12, 30_000)
    with null_world(8, rank):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = nn.Module()
        model.experts = nn.Parameter(whole.clone())
        fsdp2.fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: (Shard(0), Shard(1)))
        copies = [Replicate()] * (len(shape) - 1)
        assert list(model.experts.placements) == [*copies, Shard(0), Shard(1)]
        own = model.experts.device_mesh
        assert tuple(own.mesh.shape) == (*shape[:-1], 2, shape[-1] // 2)
        assert own.mesh_dim_names == ("replicate", "bands", "shard")[-own.ndim :]
        assert torch.equal(own.mesh.flatten(), torch.arange(8))
        wanted = distribute_tensor(whole, own, model.experts.placements, src_data_rank=None)
        assert torch.equal(model.experts.to_local(), wanted.to_local())


def test_bands_on_a_mesh_of_the_parameters_own() -> None:
    """Experts on ranks that do not follow one another: columns of a larger mesh."""
    whole = torch.arange(2 * 12 * 30_000, dtype=torch.float32).view(2, 12, 30_000)
    with null_world(8, 5):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "ep"))
        info = fsdp2.FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)
        dims = (Shard(0), Shard(1))
        model = nn.Module()
        model.experts = nn.Parameter(whole.clone())
        model.plain = nn.Parameter(torch.ones(8))
        fsdp2.fully_shard(
            model,
            mesh=mesh._flatten("all"),
            shard_placement_fn=lambda p: (
                fsdp2.ShardPlacementResult(dims, info) if p.ndim == 3 else None
            ),
        )
        assert model.experts.device_mesh.mesh.tolist() == [[1, 3], [5, 7]]
        assert torch.equal(model.experts.to_local(), whole[1:, :6])
        assert model.plain.device_mesh.size() == 8


@pytest.mark.parametrize("kind", ["tensor parallel", "extended"])
def test_no_bands(kind: str) -> None:
    """What knows one shard dim only is cut on one of those that are named."""
    with null_world(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "tp"))
        values = torch.zeros(2, 34, 30_000)
        if kind == "extended":
            values = Bf16Weight(values)
        else:
            values = distribute_tensor(values, mesh["tp"], [Replicate()], src_data_rank=None)
        model = nn.Module()
        model.experts = nn.Parameter(values)
        fsdp2.fully_shard(
            model, mesh=mesh["shard"], shard_placement_fn=lambda _: (Shard(0), Shard(1))
        )
        dim = 0 if kind == "extended" else 1
        assert model.experts.placements == (Shard(dim), *[Replicate()] * (kind != "extended"))


def test_an_extended_parameter_is_cut_on_the_first_dim_that_its_hooks_can() -> None:
    with null_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        model = nn.Module()
        model.weight = nn.Parameter(Bf16Weight(torch.zeros(8, 6)))
        fsdp2.fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: (Shard(1), Shard(0)))
        assert model.weight.placements == (Shard(0),)
