"""Parameters of a planned call that modules of other units register: joined, or refused.

    tied_parameters   what a call finds that units have already
    strays            where units below register what the call takes
    join, take_strays one more entry of a parameter, once the call has its groups

`fsdp2.core.modules.ties` handles parameters that were moved before a forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from torch import nn

from fsdp2.core.config import MixedPrecisionPolicy
from fsdp2.core.modules.registrations import Move, is_managed
from fsdp2.core.modules.registry import record_of_unit
from fsdp2.core.modules.ties import (
    Computed,
    Owned,
    Owners,
    around,
    check_same_dtype,
    computed,
    fill,
    take_up,
)
from fsdp2.core.modules.walks import managed_modules
from fsdp2.core.params.param import GATHERED, OWNER, ModuleEntry, PlannedParam, ShardedParam
from fsdp2.core.schedule.unit import Unit, all_units, operations_of
from fsdp2.sharding.selection import NamedEntry

Found = Mapping[nn.Parameter, Sequence[NamedEntry]]


def tied_parameters(
    found: Found, modules: Sequence[nn.Module], policy: MixedPrecisionPolicy
) -> dict[nn.Parameter, Owned]:
    """Those of ``found`` that a unit has already, around of which ``modules`` are not.

    Raises:
        ValueError: one is computed with in another dtype.
    """
    known = [p for p in found if OWNER in p.__dict__ or GATHERED in p.__dict__]
    if not known:
        return {}
    owners = Owners(all_units())
    tied = {}
    for param in known:
        owned = owners.of(param)
        entry = found[param][0]
        if owned is None or (is_managed(entry.module, entry.key) and _is_in(modules, owned.unit)):
            continue  # whose unit is gone; of a unit around this one
        check_same_dtype(entry.name, computed(owned), policy)
        tied[param] = owned
    return tied


def _is_in(modules: Sequence[nn.Module], unit: Unit) -> bool:
    record = record_of_unit(unit)
    around = () if record is None else record.modules
    return any(module in modules for outer in around for module in outer.modules())


def join(found: Found, tied: Iterable[nn.Parameter]) -> None:
    """Give parameters of other units the entries where they were found."""
    owners = Owners(all_units())
    for param in tied:
        owned = owners.of(param)
        assert owned is not None
        operations_of(owned.group).reshard()
        entries: list[ModuleEntry] = [(entry.module, entry.key) for entry in found[param]]
        present = list(owned.param.entries)
        fill(owned, [*present, *(entry for entry in entries if entry not in present)])


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
    units = all_units() if places else []
    managed = {
        entry: param
        for unit in units
        for group in unit.own_groups
        for param in group.params
        for entry in param.entries
    }
    return [(entry, param, managed.get(entry[:2])) for entry, param in places]


def check_strays(
    places: Sequence[Stray], plans: Sequence[PlannedParam], policy: MixedPrecisionPolicy
) -> None:
    """Raise what `take_strays` would, once ``plans`` of a call with ``policy`` are applied."""
    own = {plan.param: plan for plan in plans}
    for entry, param, _ in places:
        plan = own.get(param)
        for record in around(entry.module, all_units()) if plan is not None else ():
            assert plan is not None
            chosen = plan.dtype_override or policy.param_dtype
            other = Computed(plan.name, param.dtype, chosen, plan.dtype_override is not None)
            check_same_dtype(entry.name, other, record.unit.options.precision)


def take_strays(places: Sequence[Stray]) -> None:
    """Manage what `strays` has found; the parameters are sharded now."""
    owners = Owners(all_units())
    moves = []
    for entry, registered, before in places:
        owned = owners.of(registered)
        if owned is not None:
            moves.append(Move(entry.name, entry.module, entry.key, owned.param, before))
    take_up(moves, all_units())
