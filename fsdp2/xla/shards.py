"""This rank's rows as plain tensors, and the metadata that identifies the rows.

    state dict of a sharded model  ── local ──>   plain tensors: this rank's rows
                                   <── whole ──   DTensors over such rows
    model ── describe ──> ShardInfo of each parameter: shape, and the dim on which it is sharded

Equal pieces: for a dim of n elements over N ranks, rank r holds [r·c, (r+1)·c), c = ceil(n / N).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict

import torch
from torch.distributed.tensor import DTensor, Shard

from fsdp2.core.errors import coded
from fsdp2.core.facts import piece_of

FORMAT = "fsdp2.xla 1"
"""Identifies fsdp2's files, and their version, in each rank's metadata."""


class ShardInfo(TypedDict):
    """One parameter: its shape, and the dim on which it is sharded into one piece per rank."""

    shape: list[int]
    dim: int


class ShardMetadata(TypedDict):
    """The result of `XlaFullyShardedDataParallel.get_shard_metadata`: only plain values."""

    format: str
    rank: int
    world_size: int
    shard_info: dict[str, ShardInfo]
    buffer_info: dict[str, str]
    flatten_info: dict[str, object]


def local_shape(info: ShardInfo, world_size: int, rank: int) -> tuple[int, ...]:
    """The shape of a rank's piece."""
    shape, dim = info["shape"], info["dim"]
    _, rows = piece_of(shape[dim], world_size, rank)
    return (*shape[:dim], rows, *shape[dim + 1 :])


def describe(params: Iterable[tuple[str, torch.Tensor]], world_size: int) -> dict[str, ShardInfo]:
    """The metadata that identifies the rows of a state dict."""
    found: dict[str, ShardInfo] = {}
    for name, param in params:
        if not isinstance(param, DTensor):
            continue
        *outer, placement = param.placements
        # Copies on other dims of the mesh are other ranks' affair: each group has all rows.
        alone = type(placement) is Shard and all(each.is_replicate() for each in outer)
        if not alone or param.device_mesh.size(-1) != world_size:
            raise coded(
                ValueError,
                "xla-other-mesh",
                f"parameter '{name}' is {param.placements} on a mesh of "
                f"{tuple(param.device_mesh.shape)}, not sharded on one dim over the {world_size} "
                f"ranks of its wrapper; save it with torch.distributed.checkpoint",
            )
        assert isinstance(placement, Shard)
        found[name] = {"shape": list(param.shape), "dim": placement.dim}
    return found


def local(value: object) -> object:
    """The rows of a DTensor, as a plain tensor; all else as it is."""
    return value.to_local().detach() if isinstance(value, DTensor) else value


def whole(name: str, value: object, param: torch.Tensor) -> object:
    """The value to load into ``param``: a DTensor over ``value``, this rank's rows."""
    if not isinstance(param, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        return value
    rows = param.to_local()
    if value.shape != rows.shape:
        raise coded(
            ValueError,
            "xla-foreign-rows",
            f"'{name}' is {tuple(value.shape)} in the state dict, but this rank's rows are "
            f"{tuple(rows.shape)} of {tuple(param.shape)}; load the file that this rank saved, or "
            f"load a full state dict before wrapping",
        )
    return DTensor.from_local(
        value.to(rows.device),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def check_metadata(metadata: object, where: str) -> ShardMetadata:
    """``metadata`` itself, if `describe` made it."""
    found = metadata.get("format") if isinstance(metadata, Mapping) else None
    if found != FORMAT:
        raise coded(
            ValueError,
            "xla-foreign",
            f"{where} has no shard_metadata of this version of fsdp2.xla; save the result of "
            f"get_shard_metadata() with the state dict, on each rank",
        )
    return metadata  # type: ignore[return-value]  # said by its format
