"""DTensor placements from a mesh and a cut: one rule, used for every parameter.

    DeviceMesh                     MeshAxes                        a plain parameter's placements
      (shard,)                ──>  shard                           (Shard(d),)
      (replicate, shard)      ──>  shard and replicate: HSDP       (Replicate(), Shard(d))
      (between, inside), levels ──> shard twice                (_StridedShard(d, L), Shard(d))
      any, DataParallelMeshDims ─> the dims it names               those of the full mesh

    cut in bands (`Cut`): on the mesh (bands, shard)               (Shard(0), Shard(d))
                          or (replicate, bands, shard)             (Replicate(), Shard(0), Shard(d))

A parameter that is already a DTensor (tensor or expert parallel) keeps its placements after the
data-parallel ones, on the two meshes joined. Its local tensor is laid out and communicated. If the
model-parallel axis also shards dim d, this rank's piece is a piece of a piece: `_StridedShard`
expresses that, and checkpoints agree with torch's.

    W: 8 rows, tp of 2, shard of 2     tp rank 0 has rows 0-3, of which shard rank 1 has 2-3:
                                       (_StridedShard(0, split_factor=2), Shard(0))
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp2.core.config import DataParallelMeshDims
from fsdp2.core.device.collectives import arrived
from fsdp2.core.device.process_groups import (
    ProcessGroup,
    current_world,
    default_group,
    new_groups,
    rank_and_size,
    serves,
)
from fsdp2.core.errors import coded
from fsdp2.core.layout.layout import Cut
from fsdp2.core.pieces import piece_of


def default_mesh() -> DeviceMesh:
    """A 1-D mesh over the default process group, of the accelerator that it serves, else "cpu";
    starts a missing group from torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
    """
    group = default_group()
    device = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if device is None or not serves(group, device) else device.type
    return init_device_mesh(device_type, (group.size(),))


@dataclass(frozen=True)
class MeshAxes:
    """The data-parallel axes of a mesh.

    Attributes:
        mesh: the data-parallel mesh: (shard,), (replicate, shard) or (replicate,).
        group: process group of the shard axis, of ``size`` ranks; ``None`` if nothing is sharded.
        rank: this process's position on it.
        replicas: process group of the replicate axis, of ``copies`` ranks; ``None`` without one.
        device: the device that holds gathered parameters, and shards unless they are offloaded.
        full: the full SPMD mesh that parameters must be DTensors on, if its dims were named.
        levels: whether the replicate axis holds pieces of the shards instead of copies (decision
            29).
        whole: whether parameters stay whole, next to others that are sharded over the same ranks:
            their gradients are all-reduced together (`fsdp2.core.schedule.whole`).
    """

    mesh: DeviceMesh
    group: ProcessGroup | None
    size: int
    rank: int
    device: torch.device
    replicas: ProcessGroup | None = None
    copies: int = 1
    full: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None
    levels: bool = False
    whole: bool = False

    @functools.cached_property
    def piece_rank(self) -> int:
        """This process's position among the ranks that a slot of the flat shard is cut for."""
        if not self.levels:
            return self.rank
        assert self.replicas is not None
        return self.replicas.rank()

    def placements(self, cut: Cut) -> tuple[Placement, ...]:
        """Placements on ``mesh``, or on that of a cut in bands, of a parameter that is so cut."""
        if self.group is None:
            return (Replicate(),) * self.mesh.ndim
        if self.levels:
            return (_StridedShard(cut.dim, split_factor=self.size), Shard(cut.dim))
        copies: tuple[Placement, ...] = (Replicate(),) if self.replicas is not None else ()
        bands = (Shard(0),) if cut.bands > 1 else ()
        return (*copies, *bands, Shard(cut.dim))

    def mesh_of(self, cut: Cut) -> DeviceMesh:
        """The mesh of a parameter with this cut; bands need groups, made by all ranks together."""
        return self.mesh if cut.bands == 1 else _banded(self, cut.bands, current_world())

    def spec_of(
        self, cut: Cut, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype
    ) -> DTensorSpec:
        """The spec of plain parameters of this kind: one for all, because specs are immutable."""
        kind = (cut, shape, strides, dtype)
        found = self._specs.get(kind)
        if found is None:
            meta = TensorMeta(shape, strides, dtype)
            found = DTensorSpec(self.mesh_of(cut), self.placements(cut), tensor_meta=meta)
            self._specs[kind] = found
        return found

    @functools.cached_property
    def _specs(self) -> dict[object, DTensorSpec]:
        return {}

    @functools.cached_property
    def shard_mesh(self) -> DeviceMesh:
        if self.mesh.ndim == 1:
            return self.mesh
        names = self.mesh.mesh_dim_names
        if names is None:
            raise coded(
                ValueError,
                "hooks-unnamed-mesh",
                "all-gather extensions need the mesh of the shard axis; name the dims: "
                "init_device_mesh(…, mesh_dim_names=('replicate', 'shard'))",
            )
        return self.mesh[names[-1]]


# ---- axes


def device_of(mesh: DeviceMesh) -> torch.device:
    """This process's; of a mesh on ``meta`` that, where a step is rehearsed without memory."""
    device = torch.device(mesh.device_type)
    if device.type in ("cpu", "meta"):
        return device
    # A mesh names only the type.
    return torch.device(device.type, torch.accelerator.current_device_index())


def smaller_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """The ranks of a data-parallel mesh as (replicate, shard); makes only this rank's groups."""
    return _smaller_mesh(mesh, size, tuple(mesh.get_all_groups()))


@functools.lru_cache(maxsize=64)
def _smaller_mesh(mesh: DeviceMesh, size: int, around: tuple[ProcessGroup, ...]) -> DeviceMesh:
    # Equal meshes may have different groups: of other backends and time-outs, or of another world
    # (destroyed and started again).
    ranks = mesh.mesh.view(-1, size)
    # The shard group first, whose backend and options new groups take.
    groups = _grid_groups(ranks, list(around[::-1]), device_of(mesh))
    return DeviceMesh.from_group(
        groups, mesh.device_type, mesh=ranks, mesh_dim_names=("replicate", "shard")
    )


@functools.lru_cache(maxsize=64)
def _banded(axes: MeshAxes, bands: int, world: object) -> DeviceMesh:
    """The mesh with its shard dim as (bands, ranks of a band)."""
    mesh = axes.mesh
    assert axes.group is not None
    ranks = mesh.mesh.view(-1, bands, axes.size // bands)
    # New groups join ranks of one replica, which need not wait for those of others.
    mine = int((ranks == rank_and_size()[0]).nonzero()[0][0])
    groups, names = _grid_groups(ranks[mine], [axes.group], axes.device), ("bands", "shard")
    if axes.replicas is None:
        return DeviceMesh.from_group(
            groups, mesh.device_type, mesh=ranks[mine], mesh_dim_names=names
        )
    groups.insert(0, axes.replicas)
    return DeviceMesh.from_group(
        groups, mesh.device_type, mesh=ranks, mesh_dim_names=("replicate", *names)
    )


def _grid_groups(
    ranks: torch.Tensor, around: list[ProcessGroup], device: torch.device
) -> list[ProcessGroup]:
    """Process groups of this rank's column and row in a grid whose ranks ``around`` join."""
    row, column = (ranks == rank_and_size()[0]).nonzero()[0].tolist()
    # In the order of the mesh's dims, which `DeviceMesh.from_group` expects.
    return new_groups(around, device, [ranks[:, column].tolist(), ranks[row].tolist()])


# ---- specs


def local_of(param: torch.Tensor) -> torch.Tensor:
    """The tensor that fully_shard lays out: a DTensor's local tensor, or the tensor itself."""
    if not isinstance(param, DTensor):
        return param
    return arrived(param._local_tensor)


def locals_of(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """`local_of` each: one call for many."""
    found: list[torch.Tensor | None] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
            # A check that costs less than the call: nearly all are plain tensors.
            if type(tensor) is not torch.Tensor:
                tensor = arrived(tensor)
        found.append(tensor)
    return found


def memory_order(param: torch.Tensor) -> tuple[int, ...] | None:
    """The order of a plain parameter's dims in memory, the first outermost.

    ``None`` if that is their own order, or if rows cannot be cut from it: memory has gaps, or dim 0
    is not outermost. For a convolution's weight in ``channels_last``: (0, 2, 3, 1).
    """
    if isinstance(param, DTensor) or param.is_contiguous():
        return None
    strides = param.stride()
    later = sorted(range(1, param.ndim), key=lambda dim: -strides[dim])
    order = (0, *later)
    return order if param.detach().permute(order).is_contiguous() else None


def joined(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """One mesh with the dims of both, made once for each pair."""
    # The world is a part of the key: equal meshes of a later one have other groups.
    return _joined(outer, inner, current_world())


@functools.lru_cache(maxsize=64)
def _joined(outer: DeviceMesh, inner: DeviceMesh, world: object) -> DeviceMesh:
    return DeviceMesh._concatenate([outer, inner])


def sharded_spec(axes: MeshAxes, param: DTensor, cut: Cut) -> DTensorSpec:
    """The spec of a parameter that was a DTensor before, which is not cut in bands."""
    meta = TensorMeta(param.size(), param.stride(), param.dtype)
    placements = axes.placements(cut)
    dim = cut.dim
    if axes.full is not None:
        return _full_spec(axes, param._spec, dim, meta)
    pieces = param._spec.num_shards_map[dim]
    if pieces > 1 and axes.group is not None:
        # The model-parallel dim is cut first, and comes after in the mesh: DTensor calls that
        # strided.
        placements = (*placements[:-1], _StridedShard(dim, split_factor=pieces))
    mesh = joined(axes.mesh, param.device_mesh)
    return DTensorSpec(mesh, (*placements, *param.placements), tensor_meta=meta)


def _full_spec(axes: MeshAxes, spec: DTensorSpec, dim: int, meta: TensorMeta) -> DTensorSpec:
    """On the full mesh; several shard dims become the one axis that they were flattened into."""
    assert axes.full is not None
    assert axes.dims is not None
    names = axes.full.mesh_dim_names or ()
    shard, copies = axes.dims.shard_names, axes.dims.replicate_names
    placements = list(spec.placements)
    for name in shard:
        position = names.index(name)
        pieces = _pieces_behind(spec, position, dim)
        placements[position] = _StridedShard(dim, split_factor=pieces) if pieces > 1 else Shard(dim)
    if len(shard) < 2:
        return DTensorSpec(axes.full, tuple(placements), tensor_meta=meta)
    meshes: list[DeviceMesh] = []
    merged: list[Placement] = []
    for name, placement in zip(names, placements, strict=True):
        if name == shard[0]:
            meshes.append(axes.mesh)
            merged += [Replicate(), placement] if copies else [placement]
        elif name not in shard and name not in copies:
            meshes.append(axes.full[name])
            merged.append(placement)
    return DTensorSpec(DeviceMesh._concatenate(meshes), tuple(merged), tensor_meta=meta)


def _pieces_behind(spec: DTensorSpec, position: int, dim: int) -> int:
    """The number of pieces into which the mesh dims after ``position`` split ``dim``."""
    pieces = 1
    for behind in range(position + 1, spec.mesh.ndim):
        placement = spec.placements[behind]
        if isinstance(placement, Shard | _StridedShard) and placement.dim == dim:
            pieces *= spec.mesh.size(behind)
    return pieces


def part_of(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and lengths of this rank's part of a DTensor; negative ones if it is none."""
    if mesh.get_coordinate() is None:  # of another mesh
        return (0,) * len(shape), (0,) * len(shape)
    # Rank in the group, not the coordinate: torch distributes and gathers in that order.
    place = [
        mesh.get_local_rank(dim) if isinstance(placement, Shard | _StridedShard) else 0
        for dim, placement in enumerate(placements)
    ]
    return part_at(place, mesh.shape, placements, shape)


def part_at(
    place: Sequence[int],
    sizes: Sequence[int],
    placements: Sequence[Placement],
    shape: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As `part_of`, of the rank at ``place`` of a mesh of these ``sizes``.

    Several dims of a mesh may shard one dim of a tensor: from left to right, but a strided one
    comes after those to its right, whose pieces its ``split_factor`` counts.
    """
    offsets, lengths = [0] * len(shape), list(shape)
    order: list[int] = []  # mesh dims that cut, in turn
    for at in reversed(range(len(sizes))):
        placement, turn = placements[at], 0
        if isinstance(placement, _StridedShard):
            pieces = 1
            while turn < len(order) and pieces < placement.split_factor:
                behind = placements[order[turn]]
                pieces *= sizes[order[turn]] if behind.is_shard(placement.dim) else 1
                turn += 1
        elif not isinstance(placement, Shard):
            if placement.is_replicate():
                continue
            return (-1,) * len(shape), (-1,) * len(shape)  # which is no part
        order.insert(turn, at)
    for at in order:
        placement = placements[at]
        assert isinstance(placement, (Shard, _StridedShard))
        dim = placement.dim
        start, lengths[dim] = piece_of(lengths[dim], sizes[at], place[at])
        offsets[dim] += start
    return tuple(offsets), tuple(lengths)


def gradient_placements(
    axes: MeshAxes, spec: DTensorSpec, found: Sequence[Placement]
) -> tuple[Placement, ...]:
    """The required placements of a model-parallel gradient before its reduction: those of the
    parameter, except on data-parallel dims of a full mesh, whose sums the reduction computes.
    """
    if axes.full is None:
        return spec.placements
    assert axes.dims is not None
    names = axes.full.mesh_dim_names or ()
    own = (*axes.dims.shard_names, *axes.dims.replicate_names)
    return tuple(
        found[i] if names[i] in own else wanted for i, wanted in enumerate(spec.placements)
    )


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The same spec for a tensor of another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype == dtype:
        return spec
    return DTensorSpec(
        spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype)
    )


def wrap_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor over ``local``, outside autograd.

    ``DTensor.__new__`` makes the whole object; its ``__init__`` does nothing, inside a dynamo guard
    that costs three times as much (4.6 of 7 µs, torch 2.13), so it is not called.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def wrap_parameter(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool) -> nn.Parameter:
    """As `wrap_local`, a parameter: ``nn.Parameter(…)`` would detach, with five times the work."""
    wrapped = DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)
    wrapped._is_param = True
    return cast(nn.Parameter, wrapped)
