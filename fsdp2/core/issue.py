"""A gather's collectives, issued: on lanes of their own, or one after the other.

on lanes   COMPUTE ──> COPY_IN     load from the host, cast
                         └──> ALL_GATHER   the collectives      ──> event
inline     the same calls, on the only lane: nothing to order
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fsdp2.core.progress import communication_error
from fsdp2.core.streams import ALL_GATHER, COMPUTE, COPY_IN, Streams
from fsdp2.core.transport import Route


class Issued(NamedTuple):
    """Events of a gather; ``None`` where nothing has to be waited for.

    Attributes:
        copied: behind the copies in front of the collectives.
        gathered: behind the collectives.
    """

    copied: Any = None
    gathered: Any = None


def issue_on_lanes(streams: Streams, route: Route, name: str, works: list[Any]) -> Issued:
    """Issue the collectives of ``route`` on their lanes, behind COMPUTE as it is now.

    Args:
        streams: the lanes.
        route: what is gathered; its memory is there.
        name: the group's, for messages.
        works: gets what the host must wait for, as far as it was issued when something raises.
    """
    copied = None
    event = streams.record(COMPUTE, "buffers allocated")
    if route.copying:
        streams.wait(COPY_IN, event, "copy-in after compute")
        with streams.on(COPY_IN):
            for transport in route.copying:
                transport.copy_in()
        event = copied = streams.record(COPY_IN, "copy-in done")
    streams.wait(ALL_GATHER, event, "all-gather after copy-in")
    with streams.on(ALL_GATHER):
        issue_inline(streams, route, name, works, copied=True)
    return Issued(copied, streams.record(ALL_GATHER, "all-gather done"))


_DONE = Issued()


def issue_inline(
    streams: Streams, route: Route, name: str, works: list[Any], copied: bool = False
) -> Issued:
    """As `issue_on_lanes` where all lanes are one, as on a CPU; or in the lane that is current.

    Args:
        streams: the lanes.
        route: what is gathered; its memory is there.
        name: the group's, for messages.
        works: as for `issue_on_lanes`.
        copied: whether the copies in front of the collectives have been issued.
    """
    for transport in () if copied else route.copying:
        transport.copy_in()
    try:
        for gather in route.gathers:
            work = gather()
            if work is not None:
                works.append(work)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise communication_error("all-gather", name, error) from error
    return _DONE
