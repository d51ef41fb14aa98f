"""Which process groups a root's units communicate over: connected before the first gather.

    forward    shard groups                                  what gathers use
    backward   smaller groups, reductions' own, replicas     what reductions use besides

`fsdp2.core.device.presence.connect` says in which order, and why it cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.core.device.presence import Link, connect, unconnected
from fsdp2.core.device.process_groups import ProcessGroup
from fsdp2.core.schedule.group import ParamGroup


def connect_groups(groups: Sequence[ParamGroup], expects_backward: bool) -> bool:
    """Connect what a forward needs, and its backward; returns whether that was all.

    Args:
        groups: parameter groups of a root.
        expects_backward: whether a backward may follow.
    """
    now: list[Link] = []
    later: list[Link] = []
    for group in groups:
        now += _links(group, [group.collectives.group])
        later += _links(group, _used_in_backward(group))
    connect(unconnected(now + later if expects_backward else now))
    return not unconnected(later)


def _used_in_backward(group: ParamGroup) -> list[ProcessGroup | None]:
    used = [group.reducers.group]
    if group.smaller_group is not None:
        used.append(group.smaller_group.collectives.group)
    if group.replicas is not None:
        used.append(group.replicas.group)
    return [found for found in used if found is not group.collectives.group]


def _links(group: ParamGroup, used: Sequence[ProcessGroup | None]) -> list[Link]:
    return [Link(found, group.device, group.name) for found in used if found is not None]
