"""From a mesh and a cut to DTensor placements: one rule, used for every parameter.

    DeviceMesh                     MeshAxes                        a plain parameter's placements
      (shard,)                ──>  shard                           (Shard(d),)
      (replicate, shard)      ──>  shard and replicate: HSDP       (Replicate(), Shard(d))
      any, DataParallelMeshDims ─> the dims it names               those of the full mesh

    cut in bands (`Cut`): on the mesh (bands, shard)               (Shard(0), Shard(d))
                          or (replicate, bands, shard)             (Replicate(), Shard(0), Shard(d))

A parameter that is a DTensor already (tensor or expert parallel) keeps its placements behind the
data-parallel ones, on the two meshes joined. What is laid out and moved is its local tensor. Where
the model-parallel axis shards dim d too, this rank's piece is a piece of a piece: `_StridedShard`
says so, and checkpoints agree with torch's.

    W: 8 rows, tp of 2, shard of 2     tp rank 0 has rows 0-3, of which shard rank 1 has 2-3:
                                       (_StridedShard(0, split_factor=2), Shard(0))
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parameter import UninitializedParameter

from fsdp2.core.config import DataParallelMeshDims
from fsdp2.core.device.one_off import arrived, gather_numbers
from fsdp2.core.device.process_groups import (
    ProcessGroup,
    current_world,
    default_group,
    new_groups,
    rank_and_size,
    serves,
)
from fsdp2.core.layout.layout import Cut


@dataclass(frozen=True)
class FSDPMeshInfo:
    """A mesh and which of its dims are data parallel; what a `ShardPlacementResult` carries.

    Args:
        mesh: 1-D or 2-D device mesh.
        shard_mesh_dim: the dim that parameters are sharded over.
        replicate_mesh_dim: the dim that holds copies; ``None`` (default): none.

    Example::

        FSDPMeshInfo(mesh["expert_shard"], shard_mesh_dim=0)
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None


class MeshInfo(Protocol):
    """A mesh and its data-parallel dims: ours, or an object of torch's with these attributes."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None


@dataclass(frozen=True)
class ShardPlacementResult:
    """What ``shard_placement_fn`` returns for a parameter with a mesh of its own.

    Args:
        placement: the shard dim, or those that it may be cut on; ``None`` for ``Shard(0)``.
        mesh_info: the mesh, for example of the expert-parallel ranks.
    """

    placement: Shard | tuple[Shard, ...] | None
    mesh_info: FSDPMeshInfo


@dataclass(frozen=True)
class MeshAxes:
    """The data-parallel axes of a mesh.

    Attributes:
        mesh: the data-parallel mesh: (shard,), (replicate, shard) or (replicate,).
        group: process group of the shard axis; ``None`` where nothing is sharded.
        size: its number of ranks.
        rank: this process's position on it.
        replicas: process group of the replicate axis; ``None`` without one.
        copies: its number of ranks.
        device: the device that holds gathered parameters, and shards unless they are offloaded.
        full: the full SPMD mesh that parameters must be DTensors on, if its dims were named.
        dims: the names.
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

    def placements(self, cut: Cut) -> tuple[Placement, ...]:
        """Placements on ``mesh``, or on that of a cut in bands, of a parameter that is so cut."""
        copies: tuple[Placement, ...] = (Replicate(),) if self.replicas is not None else ()
        if self.group is None:
            return copies
        bands = (Shard(0),) if cut.bands > 1 else ()
        return (*copies, *bands, Shard(cut.dim))

    def mesh_of(self, cut: Cut) -> DeviceMesh:
        """The mesh that a parameter which is so cut lies on: with two shard dims for bands.

        Makes process groups the first time (`new_groups`), which all ranks of the shard axis must
        do together.

        Raises:
            ValueError: as `new_groups`.
        """
        return self.mesh if cut.bands == 1 else _banded(self, cut.bands, current_world())

    @functools.cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh of the shard axis."""
        if self.mesh.ndim == 1:
            return self.mesh
        names = self.mesh.mesh_dim_names
        if names is None:
            raise ValueError(
                "all-gather extensions need the mesh of the shard axis; name the dims: "
                "init_device_mesh(…, mesh_dim_names=('replicate', 'shard'))"
            )
        return self.mesh[names[-1]]


# ---- axes


def default_mesh() -> DeviceMesh:
    """A 1-D mesh over the default process group, which is started from torchrun's environment
    (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) if there is none.

    The device type is the accelerator's if there is one that the group serves, else "cpu".
    """
    group = default_group()
    return init_device_mesh(_device_type(group), (group.size(),))


def _device_type(group: ProcessGroup) -> str:
    """The accelerator's if there is one that the group serves, else "cpu"."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None or not serves(group, device) else device.type


def node_mesh(
    device: torch.device,
    unset: int | None,
    caller: str,
    way_out: str,
    names: tuple[str, str] = ("replicate", "shard"),
) -> DeviceMesh:
    """All ranks as (replicate, shard): shards within a node, copies across.

    A node has ``LOCAL_WORLD_SIZE`` ranks, which torchrun sets. All ranks must call it together, and
    compare theirs: ranks that differed would make other process groups, and wait for each other.
    The same size and names give the same mesh.

    Args:
        device: of this rank, on which the default process group communicates.
        unset: the ranks of a node where the variable is not set; ``None``: that is an error.
        caller: what messages begin with.
        way_out: what they say to pass instead.
        names: of the mesh's dims.

    Raises:
        ValueError: ranks have different sizes, or theirs does not divide the number of ranks; on
            all of them.
    """
    world = default_group()
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    local = int(text) if text.isdecimal() else 0
    if not text and unset is not None:
        local, text = unset, str(unset)
    found = sorted({each[0] for each in gather_numbers(world, [local], device)})
    if len(found) > 1:
        raise ValueError(
            f"{caller} shards within a node, but LOCAL_WORLD_SIZE differs among ranks: {found}; "
            f"{way_out}"
        )
    if local < 1 or world.size() % local:
        raise ValueError(
            f"{caller} shards within a node, but LOCAL_WORLD_SIZE is {text!r}, which does not "
            f"divide {world.size()} ranks; start ranks with torchrun, or {way_out}"
        )
    return _node_mesh(device.type, local, world, names)


@functools.lru_cache(maxsize=64)
def _node_mesh(
    device_type: str, local: int, world: ProcessGroup, names: tuple[str, str]
) -> DeviceMesh:
    return init_device_mesh(device_type, (world.size() // local, local), mesh_dim_names=names)


def mesh_of_groups(groups: tuple[tuple[int, ...], ...]) -> DeviceMesh:
    """A 1-D mesh over this rank's of several groups, which know nothing of each other.

    All ranks of the default process group must call it together. The same groups get one mesh.

    Args:
        groups: ranks of the default process group, each in one of them; all groups are of one size.
            They hold pieces in ascending order, as torch numbers the ranks of a process group.

    Raises:
        ValueError: they are not like that.
    """
    world = default_mesh()  # starts the default process group
    named = sorted(rank for group in groups for rank in group)
    if named != list(range(world.size())) or len({len(group) for group in groups}) != 1:
        raise ValueError(
            f"sharding_groups={[list(group) for group in groups]} are not groups of one size that "
            f"name each of the {world.size()} ranks once; pass for example "
            f"[[0, 1], [2, 3]] for 4 ranks"
        )
    ordered = tuple(tuple(sorted(group)) for group in groups)
    return _mesh_of_groups(ordered, world.device_type, current_world())


@functools.lru_cache(maxsize=64)
def _mesh_of_groups(
    groups: tuple[tuple[int, ...], ...], device_type: str, world: object
) -> DeviceMesh:
    return DeviceMesh(device_type, torch.tensor(groups), mesh_dim_names=("group", "shard"))["shard"]


def resolve_axes(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> MeshAxes:
    """The data-parallel axes of ``mesh``.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: it has more than two dims and none is named, a name is not one of its dims, or
            this process is not part of it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"fully_shard(mesh=…) takes a torch.distributed.device_mesh.DeviceMesh, not "
            f"{type(mesh).__name__}; make one with init_device_mesh('cuda', (world_size,))"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {rank_and_size()[0]} is not part of the mesh {mesh}; call fully_shard only on "
            f"the ranks that the mesh names"
        )
    if dims is not None:
        return _named_axes(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard takes a 1-D mesh (shard) or a 2-D mesh (replicate, shard), but got one "
            f"of shape {tuple(mesh.shape)}; pass the sub-mesh to shard over, for example "
            f"mesh['shard'], or name its data-parallel dims with dp_mesh_dims"
        )
    if mesh.ndim == 1:
        return _axes(mesh, shard=0, replicate=None)
    return _axes(mesh, shard=1, replicate=0)


def axes_of_info(name: str, info: MeshInfo) -> MeshAxes:
    """The axes of an `FSDPMeshInfo` (or an object with its attributes).

    Args:
        name: the parameter that it was returned for, for messages.
        info: the mesh, and which of its dims are data parallel.
    """
    mesh = info.mesh
    shard, copies = info.shard_mesh_dim, getattr(info, "replicate_mesh_dim", None)
    if (mesh.ndim, shard, copies) not in ((1, 0, None), (1, None, 0), (2, 1, 0)):
        raise ValueError(
            f"shard_placement_fn returned the mesh {mesh} for parameter '{name}', with "
            f"shard_mesh_dim={shard} and replicate_mesh_dim={copies}; return a 1-D mesh with "
            f"shard_mesh_dim=0, or a 2-D one with shard_mesh_dim=1 and replicate_mesh_dim=0"
        )
    return _axes(mesh, None, 0) if shard is None else resolve_axes(mesh)


def _axes(mesh: DeviceMesh, shard: int | None, replicate: int | None) -> MeshAxes:
    device = device_of(mesh)
    group = None if shard is None else mesh.get_group(shard)
    replicas = None if replicate is None else mesh.get_group(replicate)
    return MeshAxes(
        mesh,
        group,
        1 if group is None else group.size(),
        0 if group is None else group.rank(),
        device,
        replicas,
        1 if replicas is None else replicas.size(),
    )


def device_of(mesh: DeviceMesh) -> torch.device:
    """This process's; of a mesh on ``meta`` that, where a step is rehearsed without memory."""
    device = torch.device(mesh.device_type)
    if device.type in ("cpu", "meta"):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _named_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> MeshAxes:
    if not hasattr(dims, "shard_names"):  # ours, or torch's
        raise TypeError(
            f"fully_shard(dp_mesh_dims=…) takes a fsdp2.DataParallelMeshDims, not {dims!r}; pass "
            f"for example DataParallelMeshDims(shard='dp')"
        )
    known = mesh.mesh_dim_names or ()
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in known:
            raise ValueError(
                f"dp_mesh_dims names the mesh dim '{name}', but the mesh has {known or 'no names'};"
                f" name its dims with init_device_mesh(…, mesh_dim_names=…)"
            )

    def part(names: tuple[str, ...]) -> DeviceMesh:
        return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))

    if not dims.replicate_names:
        axes = _axes(part(dims.shard_names), 0, None)
    elif not dims.shard_names:
        axes = _axes(part(dims.replicate_names), None, 0)
    else:
        copies, shard = part(dims.replicate_names), part(dims.shard_names)
        axes = _axes(DeviceMesh._concatenate([copies, shard]), 1, 0)
    return replace(axes, full=mesh, dims=dims)


def smaller_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """The ranks of a data-parallel mesh as (replicate, shard) with ``size`` neighbours a group.

    Makes process groups for this rank alone, so that ranks of other meshes need not take part.
    """
    return _smaller_mesh(mesh, size, tuple(mesh.get_all_groups()))


@functools.lru_cache(maxsize=64)
def _smaller_mesh(mesh: DeviceMesh, size: int, around: tuple[ProcessGroup, ...]) -> DeviceMesh:
    # Equal meshes may have different groups: of other backends and time-outs, or of another world
    # (destroyed and started again).
    ranks = mesh.mesh.view(-1, size)
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
    return new_groups(around, device, [ranks[:, column].tolist(), ranks[row].tolist()])


# ---- checks


def check_placement(name: str, param: nn.Parameter, placement: object) -> tuple[int, ...]:
    """The dims that ``shard_placement_fn`` chose for a parameter, made non-negative.

    Args:
        name: the parameter's full name, for messages.
        param: the parameter.
        placement: what ``shard_placement_fn`` returned.
    """
    dims = []
    for shard in placement if isinstance(placement, tuple) else (placement,):
        if type(shard) is not Shard:
            raise ValueError(
                f"shard_placement_fn returned {placement!r} for parameter '{name}'; return a "
                f"torch.distributed.tensor.Shard, a tuple of them, a ShardPlacementResult or None"
            )
        dim = shard.dim + param.ndim if shard.dim < 0 else shard.dim
        if not 0 <= dim < param.ndim:
            raise ValueError(
                f"shard_placement_fn returned Shard({shard.dim}) for parameter '{name}' of shape "
                f"{tuple(param.shape)}; choose a dim below {param.ndim}"
            )
        dims.append(dim)
    if not dims:
        raise ValueError(
            f"shard_placement_fn returned () for parameter '{name}'; name at least one dim, for "
            f"example (Shard(0), Shard(1)), or return None"
        )
    return tuple(dims)


def check_shardable(name: str, param: nn.Parameter, axes: MeshAxes) -> None:
    """Raise, naming the parameter, if it is of a kind that cannot be sharded over ``axes``."""
    if axes.full is not None:
        _check_on_full_mesh(name, param, axes)
    elif isinstance(param, DTensor):
        _check_apart(name, param, axes)
    if isinstance(param, UninitializedParameter):
        raise ValueError(
            f"parameter '{name}' has no shape yet, since it belongs to a lazy module; run a "
            f"forward with a batch like the real ones before fully_shard"
        )
    if param.layout is not torch.strided:
        raise ValueError(
            f"parameter '{name}' is a tensor of layout {param.layout}, which has no rows to "
            f"shard; make it dense with to_dense(), or pass it in ignored_params"
        )
    if param.ndim == 0:
        raise ValueError(
            f"parameter '{name}' is a scalar and has no dim to shard; make it a 1-D tensor of "
            f"one element, for example nn.Parameter(torch.zeros(1))"
        )
    if not local_of(param).is_contiguous() and memory_order(param) is None:
        raise ValueError(
            f"parameter '{name}' is not contiguous (shape {tuple(param.shape)}, stride "
            f"{param.stride()}); replace it by nn.Parameter(param.detach().contiguous()) before "
            f"fully_shard"
        )


def _check_apart(name: str, param: DTensor, axes: MeshAxes) -> None:
    if any(placement.is_partial() for placement in param.placements):
        raise ValueError(
            f"parameter '{name}' is a DTensor with partial values ({param.placements}); "
            f"redistribute it to Shard or Replicate before fully_shard"
        )
    mesh = param.device_mesh
    if mesh.device_type != axes.mesh.device_type:
        raise ValueError(
            f"parameter '{name}' is a DTensor on a {mesh.device_type} mesh, but fully_shard got a "
            f"{axes.mesh.device_type} mesh; make both from one init_device_mesh"
        )
    try:
        joined(axes.mesh, mesh)
    except Exception as error:
        raise ValueError(
            f"parameter '{name}' is already a DTensor on {mesh}, which cannot be joined with the "
            f"data-parallel mesh {axes.mesh} ({error}); shard each module once, children before "
            f"parents, and take both meshes from one init_device_mesh with named dims"
        ) from error


def _check_on_full_mesh(name: str, param: nn.Parameter, axes: MeshAxes) -> None:
    if not isinstance(param, DTensor):
        raise ValueError(
            f"parameter '{name}' is a plain tensor, but dp_mesh_dims asks for DTensors on the full "
            f"mesh; call distribute_module(model, mesh) first, or leave dp_mesh_dims out"
        )
    if param.device_mesh != axes.full:
        raise ValueError(
            f"parameter '{name}' is a DTensor on {param.device_mesh}, not on the mesh that "
            f"fully_shard got, {axes.full}; distribute it on that mesh"
        )
    assert axes.dims is not None
    names = axes.full.mesh_dim_names or ()
    for dim in (*axes.dims.shard_names, *axes.dims.replicate_names):
        placement = param.placements[names.index(dim)]
        if not placement.is_replicate():
            raise ValueError(
                f"parameter '{name}' is {placement} on the data-parallel mesh dim '{dim}'; it must "
                f"be Replicate() there, for fully_shard to shard it"
            )


# ---- specs


def local_of(param: torch.Tensor) -> torch.Tensor:
    """What fully_shard lays out: a DTensor's local tensor, there by now, or the tensor itself."""
    if not isinstance(param, DTensor):
        return param
    return arrived(param._local_tensor)


def memory_order(param: torch.Tensor) -> tuple[int, ...] | None:
    """The order in which the dims of a plain parameter lie in memory, the first outermost.

    ``None`` if that is their own order, or if it is no order that rows can be cut from: memory has
    gaps, or dim 0 is not outermost. Of a convolution's weight in ``channels_last``: (0, 2, 3, 1).
    """
    if isinstance(param, DTensor) or param.is_contiguous():
        return None
    strides = param.stride()
    later = sorted(range(1, param.ndim), key=lambda dim: -strides[dim])
    order = (0, *later)
    return order if param.detach().permute(order).is_contiguous() else None


def joined(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """One mesh with the dims of both, made once for each pair."""
    return _joined(outer, inner, current_world())


@functools.lru_cache(maxsize=64)
def _joined(outer: DeviceMesh, inner: DeviceMesh, world: object) -> DeviceMesh:
    return DeviceMesh._concatenate([outer, inner])


def sharded_spec(axes: MeshAxes, param: torch.Tensor, cut: Cut) -> DTensorSpec:
    """The spec of a parameter of this global shape and dtype; a DTensor is not cut in bands."""
    meta = TensorMeta(param.size(), param.stride(), param.dtype)
    placements = axes.placements(cut)
    if not isinstance(param, DTensor):
        return DTensorSpec(axes.mesh_of(cut), placements, tensor_meta=meta)
    dim = cut.dim
    if axes.full is not None:
        return _full_spec(axes, param._spec, dim, meta)
    pieces = param._spec.num_shards_map[dim]
    if pieces > 1 and axes.group is not None:
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
    """Into how many pieces the mesh dims behind ``position`` cut ``dim``."""
    pieces = 1
    for behind in range(position + 1, spec.mesh.ndim):
        placement = spec.placements[behind]
        if isinstance(placement, Shard | _StridedShard) and placement.dim == dim:
            pieces *= spec.mesh.size(behind)
    return pieces


def gradient_placements(
    axes: MeshAxes, spec: DTensorSpec, found: Sequence[Placement]
) -> tuple[Placement, ...]:
    """What a model-parallel gradient must be before it is reduced: as the parameter, except on
    data-parallel dims of a full mesh, whose sums the reduction makes.

    Args:
        axes: the data-parallel axes.
        spec: the parameter's spec before sharding.
        found: the gradient's placements.
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

    ``DTensor.__new__`` makes the whole object; its ``__init__`` does nothing, inside a
    dynamo guard that costs three times as much (4.6 of 7 µs, torch 2.13), so it is not called.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)
