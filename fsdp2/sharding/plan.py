"""The parameters that calls of `fully_shard` take: planned before anything is changed.

Code that makes several units of one model plans them all before it applies the first, so that an
error at the last one leaves the model unchanged. `fsdp2.sharding.assembly` applies what is planned.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2.core.config import GroupOptions, MixedPrecisionPolicy
from fsdp2.core.device.buffers import empties_storages
from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.errors import coded
from fsdp2.core.gather.extension import RELEASE_HOOK, check_hooks
from fsdp2.core.layout.layout import Cut, default_cut
from fsdp2.core.layout.mesh import MeshAxes, local_of, memory_order
from fsdp2.core.modules.registrations import (
    Computed,
    Owners,
    around,
    check_same_dtype,
    computed,
    is_managed,
)
from fsdp2.core.modules.registry import Arguments, UnitRecord, managed_modules, record_of_unit
from fsdp2.core.params.param import (
    FORM,
    OWNER,
    ModuleEntries,
    ModuleEntry,
    PlannedParam,
    ShardedParam,
    axes_in,
    is_extended,
)
from fsdp2.core.pieces import ceil_div
from fsdp2.core.schedule.observers import plan_checks
from fsdp2.core.schedule.unit import Unit, all_units
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
    """An entry that holds a parameter, and the parameter's full name below the sharded module."""

    module: nn.Module
    key: str
    name: str


Found = Mapping[nn.Parameter, Sequence[NamedEntry]]

Members = Sequence[tuple[nn.Module, str]]
"""Modules, and the prefixes of their parameters' names."""


@dataclass
class PlannedCall:
    """A call of `fully_shard` that is completely determined, but not applied.

    Attributes:
        name: the modules' names, for messages.
        members: the modules, and those below that no other unit has.
        found: parameters that no other unit's modules register, or that these register besides.
        plans: of those that become the call's own.
        axes: of those, each once: each makes a group.
        tied: those that other units have.
        left_alone: where the modules register ignored parameters.
        has_strays: whether units below register one of ``found``, as they do if a module was given
            a parameter after it was sharded.
        arguments: the call's, for parameters that are added later.
        reshard_after_forward: whether forward reshards; ``None``: not at the root.
    """

    name: str
    modules: tuple[nn.Module, ...]
    members: Members
    found: Found
    plans: list[PlannedParam]
    axes: list[MeshAxes]
    tied: list[nn.Parameter]
    left_alone: ModuleEntries
    has_strays: bool
    arguments: Arguments
    options: GroupOptions
    reshard_after_forward: bool | None = None

    def check(self, compare: bool = True) -> None:
        """Raise where groups could not be made of it, or, if wanted, ranks would make others."""
        for plan in self.plans:
            # Extended parameters are made by their own hooks, and freed by emptying storages.
            if not empties_storages(plan.axes.device) and is_extended(local_of(plan.param)):
                raise coded(
                    ValueError,
                    "extended-not-emptied",
                    f"parameter '{plan.name}' has all-gather hooks, but the memory of their "
                    f"results cannot be freed on {plan.axes.device}, which cannot resize a storage "
                    f"to zero; shard it as a plain tensor, or name it in ignored_params",
                )
        for check in plan_checks if compare else ():
            check(self.name, self.plans, self.options)


@dataclass
class Pending:
    """Calls that are planned, and not applied yet.

    Attributes:
        ahead: whether parameters get memory and values before the calls, which are planned again
            then: what depends on those is left until then.
        modules: those that they are for: units, for later calls.
        taken: what has become their own, and how they compute with it.
    """

    ahead: bool = False
    modules: set[nn.Module] = field(default_factory=set)
    taken: dict[nn.Parameter, Computed] = field(default_factory=dict)

    def add(self, planned: PlannedCall) -> None:
        """One more call is planned."""
        self.modules.update(planned.modules)
        for plan in planned.plans:
            self.taken[plan.param] = _computed(plan, planned.options.precision)

    def takes_any(self, modules: tuple[nn.Module, ...], ignored: set[nn.Parameter]) -> bool:
        """Whether a parameter is left for a call on ``modules``."""
        found = _parameters(managed_modules(modules, pending=self.modules), ignored, None)
        return not found.keys() <= self.taken.keys()


def plan_unit(
    name: str,
    modules: tuple[nn.Module, ...],
    ignored: set[nn.Parameter],
    arguments: Arguments,
    options: GroupOptions,
    choose: PlacementFn | None,
    *,
    new_to: UnitRecord | None = None,
    pending: Pending | None = None,
) -> PlannedCall:
    """Determine the parameters that a call on ``modules`` takes; changes nothing.

    ``new_to`` is a unit of which only new parameters are taken; ``pending`` are applied before.
    Raises if a parameter cannot be sharded, or other units compute with it in another dtype.
    """
    pending = Pending() if pending is None else pending
    policy = options.precision
    members = managed_modules(modules, pending=pending.modules)
    found = _parameters(members, ignored, new_to)
    tied = _tied_parameters(found, modules, policy)
    for param in found.keys() & pending.taken.keys():
        check_same_dtype(found[param][0].name, pending.taken[param], policy)
        tied.append(param)
    own = dict(found)
    for param in tied:
        own.pop(param, None)
    plans = _plan_parameters(own, arguments.axes, choose, policy)
    if not pending.ahead:
        _check_one_device(found)
    places = strays(found, modules, pending.modules)
    if places:
        _check_strays(places, plans, policy)
    left_alone = ModuleEntries(_entries_of(modules, ignored) if ignored else ())
    return PlannedCall(
        name,
        modules,
        members,
        found,
        plans,
        axes_in(plans),
        tied,
        left_alone,
        bool(places),
        arguments,
        options,
    )


# ---- which parameters


def _parameters(
    members: Members, ignored: Set[nn.Parameter], new_to: UnitRecord | None
) -> dict[nn.Parameter, list[NamedEntry]]:
    """Parameters that ``members`` register, tied ones too; of a unit ``new_to``, new ones."""
    found: dict[nn.Parameter, list[NamedEntry]] = {}
    for owner, prefix in members:
        for key, param in owner._parameters.items():
            if param is None or param in ignored:
                continue
            if new_to is not None and (is_managed(owner, key) or (owner, key) in new_to.ignored):
                continue
            found.setdefault(param, []).append(NamedEntry(owner, key, prefix + key))
    return found


def _entries_of(modules: tuple[nn.Module, ...], params: set[nn.Parameter]) -> set[ModuleEntry]:
    """The entries in which ``modules``, and those below, register any of ``params``."""
    return {
        (owner, key)
        for owner, _ in managed_modules(modules, into_units=True)
        for key, param in owner._parameters.items()
        if param is not None and param in params
    }


def _tied_parameters(
    found: Found, modules: Sequence[nn.Module], policy: MixedPrecisionPolicy
) -> list[nn.Parameter]:
    """Those of ``found`` that a unit not around ``modules`` has; raises if dtypes differ."""
    owners: Owners | None = None
    tied = []
    for param, entries in found.items():
        if OWNER not in param.__dict__ and FORM not in param.__dict__:
            continue
        owners = owners or Owners(all_units())
        owned = owners.of(param)
        entry = entries[0]
        if owned is None or (is_managed(entry.module, entry.key) and _is_in(modules, owned.unit)):
            continue  # whose unit is gone; of a unit around this one
        check_same_dtype(entry.name, computed(owned), policy)
        tied.append(param)
    return tied


def _is_in(modules: Sequence[nn.Module], unit: Unit) -> bool:
    record = record_of_unit(unit)
    around = () if record is None else record.modules
    return any(module in modules for outer in around for module in outer.modules())


Stray = tuple[NamedEntry, nn.Parameter, ShardedParam | None]
"""An entry in which a unit registers a parameter of an enclosing call, and its earlier parameter.
"""


def strays(
    found: Found, modules: Sequence[nn.Module], pending: Set[nn.Module] = frozenset()
) -> list[Stray]:
    """Entries in which units below ``modules`` register one of ``found``; not ``pending`` ones."""
    known = {entry[:2] for entries in found.values() for entry in entries}
    places = [
        (NamedEntry(module, key, prefix + key), param)
        for module, prefix in managed_modules(tuple(modules), into_units=True, pending=pending)
        for key, param in module._parameters.items()
        if param is not None and param in found and (module, key) not in known
    ]
    if not places:
        return []
    managed = {
        entry: param
        for unit in all_units()
        for group in unit.own_groups
        for param in group.params
        for entry in param.entries
    }
    return [(entry, param, managed.get(entry[:2])) for entry, param in places]


def _check_strays(
    places: Sequence[Stray], plans: Sequence[PlannedParam], policy: MixedPrecisionPolicy
) -> None:
    """Raise what taking them would, once ``plans`` of a call with ``policy`` are applied."""
    own = {plan.param: plan for plan in plans}
    for entry, param, _ in places:
        plan = own.get(param)
        for record in around(entry.module, all_units()) if plan is not None else ():
            assert plan is not None
            check_same_dtype(entry.name, _computed(plan, policy), record.unit.options.precision)


def _computed(plan: PlannedParam, policy: MixedPrecisionPolicy) -> Computed:
    """How a unit will compute with a parameter."""
    override = plan.dtype_override
    chosen = override or policy.param_dtype
    return Computed(plan.name, plan.param.dtype, chosen, override is not None)


def _check_one_device(found: Found) -> None:
    """Raise if some of a unit's parameters are on the meta device, and others are not."""
    first: dict[bool, str] = {}
    for param, entries in found.items():
        first.setdefault(param.is_meta, entries[0].name)
    if len(first) > 1:
        raise coded(
            ValueError,
            "meta-and-real",
            f"parameter '{first[True]}' is on the meta device and '{first[False]}' is not; "
            f"materialise all parameters of a unit, or none",
        )


# ---- whether they can be sharded


def _plan_parameters(
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
        local = local_of(param) if isinstance(param, DTensor) else param
        check_shardable(name, param, local, own)
        _check_renormalised(name, entries)
        dims = None if placement is None else check_placement(name, param, placement)
        extended = is_extended(local)
        order = None if param.is_contiguous() else memory_order(param)
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
