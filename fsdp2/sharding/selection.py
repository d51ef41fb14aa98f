"""Which parameters a call of `fully_shard` takes, and whether they can be sharded.

modules ── managed_parameters ──> parameter -> the entries that hold it
        ── plan_parameters ──> a PlannedParam each: axes, cut, dtype; or an error that names it
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2.core.config import MixedPrecisionPolicy
from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.errors import coded
from fsdp2.core.gather.extension import RELEASE_HOOK, check_hooks
from fsdp2.core.layout.layout import Cut, default_cut
from fsdp2.core.layout.mesh import MeshAxes, local_of, memory_order
from fsdp2.core.modules.registrations import is_managed
from fsdp2.core.modules.registry import UnitRecord
from fsdp2.core.modules.walks import managed_modules
from fsdp2.core.params.param import OWNER, ModuleEntry, PlannedParam, is_extended
from fsdp2.core.pieces import ceil_div
from fsdp2.sharding.meshes import (
    ShardPlacementResult,
    axes_of_info,
    check_placement,
    check_shardable,
    whole_axes,
)

Placed = Shard | tuple[Shard, ...] | Replicate | ShardPlacementResult | None
"""A choice for a parameter."""

PlacementFn = Callable[[nn.Parameter], Placed]
"""The type of ``shard_placement_fn``."""


def whole_below(numel: int, otherwise: PlacementFn | None = None) -> PlacementFn:
    """Return a ``shard_placement_fn`` that replicates small parameters on every rank.

    They are never gathered, and their gradients are all-reduced together, once per backward.

    Args:
        numel: parameters with fewer elements are replicated.
        otherwise: the ``shard_placement_fn`` of others. ``None`` (default): default placements.

    Raises:
        ValueError: ``numel`` is negative.

    Example::

        fully_shard(block, shard_placement_fn=fsdp2.whole_below(16_384))
    """
    if numel < 0:
        raise coded(
            ValueError,
            "whole-below",
            f"whole_below takes a number of elements from 0, below which parameters are "
            f"replicated, not {numel}; pass 0 to shard all of them",
        )

    def choose(param: nn.Parameter) -> Placed:
        if param.numel() < numel:
            return Replicate()
        return None if otherwise is None else otherwise(param)

    return choose


class NamedEntry(NamedTuple):
    """An entry that holds a parameter, and the parameter's full name.

    Attributes:
        module: what registers it.
        key: its name there.
        name: its name below the sharded module.
    """

    module: nn.Module
    key: str
    name: str


def managed_parameters(
    modules: tuple[nn.Module, ...],
    ignored: set[nn.Parameter],
    new_to: UnitRecord | None = None,
    pending: Set[nn.Module] = frozenset(),
) -> dict[nn.Parameter, list[NamedEntry]]:
    """Parameters below ``modules`` that no other unit has; ``new_to`` a unit: those it has not.

    Those that are tied to another unit's are among them. Modules ``pending`` are to be units.
    """
    found: dict[nn.Parameter, list[NamedEntry]] = {}
    for owner, prefix in managed_modules(modules, pending=pending):
        for key, param in owner._parameters.items():
            if param is None or param in ignored:
                continue
            if new_to is not None and (is_managed(owner, key) or (owner, key) in new_to.ignored):
                continue
            found.setdefault(param, []).append(NamedEntry(owner, key, prefix + key))
    return found


def entries_of(modules: tuple[nn.Module, ...], params: set[nn.Parameter]) -> set[ModuleEntry]:
    """The entries in which ``modules``, and those below, register any of ``params``."""
    if not params:
        return set()
    return {
        (owner, key)
        for owner, _ in managed_modules(modules, into_units=True)
        for key, param in owner._parameters.items()
        if param is not None and param in params
    }


def plan_parameters(
    found: dict[nn.Parameter, list[NamedEntry]],
    axes: MeshAxes,
    choose: PlacementFn | None,
    policy: MixedPrecisionPolicy,
) -> list[PlannedParam]:
    """A plan for each parameter; raises, naming it, if one cannot be sharded."""
    plans = []
    meshes: dict[tuple[ProcessGroup | None, ProcessGroup | None], MeshAxes] = {}
    whole: dict[int, MeshAxes] = {}  # of axes' ids
    plain: dict[str, torch.Tensor] = {}  # local tensors whose memory is cut
    for param, entries in found.items():
        name = entries[0].name
        if OWNER in param.__dict__:
            _check_unowned(entries[0], param)
        placement: Any = choose(param) if choose is not None else None
        own = axes
        if hasattr(placement, "mesh_info"):  # ours, or torch's
            found_axes = axes_of_info(name, placement.mesh_info)
            groups = (found_axes.group, found_axes.replicas)
            own = meshes.setdefault(groups, found_axes)
            if groups == (axes.group, axes.replicas) and not axes.levels:
                own = axes
            placement = placement.placement
        if isinstance(placement, Replicate):
            _check_plain(name, param)
            if id(own) not in whole:
                whole[id(own)] = whole_axes(own)
            own, placement = whole[id(own)], None
        check_shardable(name, param, own)
        _check_renormalised(name, entries)
        dims = None if placement is None else check_placement(name, param, placement)
        local = local_of(param)
        extended = is_extended(local)
        order = memory_order(param)
        cut = _cut(param, local, extended, own, dims if order is None or dims is not None else (0,))
        if order is not None and (cut.dims != (0,) or extended):
            raise coded(
                ValueError,
                "non-contiguous-dim",
                f"parameter '{name}' is not contiguous (stride {param.stride()}), so it can be "
                f"sharded on dim 0 only, not on {cut}; let shard_placement_fn return None for it, "
                f"or replace it by nn.Parameter(param.detach().contiguous()) before fully_shard",
            )
        if extended or hasattr(local, RELEASE_HOOK):
            check_hooks(name, local, cut, local.shape[cut.dim] % own.size == 0)
        if extended:
            _ = own.shard_mesh  # its hooks get this mesh, which must have a name
        else:
            plain[name] = local
        where: list[ModuleEntry] = list(map(operator.itemgetter(0, 1), entries))
        override = policy.overridden_dtype(name, param)
        plans.append(PlannedParam(name, param, where, own, cut, override))
    _check_memory(plain)
    return plans


def _cut(
    param: nn.Parameter,
    local: torch.Tensor,
    extended: bool,
    axes: MeshAxes,
    dims: tuple[int, ...] | None,
) -> Cut:
    """The cut of a parameter, on the dims that its owner named."""
    if extended:
        named = (0,) if dims is None else dims  # its hooks may know no other
        even = (dim for dim in named if dim == 0 or local.shape[dim] % axes.size == 0)
        return Cut(next(even, named[0]))
    shape = tuple(local.shape)
    if isinstance(param, DTensor):  # the largest piece, which all ranks know (I1)
        pieces = param._spec.num_shards_map
        shape = tuple(ceil_div(n, p) for n, p in zip(param.shape, pieces, strict=True))
    bands = not (isinstance(param, DTensor) or axes.levels)  # whose mesh has no dim to split
    return default_cut(shape, axes.size, param.element_size(), dims, bands)


def _check_plain(name: str, param: nn.Parameter) -> None:
    if is_extended(local_of(param)):
        raise coded(
            ValueError,
            "placement-whole-extension",
            f"shard_placement_fn returned Replicate() for parameter '{name}', whose tensor "
            f"subclass has all-gather hooks, which a replicated parameter never runs; return a "
            f"Shard or None for it",
        )


def _check_unowned(entry: NamedEntry, param: nn.Parameter) -> None:
    owner, name = param.__dict__.get(OWNER), entry.name
    if owner is not None and is_managed(entry.module, entry.key):
        raise coded(
            ValueError,
            "child-after-parent",
            f"parameter '{name}' already belongs to the unit of {owner}; call fully_shard on "
            f"children before their parents",
        )
    if owner is not None:
        raise coded(
            ValueError,
            "owner-gone",
            f"parameter '{name}' is tied to a parameter of the unit of {owner}, which no longer "
            f"exists; give the module its own parameter, or keep a reference to that module",
        )


def _check_renormalised(name: str, entries: list[NamedEntry]) -> None:
    for entry in entries:
        if isinstance(entry.module, nn.Embedding | nn.EmbeddingBag) and entry.module.max_norm:
            kind = type(entry.module).__name__
            raise coded(
                ValueError,
                "renormalised",
                f"parameter '{name}' is the weight of an {kind} with max_norm, which rescales its "
                f"rows in forward, and resharding would lose that change; set max_norm to None "
                f"and rescale the rows that are looked up, or pass the weight in ignored_params",
            )


def _check_memory(params: dict[str, torch.Tensor]) -> None:
    """Raise for two parameters over the same memory, which sharding would split."""
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for name, param in params.items():
        if param.is_meta or not param.numel():
            continue
        begin = int(param.storage_offset()) * param.element_size()
        end = begin + int(param.numel()) * param.element_size()
        ranges = taken.setdefault(param.untyped_storage()._cdata, [])
        for other_begin, other_end, other in ranges:
            if begin < other_end and other_begin < end:
                raise coded(
                    ValueError,
                    "shared-memory",
                    f"parameter '{name}' shares memory with parameter '{other}'; register the "
                    f"same nn.Parameter in both modules",
                )
        ranges.append((begin, end, name))


def check_one_device(found: dict[nn.Parameter, list[NamedEntry]]) -> None:
    """Raise if some of a unit's parameters are on the meta device, and others are not."""
    meta = [entries[0].name for param, entries in found.items() if param.is_meta]
    real = [entries[0].name for param, entries in found.items() if not param.is_meta]
    if meta and real:
        raise coded(
            ValueError,
            "meta-and-real",
            f"parameter '{meta[0]}' is on the meta device and '{real[0]}' is not; materialise "
            f"all parameters of a unit, or none",
        )
