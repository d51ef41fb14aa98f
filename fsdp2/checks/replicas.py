"""Replicas begin with equal weights: compared once, when they first add up gradients.

    rank 0   checksums of its shards ──┐ largest, and largest of the negatives:
    rank 2   checksums of its shards ──┘ they differ? ──> tell the shard axis ──> all raise

Ranks that seed differently, or initialize differently after `to_empty`, would train weights of
their own with gradients of all, and no later step would notice. The first all-reduce over a process
group compares the shards of all groups of the model that have these replicas: before it, nothing
requires replicas to be equal, or even to run the same forwards. Later ones compare nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2.core.device.collectives import largest_over
from fsdp2.core.device.fingerprint import checksum
from fsdp2.core.errors import RankMismatchError, coded
from fsdp2.core.gather.extension import plain_tensors
from fsdp2.core.modules.registry import scheduler_of
from fsdp2.core.params.param import ShardedParam
from fsdp2.core.progress import naming_unit
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import (
    Observer,
    Run,
    observers_of,
    on_new_groups,
    with_observer,
)
from fsdp2.core.schedule.unit import unit_of


def _check_first(group: ParamGroup, run: Run, *given: object) -> object:
    """Compare, if replicas communicate; then reduce."""
    _, all_reduce = given
    if all_reduce:
        _compare(group)
    return run(*given)


FIRST_ALL_REDUCE = Observer(1, {"reduce": _check_first})
"""Observes groups that have replicas, until it has compared these. It communicates, so that the
check of ranks is called before it."""


def _follow(group: ParamGroup) -> Observer | None:
    return None if group.replicas is None or group.replicas.size == 1 else FIRST_ALL_REDUCE


def _compare(first: ParamGroup) -> None:
    """Compare all shards of the model that have the replicas of ``first``, once."""
    scheduler = scheduler_of(unit_of(first))
    assert first.replicas is not None
    assert scheduler is not None
    found = [
        (unit, place, group)
        for unit in scheduler.units
        for place, group in enumerate(unit.groups)
        if group.base.replicas is not None
        and group.base.replicas.group is first.replicas.group
        and FIRST_ALL_REDUCE in observers_of(group)
    ]
    groups = [group.base for unit, _, group in found if not unit.borrows(group)]
    held = [[param for param in group.params if not param.is_meta] for group in groups]
    with naming_unit("all-reduce", first.name):
        differ = _differing(first, held)
    for params, differs in zip(held, differ, strict=True):
        if differs:
            each = _differing(first, [[param] for param in params])
            _refuse(params[each.index(1)].name)
    for unit, place, group in found:  # in place: the scheduler may be at one of them
        unit.groups[place] = with_observer(group, FIRST_ALL_REDUCE, False)


def _differing(first: ParamGroup, held: Sequence[Sequence[ShardedParam]]) -> list[int]:
    """1 for each list of parameters of which replicas differ, on any rank; otherwise 0."""
    assert first.replicas is not None
    if not any(held):  # a rehearsal
        return [0] * len(held)
    sums = [checksum([rows for p in params for rows in _rows(p)]) >> 1 for params in held]
    found = first.replicas.largest([*sums, *(-number for number in sums)])
    differ = [int(a != -b) for a, b in zip(found, found[len(sums) :], strict=False)]
    shared = first.collectives
    return largest_over([shared] if shared.size > 1 else [], differ)


def _rows(param: ShardedParam) -> Sequence[torch.Tensor]:
    return plain_tensors(param.local) if param.is_extended else [param.local]


def _refuse(name: str) -> None:
    raise coded(
        RankMismatchError,
        "replicas-differ",
        f"parameter '{name}' differs between replicas before their first all-reduce of gradients, "
        f"so each replica would train other weights; use the same seed on all ranks before weights "
        f"are initialized, load a checkpoint, or broadcast the weights of one replica",
    )


on_new_groups.append(_follow)
