"""The plan of a wrapper and of those below it, made before anything is changed.

    the arguments      ──> WrapperPlan          checked; the device, the mesh
    auto_wrap_policy   ──> chosen_below         modules below, innermost first, with arguments
    check_plans        ──> plans each one's call of fully_shard and checks each one's
                           initialization; raises every error that can be found before it starts

Wrappers are then made one after the other, so that only one at a time has full memory and values.
Errors that only ``param_init_fn`` or ``reset_parameters()`` can show are raised then.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.core.errors import coded
from fsdp2.core.facts import ProcessGroup
from fsdp2.fsdp1.config import (
    HYBRID,
    KEEPS_GATHERED,
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
    checked_member,
    checked_precision,
    offload_of,
    policy_of,
)
from fsdp2.fsdp1.construction import (
    Ignored,
    check_can_materialise,
    check_nothing_wrapped,
    ignored_of,
)
from fsdp2.fsdp1.meshes import device_of, mesh_of
from fsdp2.interop import CPUOffloadPolicy
from fsdp2.sharding.api import plan_calls
from fsdp2.sharding.meshes import FSDPMeshInfo, ShardPlacementResult
from fsdp2.sharding.module import sharded_class
from fsdp2.wrap import any_wrap_policy, chosen_modules
from fsdp2.wrap.choices import Choice, Policy, children_first

Given = Mapping[str, Any]
"""All arguments of a wrapper but the module, by name."""


@dataclass(frozen=True)
class WrapperPlan:
    """A wrapper to be: its module, its arguments as given, and what they come to."""

    module: nn.Module
    given: Given
    strategy: ShardingStrategy
    offload: CPUOffloadPolicy | None
    prefetch: BackwardPrefetch | None
    precision: MixedPrecision
    ignored: Ignored
    device: torch.device
    mesh: DeviceMesh


def check_plans(plans: Sequence[WrapperPlan]) -> None:
    """Raise what the wrappers would that are to be made in this order; changes nothing."""
    modules = {each.module for each in plans}
    for each in plans:
        init_fn = each.given["param_init_fn"]
        check_can_materialise(each.module, init_fn, each.ignored, modules)
    plan_calls(((each.module, arguments_of(each)) for each in plans), ahead=True)


def arguments_of(plan: WrapperPlan) -> dict[str, Any]:
    """The arguments of a wrapper's call of `fully_shard`."""
    whole = ShardPlacementResult(None, FSDPMeshInfo(plan.mesh, None, 0))
    replicates = plan.strategy == ShardingStrategy.NO_SHARD
    return {
        "mesh": plan.mesh,
        "reshard_after_forward": False if plan.strategy in KEEPS_GATHERED else None,
        "shard_placement_fn": (lambda param: whole) if replicates else None,
        "mp_policy": policy_of(plan.precision),
        "offload_policy": plan.offload,
        "ignored_params": set(plan.ignored.params),
    }


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise coded(
            TypeError,
            "fsdp1-module",
            f"FullyShardedDataParallel takes a module, not {type(module).__name__}; pass one",
        )
    sharded_class(module)  # raises if there can be none


def plan_wrapper(module: nn.Module, given: Given) -> WrapperPlan:
    """Resolve a wrapper's arguments for a module; changes nothing but makes meshes."""
    _check_module(module)
    strategy = ShardingStrategy.FULL_SHARD
    if given["sharding_strategy"] is not None:
        strategy = checked_member(ShardingStrategy, given["sharding_strategy"], "sharding_strategy")
    prefetch = None
    if given["backward_prefetch"] is not None:
        prefetch = checked_member(BackwardPrefetch, given["backward_prefetch"], "backward_prefetch")
    offload, precision = offload_of(given["cpu_offload"]), given["mixed_precision"]
    ignored = ignored_of(given["ignored_modules"], given["ignored_states"])
    groups = given["process_group"]
    one = groups if isinstance(groups, ProcessGroup) else None
    device = device_of(module, given["device_id"], one)
    mesh = mesh_of(groups, given["device_mesh"], strategy in HYBRID, device)
    precision = checked_precision(precision)
    return WrapperPlan(module, given, strategy, offload, prefetch, precision, ignored, device, mesh)


_OWN = ("process_group", "auto_wrap_policy", "ignored_modules")
"""Arguments that wrappers below do not inherit; their policy may override the others."""


def chosen_below(plan: WrapperPlan) -> tuple[list[Choice], list[nn.Module]]:
    """The modules below that a wrapper's policy selects, and those that stay in full precision."""
    module, given = plan.module, plan.given
    policy: Policy | None = given["auto_wrap_policy"]
    if policy is None:
        return [], []
    check_nothing_wrapped(module)
    precision, ignored = plan.precision, plan.ignored
    apart: tuple[type[nn.Module], ...] = ()
    if any((precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype)):
        apart = tuple(precision._module_classes_to_ignore)
    if apart and not hasattr(policy, "_run_policy") and callable(policy):

        def stays(module: nn.Module, recurse: bool, *_: object, **__: object) -> bool:
            return recurse or isinstance(module, apart)

        policy = functools.partial(any_wrap_policy, policies=[policy, stays])
    inherited = {name: value for name, value in given.items() if name not in _OWN}
    inherited |= {"ignored_states": ignored.params, "device_mesh": plan.mesh}
    choices = chosen_modules(
        module,
        policy,
        ignored_modules=ignored.modules,
        ignored_params=ignored.params,
        options=inherited,
    )
    own = {choice.module: choice for choice in choices}
    precise: list[nn.Module] = []
    for below, prefix in children_first(module) if apart else ():
        if isinstance(below, apart) and below is not module and below not in ignored.modules:
            precise.append(below)
            chosen = own[below].options if below in own else inherited
            options_of = {**chosen, "mixed_precision": None}
            own[below] = Choice(prefix.removesuffix("."), below, options_of)
    if precise:
        choices = [own[below] for below, _ in children_first(module) if below in own]
    return choices, precise
