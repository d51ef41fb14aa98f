"""`shard_model`: one call for a whole model.

    ignored     ──> parameters and modules that fsdp2 does not manage
    policy      ──> modules, bottom-up; modules that share parameters become one unit
    strategy    ──> a mesh, and when unsharded parameters are freed
    everything is checked ──> fully_shard on each unit, then on the model ──> Report

A strategy is a set of unit settings: `fully_shard` and setters have the same effect.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2.core.errors import coded
from fsdp2.core.facts import ProcessGroup, default_group, default_mesh, device_of, gather_numbers
from fsdp2.interop import MixedPrecisionPolicy, OffloadPolicy
from fsdp2.sharding.api import apply_calls, plan_call
from fsdp2.sharding.meshes import Levels
from fsdp2.sharding.module import FSDPModule
from fsdp2.sharding.plan import Pending, PlacementFn, PlannedCall
from fsdp2.sharding.plan import whole_below as small_whole
from fsdp2.tracing.reports import Report, report
from fsdp2.wrap.choices import Choice, Policy, chosen_modules

if TYPE_CHECKING:
    from fsdp2.sharding.wire import WireFormat

Strategy = Literal["zero3", "zero2", "zero1", "replicated", "hybrid", "hybrid-zero2", "levels"]


class _StrategyOptions(NamedTuple):
    """The settings of a strategy; ``frees_forward=None`` is `fully_shard`'s own default."""

    mesh_dims: int
    frees_forward: bool | None
    frees_backward: bool


_STRATEGIES: dict[str, _StrategyOptions] = {
    "zero3": _StrategyOptions(1, None, True),
    "zero2": _StrategyOptions(1, False, True),
    "zero1": _StrategyOptions(1, False, False),
    "replicated": _StrategyOptions(2, False, True),
    "hybrid": _StrategyOptions(2, None, True),
    "hybrid-zero2": _StrategyOptions(2, False, True),
    "levels": _StrategyOptions(2, None, True),
}

_OPTIONS = (
    "mesh",
    "reshard_after_forward",
    "shard_placement_fn",
    "mp_policy",
    "offload_policy",
)
"""The options that a policy may set for a single module."""


@dataclass
class _PlannedUnit:
    """A unit to be."""

    modules: list[nn.Module]
    options: dict[str, Any]
    call: PlannedCall | None = None


def shard_model(
    model: nn.Module,
    policy: Policy | None,
    *,
    strategy: Strategy = "zero3",
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    shard_placement_fn: PlacementFn | None = None,
    whole_below: int = 0,
    wire: WireFormat | None = None,
    ignored: Iterable[nn.Module | nn.Parameter | str] = (),
) -> Report:
    """Shard a model in place: the modules that a policy selects, bottom-up, then the model.

    Modules that share a parameter and would be in different units, such as an embedding and the
    head in another block, become one unit. Selected modules without a forward, or without remaining
    parameters, do not become units.

    ================ ==================== =========== ====================================
    strategy         mesh                 all-gathers set by
    ================ ==================== =========== ====================================
    ``zero3``        (shard,)             forward and nothing: the default
                                          backward
    ``zero2``        (shard,)             forward     ``reshard_after_forward=False``
    ``zero1``        (shard,)             once per    that and
                                          step        ``set_reshard_after_backward(False)``
    ``replicated``   (ranks, 1)           none        as ``zero2``; gradients are all-reduced
    ``hybrid``       (replicate, shard)   as zero3    the mesh
    ``hybrid-zero2`` (replicate, shard)   as zero2    the mesh, as ``zero2``
    ``levels``       (between, inside)    as zero3    ``mesh=Levels(mesh)``
    ================ ==================== =========== ====================================

    Gradients are reduced in each backward. With accumulation, call
    ``model.set_requires_gradient_sync(last)`` before each micro-batch: gradients are then reduced
    once per step.

    Args:
        model: the model; its class becomes ``FSDP<Original>``.
        policy: selects the modules that become units, as for `chosen_modules`. `CustomPolicy` may
            set ``mesh``, ``reshard_after_forward``, ``shard_placement_fn``, ``mp_policy`` and
            ``offload_policy`` for a single module. ``None``: the model is one unit.
        strategy: see the table. Default ``"zero3"``.
        mesh: 1-D, or (replicate, shard) for hybrids and for ``replicated``, whose shard dim is 1,
            or (between, inside) for ``levels``. ``None`` (default): all ranks; for hybrids and
            ``levels``, nodes of ``LOCAL_WORLD_SIZE`` ranks, which torchrun sets.
        mp_policy: as for `fully_shard`.
        offload_policy: as for `fully_shard`.
        shard_placement_fn: as for `fully_shard`.
        whole_below: parameters with fewer elements are replicated on every rank, whatever the
            placement of the others (`fsdp2.whole_below`). Default ``0``: none.
        wire: arguments of `FSDPModule.set_wire_format`, which is then called on the model:
            parameters and gradients are sent in fewer bytes. Default ``None``: no format.
        ignored: modules, parameters, or names of them. fsdp2 does not manage them or anything below
            them.

    Returns:
        The units and their settings, as `fsdp2.report` gives them at any time.

    Raises:
        ValueError: an argument or a parameter is invalid; nothing has changed in this case.
        TypeError: an argument has the wrong type.

    Example::

        print(fsdp2.shard_model(model, {Block}, strategy="zero2"))
    """
    settings = _STRATEGIES.get(strategy)
    if settings is None:
        raise coded(
            ValueError,
            "strategy",
            f"shard_model(strategy=…) takes one of {', '.join(_STRATEGIES)}, not {strategy!r}",
        )
    modules, params = _ignored(model, ignored)
    chosen = _mesh_of(strategy, settings, mesh)
    options: dict[str, Any] = {
        "mesh": Levels(chosen) if strategy == "levels" else chosen,
        "reshard_after_forward": settings.frees_forward,
        "shard_placement_fn": shard_placement_fn,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
    }
    choices = chosen_modules(
        model, policy, ignored_modules=modules, ignored_params=params, options=options
    )
    choices = [choice for choice in choices if _runs(choice.module)]
    for choice in choices:
        _check_options(choice)
    plans = [_PlannedUnit([choice.module], dict(choice.options)) for choice in choices]
    plans = _with_ties(model, plans, params, options)
    plans.append(_PlannedUnit([model], options))
    if whole_below:
        for plan in plans:
            others = plan.options["shard_placement_fn"]
            placed = small_whole(whole_below, others)
            plan.options = {**plan.options, "shard_placement_fn": placed}
    plans = _planned(plans, params)
    calls = [call for plan in plans if (call := plan.call) is not None]
    if wire is not None:
        _check_wire(model, calls, wire)
    apply_calls(calls)
    if wire is not None and isinstance(model, FSDPModule):
        model.set_wire_format(**wire)
    for plan in plans:
        for member in plan.modules:
            if isinstance(member, FSDPModule):
                member.set_reshard_after_backward(settings.frees_backward, recurse=False)
    return report(model)


# ---- arguments


def _ignored(
    model: nn.Module, ignored: Iterable[nn.Module | nn.Parameter | str]
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Modules and parameters that fsdp2 does not manage."""
    below: dict[str, nn.Module | nn.Parameter] = dict(model.named_modules(remove_duplicate=False))
    below |= dict(model.named_parameters(remove_duplicate=False))
    present = set(below.values())
    modules: set[nn.Module] = set()
    params: set[nn.Parameter] = set()
    for item in [ignored] if isinstance(ignored, str | nn.Module | nn.Parameter) else ignored:
        found: object = below.get(item) if isinstance(item, str) else item
        if not isinstance(found, nn.Module | nn.Parameter) or found not in present:
            what = repr(item) if isinstance(item, str) else f"a {type(item).__name__}"
            raise coded(
                ValueError,
                "ignored-unknown",
                f"shard_model(ignored=…) names {what}, which is not a module or parameter of the "
                f"model; pass modules or parameters of this model, or their names",
            )
        if found is model:
            raise coded(
                ValueError,
                "ignored-model",
                "shard_model(ignored=…) names the model itself, so nothing is left to shard; "
                "name modules or parameters in it",
            )
        if isinstance(found, nn.Module):
            modules |= set(found.modules())
            params |= set(found.parameters())
        else:
            params.add(found)
    return modules, params


def _mesh_of(strategy: str, settings: _StrategyOptions, mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        return _default_mesh(strategy, settings)
    if isinstance(mesh, DeviceMesh):
        wrong = mesh.ndim != settings.mesh_dims
        if wrong or (strategy == "replicated" and mesh.size(1) != 1):
            wanted = {"replicated": "(ranks, 1)", "levels": "(between, inside)"}.get(
                strategy, "(shard,)" if settings.mesh_dims == 1 else "(replicate, shard)"
            )
            raise coded(
                ValueError,
                "strategy-mesh",
                f"shard_model(strategy={strategy!r}) takes a mesh {wanted}, but got one of shape "
                f"{tuple(mesh.shape)}; pass another mesh, or another strategy",
            )
    return mesh


def _default_mesh(strategy: str, settings: _StrategyOptions) -> DeviceMesh:
    world = default_mesh()
    if settings.mesh_dims == 1:
        return world
    if strategy == "replicated":
        names = ("replicate", "shard")
        return init_device_mesh(world.device_type, (world.size(), 1), mesh_dim_names=names)
    caller = f"shard_model(strategy={strategy!r})"
    names = ("between", "inside") if strategy == "levels" else ("replicate", "shard")
    return node_mesh(device_of(world), None, caller, "pass mesh", names)


def node_mesh(
    device: torch.device,
    unset: int | None,
    caller: str,
    way_out: str,
    names: tuple[str, str] = ("replicate", "shard"),
) -> DeviceMesh:
    """All ranks as (replicate, shard): shards within a node, copies across.

    A node has ``LOCAL_WORLD_SIZE`` ranks, which torchrun sets; ``unset`` counts otherwise, and
    ``None`` is an error, whose message names ``way_out``. All ranks must call it together, and
    compare theirs: ranks that differed would make other process groups, and wait for each other.
    All raise a `ValueError` if sizes differ, or do not divide the number of ranks. The same size
    and names give the same mesh.
    """
    world = default_group()
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    local = int(text) if text.isdecimal() else 0
    if not text and unset is not None:
        local, text = unset, str(unset)
    found = sorted({each[0] for each in gather_numbers(world, [local], device)})
    if len(found) > 1:
        raise coded(
            ValueError,
            "local-world-sizes",
            f"{caller} shards within a node, but LOCAL_WORLD_SIZE differs among ranks: {found}; "
            f"{way_out}",
        )
    if local < 1 or world.size() % local:
        raise coded(
            ValueError,
            "local-world-size",
            f"{caller} shards within a node, but LOCAL_WORLD_SIZE is {text!r}, which does not "
            f"divide {world.size()} ranks; start ranks with torchrun, or {way_out}",
        )
    return _node_mesh(device.type, local, world, names)


@functools.lru_cache(maxsize=64)
def _node_mesh(
    device_type: str, local: int, world: ProcessGroup, names: tuple[str, str]
) -> DeviceMesh:
    return init_device_mesh(device_type, (world.size() // local, local), mesh_dim_names=names)


def _check_options(choice: Choice) -> None:
    for key in choice.options:
        if key not in _OPTIONS:
            raise coded(
                ValueError,
                "policy-option",
                f"the policy gives '{choice.name}' the option {key!r}, which shard_model does "
                f"not have; use mesh, reshard_after_forward, shard_placement_fn, mp_policy, "
                f"offload_policy",
            )


def _check_wire(model: nn.Module, calls: Sequence[PlannedCall], wire: WireFormat) -> None:
    from fsdp2.sharding.wire import check_planned  # who does not use it does not load it

    planned = [(plan, call.options.precision) for call in calls for plan in call.plans]
    check_planned(model, planned, wire)


# ---- units


def _runs(module: nn.Module) -> bool:
    """Whether it has a forward, which is where a unit is gathered."""
    return type(module).forward is not nn.Module.forward


def _registrations(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """The modules that register each parameter."""
    found: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            found.setdefault(param, []).append(module)
    return found


def _units_of(
    module: nn.Module, unit: int, owners: Mapping[nn.Module, int]
) -> Iterator[tuple[nn.Module, int]]:
    """Each module below, once for every way to it, with the unit that it would be in."""
    unit = owners.get(module, unit)
    yield module, unit
    for child in module.children():
        yield from _units_of(child, unit, owners)


def _with_ties(
    model: nn.Module,
    plans: list[_PlannedUnit],
    ignored: set[nn.Parameter],
    options: dict[str, object],
) -> list[_PlannedUnit]:
    """Put modules that share parameters across units into one unit, in front of the others.

    Only modules around which there is no other unit of this call: other ties are left to
    `fully_shard`, whose units then share a group.
    """
    owners = {plan.modules[0]: index for index, plan in enumerate(plans)}
    used: dict[nn.Module, set[int]] = {}
    for module, unit in _units_of(model, -1, owners):
        used.setdefault(module, set()).add(unit)
    clusters: list[list[nn.Module]] = []
    for param, places in _registrations(model).items():
        units = set().union(*(used[module] for module in places))
        if param in ignored or len(units) == 1:
            continue
        others = [other for other in clusters if {*other} & {*places}]
        clusters = [other for other in clusters if other not in others]
        clusters.append(list(dict.fromkeys(sum(others, places))))
    tied = []
    for cluster in clusters:
        inner = {below for module in cluster for below in list(module.modules())[1:]}
        taken = {m for other in clusters for m in other} | owners.keys()
        if model in cluster or inner & taken or not all(map(_runs, cluster)):
            continue
        own = [plans[owners[module]].options for module in cluster if module in owners]
        tied.append(_PlannedUnit(cluster, own[0] if own else options))
    gone = {module for plan in tied for module in plan.modules}
    return [*tied, *(plan for plan in plans if plan.modules[0] not in gone)]


def _planned(units: Sequence[_PlannedUnit], ignored: set[nn.Parameter]) -> list[_PlannedUnit]:
    """Those of ``units`` that have parameters, and the last, each with its call; all, or none."""
    pending = Pending()
    for unit in units:
        if unit is units[-1] or pending.takes_any(tuple(unit.modules), ignored):
            unit.call = plan_call(
                unit.modules, ignored_params=ignored, pending=pending, **unit.options
            )
    return [unit for unit in units if unit.call is not None]
