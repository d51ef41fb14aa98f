"""The parameters that calls of `fully_shard` take: all planned before anything is changed.

    plan_taken    modules ──> Taken: plans of the parameters that become the call's own, and those
                              that other units have; raises every error that can be found by then
    Pending       calls that are planned and not applied: later ones see what these take
    join_others   once the call has its groups: parameters of other units get one more entry

Code that makes several units of one model plans them all before it applies the first, so that an
error at the last one leaves the model unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from fsdp2.core.config import MixedPrecisionPolicy
from fsdp2.core.layout.mesh import MeshAxes
from fsdp2.core.modules.registry import UnitRecord
from fsdp2.core.modules.ties import Computed, check_same_dtype, link
from fsdp2.core.params.param import ModuleEntries, PlannedParam
from fsdp2.sharding.selection import (
    NamedEntry,
    PlacementFn,
    check_one_device,
    entries_of,
    managed_parameters,
    plan_parameters,
)
from fsdp2.sharding.ties import check_strays, join, strays, take_strays, tied_parameters


@dataclass(frozen=True)
class Taken:
    """The parameters and modules that a call takes.

    Attributes:
        modules: the unit's.
        found: parameters that no other unit's modules register, or that these register besides.
        plans: of those that become the call's own.
        tied: those that other units have.
        left_alone: where the modules register ignored parameters.
        has_strays: whether units below register one of ``found``, as they do if a module was given
            a parameter after it was sharded.
    """

    modules: tuple[nn.Module, ...]
    found: dict[nn.Parameter, list[NamedEntry]]
    plans: list[PlannedParam]
    tied: tuple[nn.Parameter, ...]
    left_alone: ModuleEntries
    has_strays: bool


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

    def add(self, taken: Taken, policy: MixedPrecisionPolicy) -> None:
        """One more call is planned."""
        self.modules.update(taken.modules)
        for plan in taken.plans:
            chosen = plan.dtype_override or policy.param_dtype
            made = plan.dtype_override is not None
            self.taken[plan.param] = Computed(plan.name, plan.param.dtype, chosen, made)

    def takes_any(self, modules: tuple[nn.Module, ...], ignored: set[nn.Parameter]) -> bool:
        """Whether a parameter is left for a call on ``modules``."""
        found = managed_parameters(modules, ignored, pending=self.modules)
        return not found.keys() <= self.taken.keys()


def plan_taken(
    modules: tuple[nn.Module, ...],
    ignored: set[nn.Parameter],
    axes: MeshAxes,
    choose: PlacementFn | None,
    policy: MixedPrecisionPolicy,
    *,
    new_to: UnitRecord | None = None,
    pending: Pending | None = None,
) -> Taken:
    """Determine the parameters that a call on ``modules`` takes; changes nothing.

    Args:
        modules: the modules.
        ignored: parameters that are not managed.
        axes: the data-parallel axes of the call's mesh.
        choose: the user's ``shard_placement_fn``.
        policy: how the unit computes.
        new_to: a unit of which only new parameters are taken.
        pending: calls that are applied before this one.

    Raises:
        ValueError: a parameter cannot be sharded, or other units compute with it in another dtype.
    """
    pending = Pending() if pending is None else pending
    found = managed_parameters(modules, ignored, new_to, pending.modules)
    tied = [*tied_parameters(found, modules, policy)]
    for param in found.keys() & pending.taken.keys():
        check_same_dtype(found[param][0].name, pending.taken[param], policy)
        tied.append(param)
    own = {param: entries for param, entries in found.items() if param not in set(tied)}
    plans = plan_parameters(own, axes, choose, policy)
    if not pending.ahead:
        check_one_device(found)
    places = strays(found, modules, pending.modules)
    check_strays(places, plans, policy)
    left_alone = ModuleEntries(entries_of(modules, ignored))
    return Taken(modules, found, plans, tuple(tied), left_alone, bool(places))


def join_others(taken: Taken, record: UnitRecord) -> None:
    """Let parameters be managed wherever the modules of a call register them, and units below."""
    if taken.tied:
        join(taken.found, taken.tied)
        link([record])
    if taken.has_strays:
        take_strays(strays(taken.found, taken.modules))
