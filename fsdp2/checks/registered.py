"""Registrations by modules that belong to no unit: they raise, by name, when a forward begins.

A user's tensor in the entry of a managed parameter would silently be overwritten at the next
all-gather, and each rank would train a new parameter separately.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2.core.errors import ShardingStateError, coded
from fsdp2.core.modules import registrations
from fsdp2.core.modules.registrations import Owners
from fsdp2.core.modules.registry import record_of_unit, scheduler_of
from fsdp2.core.params.param import OWNER, ShardedParam, form_of, gathered_name
from fsdp2.core.schedule.unit import Unit, all_units


class Unmanaged:
    """The treatment of a parameter that no unit manages."""

    leave: Callable[[str], None] | None = None


def _refuse(
    name: str,
    registered: nn.Parameter,
    param: ShardedParam | None,
    other: ShardedParam | None,
    meshes: Set[DeviceMesh],
) -> None:
    form = form_of(registered)
    if param is not None and form is not None and form.is_whole:
        raise coded(
            ShardingStateError,
            "forward-while-whole",
            f"a forward began inside gathered(), where parameter '{name}' is unsharded; leave the "
            f"context first, because a forward gathers parameters itself",
        )
    if other is not None:
        raise coded(
            ShardingStateError,
            "tied-unregistered",
            f"parameter '{name}' was replaced by parameter '{other.name}' without registering it, "
            f"as torch.func.functional_call does; tie the two by assignment: module_b.weight = "
            f"module_a.weight",
        )
    if param is not None:
        raise coded(
            ShardingStateError,
            "replaced-parameter",
            f"parameter '{name}' was replaced by a {type(registered).__name__} after "
            f"fully_shard; copy new values into the parameter under torch.no_grad(), or "
            f"use load_state_dict(assign=True)",
        )
    _refuse_unmanaged(name, registered, meshes)


def _refuse_unmanaged(name: str, param: nn.Parameter, meshes: Set[DeviceMesh]) -> None:
    owner = param.__dict__.get(OWNER)
    owned = Owners(all_units()).of(param)
    if owner is not None and (owned is None or _is_left(owned.unit)):
        raise coded(
            ShardingStateError,
            "unit-gone",
            f"parameter '{name}' belongs to the unit of {owner}, which is not in the model any "
            f"more; keep that module in the model, or change the model before fully_shard",
        )
    if owner is not None or gathered_name(param) is not None:
        raise coded(
            ShardingStateError,
            "tied-to-another-model",
            f"parameter '{name}' is tied to a parameter of another fully_shard model; call "
            f"fully_shard on the model that holds both, and run that, or tie them before either "
            f"is sharded",
        )
    if Unmanaged.leave is not None:
        Unmanaged.leave(name)
        return
    if isinstance(param, DTensor) and param.device_mesh in meshes:
        raise coded(
            ShardingStateError,
            "made-of-sharded",
            f"parameter '{name}' was computed from sharded parameters after fully_shard, for "
            f"example by a parametrization, so no unit gathers it; create it before fully_shard",
        )
    raise coded(
        ShardingStateError,
        "added-parameter",
        f"parameter '{name}' was added after fully_shard, so no unit shards it or reduces its "
        f"gradients; call shard_new_parameters() on the sharded module around it, or fully_shard "
        f"on the new module",
    )


def _is_left(unit: Unit) -> bool:
    """Whether the module of a unit is gone, or is no longer in the model that it was in."""
    record = record_of_unit(unit)
    scheduler = None if record is None else record.scheduler
    if scheduler is None:
        return record is None
    return scheduler_of(scheduler.units[0]) is not scheduler  # the root has another one by now


registrations.unexpected.add(_refuse)
