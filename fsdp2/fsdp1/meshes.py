"""Which ranks a wrapper shards over: from process groups, a mesh and a device to one mesh.

    process_group, a group            ──>  (shard,)
    process_group, a pair             ──>  (replicate, shard), of the second and the first
    device_mesh                       ──>  itself
    none of them, hybrid              ──>  (nodes, ranks of a node)
    none of them                      ──>  (world,)

The same arguments give the same mesh, so that wrappers share process groups. Dims of those that are
made here have names of their own: no mesh of `fully_shard` equals them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2.core.errors import coded
from fsdp2.core.facts import ProcessGroup, default_group, gather_numbers, ranks_of, serves
from fsdp2.wrap.sharding import node_mesh

DIMS = "fsdp1_replicate", "fsdp1_shard"


def device_of(
    module: nn.Module, device_id: int | torch.device | None, group: ProcessGroup | None
) -> torch.device:
    """The device that a wrapper computes on.

    It is the device that ``device_id`` says, else the one that parameters are on, else the
    accelerator if there is one that the process group serves, else the CPU.
    """
    if device_id is not None:
        return _chosen(device_id)
    for param in module.parameters():
        if param.device.type not in ("cpu", "meta"):
            return param.device
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or not serves(group or default_group(), found):
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


def _chosen(device_id: int | torch.device) -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device_id, int):
        if found is None:
            raise coded(
                ValueError,
                "fsdp1-no-accelerator",
                f"FullyShardedDataParallel(device_id={device_id}) names an accelerator, but there "
                f"is none; pass torch.device('cpu')",
            )
        device_id = torch.device(found.type, device_id)
    device = torch.device(device_id)
    if device.type == "cpu" or found is None:
        return device
    current = torch.accelerator.current_device_index()
    if device.index is not None and device.index != current:
        raise coded(
            ValueError,
            "fsdp1-other-device",
            f"FullyShardedDataParallel(device_id={device}) is not the current device, which is "
            f"{device.type}:{current}; call torch.accelerator.set_device_index({device.index}) "
            f"before",
        )
    return torch.device(device.type, current)


def mesh_of(
    process_group: object, device_mesh: object, hybrid: bool, device: torch.device
) -> DeviceMesh:
    """The mesh of a wrapper: (shard,), or (replicate, shard) where ``hybrid``.

    Makes process groups the first time where it is given none, which all ranks must do together.
    """
    if process_group is not None and device_mesh is not None:
        raise coded(
            ValueError,
            "fsdp1-group-and-mesh",
            "FullyShardedDataParallel got process_group and device_mesh; pass one of them",
        )
    if device_mesh is not None:
        return _checked_mesh(device_mesh, hybrid)
    if process_group is None and hybrid:
        seen = default_group().size() if device.type == "cpu" else torch.accelerator.device_count()
        way_out = "pass device_mesh, (replicate, shard), or a pair of process groups"
        return node_mesh(device, seen, "FullyShardedDataParallel", way_out, DIMS)
    if process_group is None:
        return _world_mesh(device.type, default_group())
    groups = tuple(process_group) if isinstance(process_group, tuple | list) else (process_group,)
    if not all(isinstance(group, ProcessGroup) for group in groups):
        raise coded(
            TypeError,
            "fsdp1-group-type",
            f"FullyShardedDataParallel(process_group=…) takes a process group, or a pair of them "
            f"to shard and to copy over, not {process_group!r}",
        )
    if len(groups) != (2 if hybrid else 1):
        wanted = "a pair of groups, to shard and to copy over" if hybrid else "one group"
        raise coded(
            ValueError,
            "fsdp1-group-count",
            f"FullyShardedDataParallel(process_group=…) got {len(groups)} process group(s), but "
            f"the sharding strategy needs {wanted}; pass that many, or choose another strategy",
        )
    return _group_mesh(device, groups)


def _checked_mesh(mesh: object, hybrid: bool) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise coded(
            TypeError,
            "fsdp1-mesh-type",
            f"FullyShardedDataParallel(device_mesh=…) takes a "
            f"torch.distributed.device_mesh.DeviceMesh, not {mesh!r}",
        )
    dims = 2 if hybrid else 1
    if mesh.ndim != dims:
        shape = "(replicate, shard)" if hybrid else "(shard,)"
        raise coded(
            ValueError,
            "fsdp1-mesh-dims",
            f"FullyShardedDataParallel(device_mesh=…) got a mesh of {mesh.ndim} dim(s), but the "
            f"sharding strategy needs a mesh of {dims}, {shape}; pass such a mesh, or choose "
            f"another strategy",
        )
    return mesh


@functools.lru_cache(maxsize=64)
def _world_mesh(device_type: str, world: ProcessGroup) -> DeviceMesh:
    return init_device_mesh(device_type, (world.size(),), mesh_dim_names=DIMS[1:])


@functools.lru_cache(maxsize=64)
def _group_mesh(device: torch.device, groups: Sequence[ProcessGroup]) -> DeviceMesh:
    """A mesh over groups that the user made: (shard,), or of a pair (replicate, shard)."""
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=DIMS[1:])
    shard, copies = groups
    rows = gather_numbers(copies, ranks_of(shard), device)
    return DeviceMesh.from_group(
        [copies, shard],
        device.type,
        mesh=torch.tensor(rows, dtype=torch.int),
        mesh_dim_names=DIMS,
    )
