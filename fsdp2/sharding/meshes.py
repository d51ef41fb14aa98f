"""Which mesh a call shards over, and whether a parameter can be: from arguments to `MeshAxes`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parameter import UninitializedParameter

from fsdp2.core.config import DataParallelMeshDims
from fsdp2.core.device.process_groups import ProcessGroup, new_groups, rank_and_size
from fsdp2.core.errors import coded
from fsdp2.core.layout.mesh import MeshAxes, device_of, joined, memory_order
from fsdp2.core.params.param import is_extended


@dataclass(frozen=True)
class FSDPMeshInfo:
    """A mesh and its data-parallel dims, for `ShardPlacementResult`.

    Args:
        mesh: 1-D or 2-D device mesh.
        shard_mesh_dim: the dim over which parameters are sharded.
        replicate_mesh_dim: the dim over which they are replicated; ``None`` (default): none.

    Example::

        FSDPMeshInfo(mesh["expert_shard"], shard_mesh_dim=0)
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None


class Levels:
    """A mesh (between, inside) over both of whose dims parameters are sharded, for ``mesh=``.

    Parameters are gathered and gradients are reduced inside: along the second dim, over the ranks
    of a node. Master parameters, the last micro-batch's gradients and optimizer states are sharded
    over all ranks: dim 0 of a parameter is split into one piece per rank of a node, and each piece
    into one per node.

    A dim with one rank does not form a level: parameters are then sharded along the other, on a
    mesh of that dim.

    Args:
        mesh: a 2-D device mesh (between, inside).

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: it does not have two dims.

    Example::

        mesh = init_device_mesh("cuda", (4, 8), mesh_dim_names=("node", "local"))
        fully_shard(block, mesh=Levels(mesh))
    """

    __slots__ = ("mesh",)

    def __init__(self, mesh: DeviceMesh) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise coded(
                TypeError,
                "levels-mesh",
                f"Levels takes a DeviceMesh (between, inside), not {type(mesh).__name__}; make one "
                f"with init_device_mesh('cuda', (nodes, ranks of a node))",
            )
        if mesh.ndim != 2:
            raise coded(
                ValueError,
                "levels-dims",
                f"Levels takes a 2-D mesh (between, inside), but got one of shape "
                f"{tuple(mesh.shape)}; make one with init_device_mesh, or pass the mesh without "
                f"Levels",
            )
        self.mesh = mesh

    def __repr__(self) -> str:
        return f"Levels({self.mesh})"


@dataclass(frozen=True)
class ShardPlacementResult:
    """The return value of ``shard_placement_fn`` for a parameter with a separate mesh.

    Args:
        placement: the shard dim, or the allowed dims; ``None`` for ``Shard(0)``; ``Replicate()``:
            the parameter is replicated on the mesh's ranks.
        mesh_info: the mesh, for example of the expert-parallel ranks.
    """

    placement: Shard | tuple[Shard, ...] | Replicate | None
    mesh_info: FSDPMeshInfo


# ---- axes


def resolve_axes(mesh: DeviceMesh | Levels, dims: DataParallelMeshDims | None = None) -> MeshAxes:
    """The data-parallel axes of ``mesh``; raises if they are ambiguous, or ranks not ascending."""
    if isinstance(mesh, Levels):
        if dims is not None:
            raise coded(
                ValueError,
                "levels-named-dims",
                "fully_shard(mesh=Levels(…)) takes no dp_mesh_dims, because DTensors on a full "
                "mesh cannot be sharded over two levels yet; pass Levels or dp_mesh_dims, not "
                "both",
            )
        return _axes_of_levels(mesh.mesh)
    if not isinstance(mesh, DeviceMesh):
        raise coded(
            TypeError,
            "mesh-type",
            f"fully_shard(mesh=…) takes a torch.distributed.device_mesh.DeviceMesh, not "
            f"{type(mesh).__name__}; make one with init_device_mesh('cuda', (world_size,))",
        )
    _check_member(mesh)
    if dims is not None:
        return _named_axes(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise coded(
            ValueError,
            "mesh-dims",
            f"fully_shard takes a 1-D mesh (shard) or a 2-D mesh (replicate, shard), but got one "
            f"of shape {tuple(mesh.shape)}; pass the sub-mesh to shard over, for example "
            f"mesh['shard'], or name its data-parallel dims with dp_mesh_dims",
        )
    if mesh.ndim == 1:
        return _axes(mesh, shard=0, replicate=None)
    return _axes(mesh, shard=1, replicate=0)


def _check_member(mesh: DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        raise coded(
            ValueError,
            "mesh-without-this-rank",
            f"rank {rank_and_size()[0]} is not part of the mesh {mesh}; call fully_shard only on "
            f"the ranks that the mesh names",
        )


def _axes_of_levels(mesh: DeviceMesh) -> MeshAxes:
    _check_member(mesh)
    for dim in (0, 1):
        if mesh.size(dim) == 1:
            group = mesh.get_group(1 - dim)
            return _axes(_line_mesh(mesh.device_type, group), 0, None)
    _check_ascending("fully_shard(mesh=…)", mesh, 0)  # which holds pieces of shards here
    return replace(_axes(mesh, shard=1, replicate=0), levels=True)


@functools.lru_cache(maxsize=64)
def _line_mesh(device_type: str, group: ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type)


def axes_of_info(name: str, info: FSDPMeshInfo) -> MeshAxes:
    """The axes of an `FSDPMeshInfo` (or an object with its attributes), for one parameter."""
    mesh = info.mesh
    shard, copies = info.shard_mesh_dim, getattr(info, "replicate_mesh_dim", None)
    if (mesh.ndim, shard, copies) not in ((1, 0, None), (1, None, 0), (2, 1, 0)):
        raise coded(
            ValueError,
            "placement-mesh",
            f"shard_placement_fn returned the mesh {mesh} for parameter '{name}', with "
            f"shard_mesh_dim={shard} and replicate_mesh_dim={copies}; return a 1-D mesh with "
            f"shard_mesh_dim=0, or a 2-D one with shard_mesh_dim=1 and replicate_mesh_dim=0",
        )
    return _axes(mesh, None, 0) if shard is None else resolve_axes(mesh)


def _axes(mesh: DeviceMesh, shard: int | None, replicate: int | None) -> MeshAxes:
    if shard is not None:
        _check_ascending("fully_shard(mesh=…)", mesh, shard)
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


def whole_axes(axes: MeshAxes) -> MeshAxes:
    """The axes of parameters that stay whole on all ranks of ``axes``, shards and copies alike; a
    mesh of several ranks on both dims gets a process group of all, which they must make together.
    """
    group, replicas = axes.group, axes.replicas
    if group is None or (replicas is not None and axes.size == 1):
        every = replicas
    elif replicas is None or axes.copies == 1:
        every = group
    else:
        every = _group_of_all(axes.mesh, (group, replicas), axes.device)
    assert every is not None
    dims = axes.dims
    if dims is not None:
        dims = DataParallelMeshDims(replicate=(*dims.shard_names, *dims.replicate_names))
    found = MeshAxes(axes.mesh, None, 1, 0, axes.device, every, every.size())
    return replace(found, full=axes.full, dims=dims, whole=True)


@functools.lru_cache(maxsize=64)
def _group_of_all(
    mesh: DeviceMesh, around: tuple[ProcessGroup, ...], device: torch.device
) -> ProcessGroup:
    (made,) = new_groups(around, device, [sorted(mesh.mesh.flatten().tolist())])
    return made


def _named_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> MeshAxes:
    if not hasattr(dims, "shard_names"):  # ours, or torch's
        raise coded(
            TypeError,
            "dims-type",
            f"fully_shard(dp_mesh_dims=…) takes a fsdp2.DataParallelMeshDims, not {dims!r}; pass "
            f"for example DataParallelMeshDims(shard='dp')",
        )
    known = mesh.mesh_dim_names or ()
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in known:
            raise coded(
                ValueError,
                "dims-unknown",
                f"dp_mesh_dims names the mesh dim '{name}', but the mesh has {known or 'no names'};"
                f" name its dims with init_device_mesh(…, mesh_dim_names=…)",
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


# ---- checks


def _check_ascending(what: str, mesh: DeviceMesh, dim: int) -> None:
    """Raise if rows would not be where torch's checkpoints expect them."""
    line = _unsorted_line(mesh, dim)
    if line is not None:
        raise coded(
            ValueError,
            "mesh-order",
            f"{what} shards over the ranks {line} in this order, but process groups number them in "
            f"ascending order, so that checkpoints would exchange rows; make the mesh with "
            f"ascending ranks on each dim that shards",
        )


@functools.lru_cache(maxsize=64)  # torch computes a mesh's ranks anew each time
def _unsorted_line(mesh: DeviceMesh, dim: int) -> list[int] | None:
    """Ranks along ``dim`` that do not ascend, if any do not.

    Rows are communicated by the rank in a process group, which torch sorts; DCP derives a row's
    offset from the coordinate in the mesh. All ranks of the mesh from which ``mesh`` was sliced
    find the line, because they know all of them.
    """
    names, root = mesh.mesh_dim_names, mesh._get_root_mesh()
    name = None if names is None else names[dim]
    if name in (root.mesh_dim_names or ()):
        mesh, dim = root, (root.mesh_dim_names or ()).index(name)
    lines: list[list[int]] = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
    return next((line for line in lines if line != sorted(line)), None)


def check_placement(name: str, param: nn.Parameter, placement: object) -> tuple[int, ...]:
    """The dims that ``shard_placement_fn`` chose for a parameter, made non-negative."""
    dims = []
    for shard in placement if isinstance(placement, tuple) else (placement,):
        if type(shard) is not Shard:
            raise coded(
                ValueError,
                "placement-type",
                f"shard_placement_fn returned {placement!r} for parameter '{name}'; return a "
                f"torch.distributed.tensor.Shard, a tuple of them, Replicate(), a "
                f"ShardPlacementResult or None",
            )
        dim = shard.dim + param.ndim if shard.dim < 0 else shard.dim
        if not 0 <= dim < param.ndim:
            raise coded(
                ValueError,
                "placement-dim",
                f"shard_placement_fn returned Shard({shard.dim}) for parameter '{name}' of shape "
                f"{tuple(param.shape)}; choose a dim below {param.ndim}",
            )
        dims.append(dim)
    if not dims:
        raise coded(
            ValueError,
            "placement-empty",
            f"shard_placement_fn returned () for parameter '{name}'; name at least one dim, for "
            f"example (Shard(0), Shard(1)), or return None",
        )
    return tuple(dims)


def check_shardable(name: str, param: nn.Parameter, local: torch.Tensor, axes: MeshAxes) -> None:
    """Raise, naming the parameter, if it is of a kind that cannot be sharded over ``axes``."""
    if axes.full is not None:
        _check_on_full_mesh(name, param, axes)
    elif axes.levels and (isinstance(param, DTensor) or is_extended(local)):
        what = "a DTensor already" if isinstance(param, DTensor) else "of a class with hooks"
        raise coded(
            ValueError,
            "levels-dtensor",
            f"parameter '{name}' is {what}, and cannot be sharded over two levels yet; pass the "
            f"2-D mesh without Levels to replicate between nodes (HSDP), or let "
            f"shard_placement_fn return a ShardPlacementResult with another mesh for it",
        )
    elif isinstance(param, DTensor):
        _check_apart(name, param, axes)
    if isinstance(param, DTensor):
        for dim, placement in enumerate(param.placements):
            if not placement.is_replicate():
                _check_ascending(f"parameter '{name}'", param.device_mesh, dim)
    if isinstance(param, UninitializedParameter):
        raise coded(
            ValueError,
            "lazy-parameter",
            f"parameter '{name}' has no shape yet, because it belongs to a lazy module; run a "
            f"forward with a batch like the real ones before fully_shard",
        )
    if param.layout is not torch.strided:
        raise coded(
            ValueError,
            "sparse-parameter",
            f"parameter '{name}' is a tensor of layout {param.layout}, which has no rows to "
            f"shard; make it dense with to_dense(), or pass it in ignored_params",
        )
    if param.ndim == 0:
        raise coded(
            ValueError,
            "scalar-parameter",
            f"parameter '{name}' is a scalar and has no dim to shard; make it a 1-D tensor of "
            f"one element, for example nn.Parameter(torch.zeros(1))",
        )
    if not local.is_contiguous() and memory_order(param) is None:
        raise coded(
            ValueError,
            "non-contiguous-parameter",
            f"parameter '{name}' is not contiguous (shape {tuple(param.shape)}, stride "
            f"{param.stride()}); replace it by nn.Parameter(param.detach().contiguous()) before "
            f"fully_shard",
        )


def _check_apart(name: str, param: DTensor, axes: MeshAxes) -> None:
    if any(placement.is_partial() for placement in param.placements):
        raise coded(
            ValueError,
            "partial-parameter",
            f"parameter '{name}' is a DTensor with partial values ({param.placements}); "
            f"redistribute it to Shard or Replicate before fully_shard",
        )
    mesh = param.device_mesh
    if mesh.device_type != axes.mesh.device_type:
        raise coded(
            ValueError,
            "other-device-mesh",
            f"parameter '{name}' is a DTensor on a {mesh.device_type} mesh, but fully_shard got a "
            f"{axes.mesh.device_type} mesh; make both from one init_device_mesh",
        )
    try:
        joined(axes.mesh, mesh)
    except Exception as error:
        raise coded(
            ValueError,
            "meshes-not-joined",
            f"parameter '{name}' is already a DTensor on {mesh}, which cannot be joined with the "
            f"data-parallel mesh {axes.mesh} ({error}); shard each module once, children before "
            f"parents, and take both meshes from one init_device_mesh with named dims",
        ) from error


def _check_on_full_mesh(name: str, param: nn.Parameter, axes: MeshAxes) -> None:
    if not isinstance(param, DTensor):
        raise coded(
            ValueError,
            "plain-on-full-mesh",
            f"parameter '{name}' is a plain tensor, but dp_mesh_dims asks for DTensors on the full "
            f"mesh; call distribute_module(model, mesh) first, or leave dp_mesh_dims out",
        )
    if param.device_mesh != axes.full:
        raise coded(
            ValueError,
            "other-full-mesh",
            f"parameter '{name}' is a DTensor on {param.device_mesh}, not on the mesh that "
            f"fully_shard got, {axes.full}; distribute it on that mesh",
        )
    assert axes.dims is not None
    names = axes.full.mesh_dim_names or ()
    for dim in (*axes.dims.shard_names, *axes.dims.replicate_names):
        placement = param.placements[names.index(dim)]
        if not placement.is_replicate():
            raise coded(
                ValueError,
                "not-replicated",
                f"parameter '{name}' is {placement} on the data-parallel mesh dim '{dim}'; "
                f"redistribute it to Replicate() on that dim, so that fully_shard can shard it",
            )
