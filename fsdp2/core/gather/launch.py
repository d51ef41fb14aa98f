"""Launches the collectives of an all-gather: on separate lanes, or one after the other.

on lanes   COMPUTE ──> COPY_IN     load from the host, cast
                         └──> ALL_GATHER   the collectives      ──> event
inline     the same calls, on the only lane: nothing to order
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fsdp2.core.device.collectives import Work
from fsdp2.core.device.streams import ALL_GATHER, COMPUTE, COPY_IN, Event, Streams
from fsdp2.core.gather.transport import Route
from fsdp2.core.progress import communication_error


class Launched(NamedTuple):
    """Events of an all-gather; ``None`` if nothing must be waited for.

    Attributes:
        copied: after the copies before the collectives.
        gathered: after the collectives.
    """

    copied: Event = None
    gathered: Event = None


def gather_on_lanes(
    streams: Streams, route: Route, name: str, works: list[Work], *, event: Event = None
) -> Launched:
    """Launch the collectives of ``route`` on their lanes, after everything on COMPUTE so far.

    Args:
        streams: the lanes.
        route: the transports; their memory is allocated.
        name: the group's, for messages.
        works: receives the work objects for which the host must wait, also if something raises.
        event: the group's own, to record after the collectives: all-gathers of many groups may be
            running when COMPUTE waits only for this one.
    """
    copied = None
    behind = streams.record(COMPUTE, "buffers allocated")
    if route.copying:
        streams.wait(COPY_IN, behind, "copy-in after compute")
        with streams.on(COPY_IN):
            for transport in route.copying:
                transport.copy_in()
        behind = copied = streams.record(COPY_IN, "copy-in done")
    streams.wait(ALL_GATHER, behind, "all-gather after copy-in")
    with streams.on(ALL_GATHER):
        gather_inline(streams, route, name, works, copied=True)
    return Launched(copied, streams.record(ALL_GATHER, "all-gather done", event))


_DONE = Launched()


def gather_inline(
    streams: Streams, route: Route, name: str, works: list[Work], copied: bool = False
) -> Launched:
    """As `gather_on_lanes` where all lanes are one, as on a CPU; or in the lane that is current.

    Args:
        streams: the lanes.
        route: the transports, whose memory is allocated.
        name: the group's, for messages.
        works: as for `gather_on_lanes`.
        copied: whether the copies in front of the collectives have been launched.
    """
    for transport in () if copied else route.copying:
        transport.copy_in()
    try:
        for gather in route.gathers:
            if (work := gather()) is not None:
                works.append(work)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise communication_error("all-gather", name, error) from error
    return _DONE
