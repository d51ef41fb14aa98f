"""Which process groups a root's units communicate over: connected before the first all-gather.

    forward    shard groups                                  used by all-gathers
    backward   smaller groups, reductions' own, replicas     used by reductions in addition

If a backend creates its communicator in the first collective, that is one small one.

This cannot deadlock. A first collective blocks the host until all ranks of the group have entered
theirs. All ranks process their groups in one order: by global ranks, then by name, on which all
members of a group agree. Consider the first group in this order in which some rank waits: its other
members wait in no earlier group, and reach it, so it completes. The requirement is the same as for
all-gathers: the members of a group run the same roots in the same order (invariant I11). A forward
without backward, which only one replica may run, does not connect groups of reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch

from fsdp2.core.device.backends import traits_of
from fsdp2.core.device.collectives import run_first_collective
from fsdp2.core.device.process_groups import ProcessGroup, global_ranks, meet
from fsdp2.core.progress import naming_unit
from fsdp2.core.schedule.group import ParamGroup

_connected: WeakSet[ProcessGroup] = WeakSet()


Link = tuple[ProcessGroup, torch.device, str]
"""A process group that a unit communicates over, the device, and the unit's name for messages."""


def connect_groups(groups: Sequence[ParamGroup], expects_backward: bool) -> bool:
    """Connect what a forward needs, and its backward if one may follow; returns if that was all."""
    now: list[Link] = []
    later: list[Link] = []
    for group in groups:
        own = group.collectives.group
        between = None if group.between is None else group.between.group
        further = [group.reducers.group]
        if group.smaller_group is not None:
            further.append(group.smaller_group.collectives.group)
        if group.replicas is not None:
            further.append(group.replicas.group)
        name, device = group.name, group.device
        now += [(used, device, name) for used in (own, between) if used is not None]
        later += [(used, device, name) for used in further if used not in (None, own)]
    _connect(list(filter(_connects_late, now + later if expects_backward else now)))
    # If only forwards without backward came so far, the next one asks again.
    return not any(map(_connects_late, later))


def _connect(links: Sequence[Link]) -> None:
    """Run the first collective of process groups that connect late, each once in a process.

    All ranks of each connect it before they wait for anything else. A collective that fails is a
    `CommunicationError`; other errors are those of `meet`.
    """
    in_order = sorted(links, key=lambda link: (global_ranks(link[0]), link[0].group_name))
    # All before the first collective: an absent rank is then reported, not waited for in one.
    for link in in_order:
        meet(*link)
    for group, device, unit in in_order:
        if group in _connected:  # it was twice in the list
            continue
        with naming_unit("first collective", unit):
            run_first_collective(group, device)
        _connected.add(group)


def _connects_late(link: Link) -> bool:
    """Whether its backend makes communicators in the first collective, which did not run yet."""
    group, device, _ = link
    if group in _connected or group.size() == 1:
        return False
    return traits_of(group, device).connects_late
