"""An all-gather is a value: operations by the moment and the lane at which they run.

    moment        lane         what it does
    acquire       COMPUTE      allocates what only the collectives need
    copy_in       COPY_IN      loads shards from the host; casts or encodes them
    collectives   ALL_GATHER   what is sent
    copy_out      COMPUTE      puts pieces in place
    release       COMPUTE      frees what ``acquire`` allocated

    a segment's operations ┐
    another's              ├── combined ──> Gather ── gather_on_lanes, gather_inline ──> Launched
    a load from the host   ┘

An operation is a callable without arguments, bound to its memory once; work that a segment does not
have is an operation that is not there. Builders make them: `segments`, `coded`, `extension`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from fsdp2.core.device.collectives import Launch, Work
from fsdp2.core.device.streams import ALL_GATHER, COMPUTE, COPY_IN, Event, Streams
from fsdp2.core.layout.layout import Slot
from fsdp2.core.progress import communication_error

Run = Callable[[], object]
"""An operation, bound to its memory."""


@dataclass(eq=False)
class Gather:
    """The operations of an all-gather, or of a part of one, by moment.

    Attributes:
        parameters: every slot, and the tensor of its gathered parameter, if it exists.
        finish: ``copy_out`` and ``release``, part by part: each part frees its memory before the
            next copy.
        early: whether the gathered buffer must be allocated before the collectives, which write it.
        aliases: whether unsharded parameters are views of the shard.
        loads: whether shards are copied from the host first.
        kept: the `KeptRows` that it leaves for later all-gathers, if any.
        launches: whether there is anything to run before ``finish``.
        finishes: whether anything remains to be done after it.
    """

    parameters: Sequence[tuple[Slot, torch.Tensor]] = ()
    acquire: Sequence[Run] = ()
    copy_in: Sequence[Run] = ()
    collectives: Sequence[Launch] = ()
    copy_out: Sequence[Run] = ()
    release: Sequence[Run] = ()
    early: bool = False
    aliases: bool = False
    loads: bool = False
    finish: Sequence[Run] = ()
    kept: object = None
    launches: bool = field(init=False)
    finishes: bool = field(init=False)

    def __post_init__(self) -> None:
        self.finish = self.finish or [*self.copy_out, *self.release]
        # Without a collective, all of it runs in `finish`, on COMPUTE.
        self.launches = bool(self.collectives) or self.loads
        # If not early, the gathered buffer is allocated then; if shards were loaded, the mirror is
        # freed.
        self.finishes = bool(self.finish) or self.loads or not self.early


def combined(parts: Iterable[Gather]) -> Gather:
    """One all-gather of several parts: moment by moment, in their order."""
    parts = list(parts)
    return Gather(
        [found for part in parts for found in part.parameters],
        [run for part in parts for run in part.acquire],
        [run for part in parts for run in part.copy_in],
        [launch for part in parts for launch in part.collectives],
        [run for part in parts for run in part.copy_out],
        [run for part in parts for run in part.release],
        early=any(part.early for part in parts),
        aliases=any(part.aliases for part in parts),
        loads=any(part.loads for part in parts),
        finish=[run for part in parts for run in part.finish],
    )


# ---- the executors


Launched = tuple[Event, Event]
"""Events after an all-gather's copies in and after its collectives; ``None``: no wait."""


def gather_on_lanes(
    streams: Streams, gather: Gather, name: str, works: list[Work], *, event: Event = None
) -> Launched:
    """Launch an all-gather, whose ``acquire`` has run, on its lanes, after what COMPUTE has so far.

    ``works`` receives the work objects for which the host must wait, also if something raises. The
    group's own ``event`` is recorded after the collectives: all-gathers of many groups may be
    running when COMPUTE waits only for this one.
    """
    copied = None
    # Memory that COMPUTE has allocated may be that of a tensor which it still reads (I2).
    behind = streams.record(COMPUTE, "buffers allocated")
    if gather.copy_in:
        streams.wait(COPY_IN, behind, "copy-in after compute")
        with streams.on(COPY_IN):
            for run in gather.copy_in:
                run()
        # COPY_IN has waited for COMPUTE, so ALL_GATHER need not wait for both.
        behind = copied = streams.record(COPY_IN, "copy-in done")
    streams.wait(ALL_GATHER, behind, "all-gather after copy-in")
    with streams.on(ALL_GATHER):
        gather_inline(streams, gather, name, works, copied=True)
    return copied, streams.record(ALL_GATHER, "all-gather done", event)


def gather_inline(
    streams: Streams, gather: Gather, name: str, works: list[Work], copied: bool = False
) -> Launched:
    """As `gather_on_lanes` in one lane: the only one, as on a CPU, or the current one."""
    for run in () if copied else gather.copy_in:
        run()
    try:
        for launch in gather.collectives:
            if (work := launch()) is not None:
                works.append(work)
    except torch.OutOfMemoryError:  # a RuntimeError, too, but no failure of communication
        raise
    except RuntimeError as error:
        raise communication_error("all-gather", name, error) from error
    return None, None
