"""The wire formats of parameters and gradients: `FSDPModule.set_wire_format`.

It checks all arguments and parameters, and decides which parameters stay exact; each unit's `Wire`
is bound at its next all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypedDict

import torch
from torch import nn

from fsdp2.core.codecs.codec import GATHERED, REDUCED, check_coded
from fsdp2.core.config import EXACT_BELOW, GroupOptions, Level, MixedPrecisionPolicy, Wire
from fsdp2.core.errors import coded
from fsdp2.core.layout.mesh import local_of
from fsdp2.core.modules.registry import UnitRecord, refresh
from fsdp2.core.params.param import PlannedParam, ShardedParam, compute_dtype, is_extended

Exact = Callable[[str, nn.Parameter], bool]
"""The user's choice of parameters that are sent without a format, by name and parameter."""


class WireFormat(TypedDict, total=False):
    """Arguments of `FSDPModule.set_wire_format`, which describes them.

    Example::

        slow: fsdp2.wrap.WireFormat = {"gather": "int8", "reduce": "bf16"}
        model.set_wire_format(**slow)
    """

    gather: str | None
    reduce: str | None
    differences: bool
    feedback: bool
    rotate: bool
    level: Level
    exact: Exact | None
    exact_below: int


def set_wire_format(
    module: nn.Module,
    records: Sequence[UnitRecord],
    wire: Wire,
    exact: Exact | None,
    exact_below: int,
    level: Level = "all",
) -> None:
    """Set the wire formats of the units in ``records``; see `FSDPModule.set_wire_format`."""
    _check_wire(wire)
    _check_level(any(map(_has_levels, records)), wire, level)
    chosen = []
    for name, param, options in _params(module, records):
        stays = param.axes.whole or _stays(name, param.sharded, exact, exact_below)
        if not stays:
            computed = compute_dtype(options, param)
            reduced = options.precision.reduce_dtype or param.grad_dtype
            _check(name, param.dtype, computed, reduced, param.is_extended, wire)
        chosen.append((param, stays))
    for param, stays in chosen:
        param.exact = stays
    for record in records:
        record.unit.change(wire=_of_level(record, wire, level))
    refresh(records)  # schedulers know the groups that keep rows


def _has_levels(record: UnitRecord) -> bool:
    return any(group.between is not None for group in record.unit.own_groups)


def _of_level(record: UnitRecord, wire: Wire, level: Level) -> Wire:
    """The unit's formats on both levels, if one of them is unchanged."""
    if not _has_levels(record):
        return record.unit.options.wire if level == "between" else wire
    now = record.unit.options.wire
    if level == "between":
        return replace(now, between_gather=wire.gather, between_reduce=wire.reduce)
    gather, reduce = wire.gather, wire.reduce
    if level == "inside":
        gather, reduce = now.between_gather, now.between_reduce
    return replace(wire, between_gather=gather, between_reduce=reduce)


def check_planned(
    module: nn.Module,
    planned: Sequence[tuple[PlannedParam, MixedPrecisionPolicy]],
    chosen: WireFormat,
) -> None:
    """Raise what `FSDPModule.set_wire_format` would raise once parameters are sharded as planned,
    or for an unknown argument.
    """
    for key in chosen.keys() - WireFormat.__annotations__.keys():
        raise coded(
            ValueError,
            "wire-argument",
            f"shard_model(wire=…) takes the arguments of set_wire_format, but {key!r} is not one "
            f"of them; use {', '.join(WireFormat.__annotations__)}",
        )
    exact, below = chosen.get("exact"), chosen.get("exact_below", EXACT_BELOW)
    wire = wire_of(chosen)
    _check_wire(wire)
    _check_level(any(plan.axes.levels for plan, _ in planned), wire, chosen.get("level", "all"))
    names = {param: name for name, param in module.named_parameters()}
    for plan, policy in planned:
        name, dtype = names.get(plan.param, plan.name), plan.param.dtype
        if plan.axes.whole or _stays(name, plan.param, exact, below):
            continue
        computed = (plan.dtype_override or policy.param_dtype) if dtype.is_floating_point else None
        reduced = policy.reduce_dtype or dtype
        extended = is_extended(local_of(plan.param))
        _check(name, dtype, computed or dtype, reduced, extended, wire)


def wire_of(chosen: WireFormat) -> Wire:
    """The formats that arguments name."""
    return Wire(
        chosen.get("gather"),
        chosen.get("reduce"),
        chosen.get("differences", False),
        rotate=chosen.get("rotate", False),
        feedback=chosen.get("feedback", False),
    )


def _stays(name: str, param: nn.Parameter, exact: Exact | None, exact_below: int) -> bool:
    """Whether a parameter is sent without a format."""
    return param.numel() < exact_below or (exact is not None and bool(exact(name, param)))


def _check_wire(wire: Wire) -> None:
    _check_name("gather", wire.gather, GATHERED)
    _check_name("reduce", wire.reduce, REDUCED)
    if wire.differences and wire.gather is None:
        names = ", ".join(map(repr, GATHERED))
        raise coded(
            ValueError,
            "wire-format-differences",
            f"set_wire_format(differences=True) needs one of the formats {names} for parameters; "
            f"pass it as gather=",
        )
    for name in ("rotate", "feedback"):
        if getattr(wire, name) and wire.reduce is None:
            raise coded(
                ValueError,
                "wire-format-alone",
                f"set_wire_format({name}=True) needs a format for gradients; pass it as reduce=",
            )


def _check_level(levels: bool, wire: Wire, level: Level) -> None:
    if level not in ("all", "inside", "between"):
        raise coded(
            ValueError,
            "wire-level",
            f"set_wire_format takes level='all', 'inside' or 'between', not {level!r}",
        )
    if level == "between" and not levels:
        raise coded(
            ValueError,
            "wire-level-of-one",
            "set_wire_format(level='between') is for units that are sharded over two levels "
            "(fsdp2.Levels), but none of these units is; leave level= out, because the "
            "all-reduce over replicas (HSDP) has no format",
        )
    for name in ("differences", "rotate", "feedback"):
        if levels and getattr(wire, name) and (level != "inside" or name == "feedback"):
            raise coded(
                ValueError,
                "wire-between",
                f"set_wire_format({name}=True) cannot be used between nodes, and feedback=True "
                f"cannot be used with units that are sharded over two levels (fsdp2.Levels); pass "
                f"level='inside', or leave the option out",
            )


def _check_name(side: str, name: str | None, known: Iterable[str]) -> None:
    if name is not None and name not in known:
        names = ", ".join(map(repr, known))
        raise coded(
            ValueError,
            "wire-format-unknown",
            f"set_wire_format takes {side}=None or one of {names}, not {name!r}",
        )


def _params(
    module: nn.Module, records: Sequence[UnitRecord]
) -> Iterator[tuple[str, ShardedParam, GroupOptions]]:
    """Each parameter once, with its name below ``module`` and its group's options."""
    names = {id(param): name for name, param in module.named_parameters()}
    for record in records:
        for group in record.unit.own_groups:
            for param in group.params:
                found = names.get(id(param.sharded)) or names.get(id(param.unsharded))
                yield found or param.name, param, group.options


def _check(
    name: str,
    shard: torch.dtype,
    computed: torch.dtype,
    reduced: torch.dtype,
    extended: bool,
    wire: Wire,
) -> None:
    """Raise if a parameter of these dtypes (of its shard, as gathered, of its gradients' sums), or
    whose tensor subclass is ``extended`` by all-gather hooks, cannot be sent so.
    """
    if wire.gather is not None:
        if extended:
            raise coded(
                ValueError,
                "wire-format-extension",
                f"parameter '{name}' cannot be sent as {wire.gather}, because its tensor subclass "
                f"has all-gather hooks; name it in set_wire_format(exact=…)",
            )
        check_coded(name, (shard, computed), wire.gather)
    if wire.reduce is not None:
        check_coded(name, (computed, reduced), wire.reduce)
