"""Lanes of execution and the events that order them.

    lane          accelerator                         CPU, or a device without streams
    COMPUTE       the user's current stream           the only one there is
    COPY_IN       casts and packs shards              (same)
    ALL_GATHER    runs all-gathers                    (same)
    REDUCE        divides, reduce-scatters, casts     (same)
    ALL_REDUCE    sums over the replicate axis        (same)

Every buffer is allocated and freed on COMPUTE (invariant I2, decision 1), which
`fsdp2.testing.virtual`, a third implementation, checks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType

import torch


class Lane(IntEnum):
    """A sequence of operations that run in order."""

    COMPUTE = 0
    COPY_IN = 1
    ALL_GATHER = 2
    REDUCE = 3
    ALL_REDUCE = 4


COMPUTE, COPY_IN, ALL_GATHER, REDUCE, ALL_REDUCE = Lane
"""For the hot path: in Python 3.11, access to an enum's member costs more than a call."""

SIDE_LANES = (COPY_IN, ALL_GATHER, REDUCE, ALL_REDUCE)

_PRIORITIES = {COPY_IN: -1, ALL_GATHER: -1, REDUCE: -1, ALL_REDUCE: 0}
"""High where a delayed copy or collective holds up compute; nothing waits for a step's all-reduces
before its end. The same as torch's FSDP2 (2.13, `FSDPCommContext.lazy_init`)."""


Event = torch.Event | None
"""``None`` if there is one lane: all launched operations have run."""


class Streams:
    """The lanes of a device for the scheduler: here one for all, in which an operation has run when
    its call returns, or before any later one.
    """

    asynchronous = False
    """Whether lanes run asynchronously to the host, so that events must order collectives."""

    captures: Callable[[], bool] | None = None
    """Whether the current stream records a CUDA graph; ``None`` if it cannot."""

    _stay = nullcontext()  # one for all: it has no state

    def make_event(self) -> Event:
        """Return an event that the caller may `record` repeatedly; ``None`` without streams."""
        return None

    def record(self, lane: Lane, label: str, event: Event = None) -> Event:
        """Return an event after everything issued on ``lane`` so far, named by ``label``:
        ``event``, one of `make_event`, or one that is soon reused, for a wait at once.
        """
        return None

    def wait(self, lane: Lane, event: Event, label: str) -> None:
        """Make ``lane`` wait for ``event``; ``label`` names the order that this makes."""

    def synchronize(self, event: Event, label: str) -> None:
        """Block the host until ``event`` has happened; ``label`` names the order made."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """Run the operations inside the ``with`` on ``lane``."""
        return self._stay


class _OnStream:
    """Makes a stream current inside a ``with``; not nested with itself."""

    def __init__(self, stream: torch.Stream, index: int) -> None:
        self._stream = stream
        self._index = index
        self._outer: torch.Stream | None = None

    def __enter__(self) -> None:
        # Asked each time: COMPUTE is whichever stream the user has made current.
        self._outer = torch.accelerator.current_stream(self._index)
        torch.accelerator.set_stream(self._stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._outer is not None
        torch.accelerator.set_stream(self._outer)
        self._outer = None


class DeviceStreams(Streams):
    """Streams and events of an accelerator.

    Events come from a small ring per lane, unless the caller provides one. If an event of a ring is
    recorded again before its first record was waited for, that wait only becomes stricter, because
    it is later on the same stream. COMPUTE's events are waited for right after they are recorded.
    An all-gather's are not, if many units are prefetched: each group has its own.
    """

    asynchronous = True
    RING = 16

    def __init__(self, device: torch.device) -> None:
        self._index = device.index if device.index is not None else 0
        on_cuda = device.type == "cuda"
        self.captures = torch.cuda.is_current_stream_capturing if on_cuda else None
        self._device = device
        self._streams = {
            lane: torch.Stream(device, priority=_PRIORITIES[lane]) for lane in SIDE_LANES
        }
        self._contexts = {
            lane: _OnStream(stream, self._index) for lane, stream in self._streams.items()
        }
        self._rings = {lane: [torch.Event(device) for _ in range(self.RING)] for lane in Lane}
        self._next = dict.fromkeys(Lane, 0)

    def make_event(self) -> torch.Event:
        return torch.Event(self._device)

    def record(self, lane: Lane, label: str, event: Event = None) -> torch.Event:
        """Record ``event``, or the lane's next one."""
        if event is None:
            position = self._next[lane]
            self._next[lane] = (position + 1) % self.RING
            event = self._rings[lane][position]
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, event: Event, label: str) -> None:
        """Queue a wait on the lane's stream; the host does not block."""
        if event is not None:
            event.wait(self._stream(lane))

    def synchronize(self, event: Event, label: str) -> None:
        if event is not None:
            event.synchronize()

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        return self._contexts[lane]

    def _stream(self, lane: Lane) -> torch.Stream:
        if lane is COMPUTE:
            return torch.accelerator.current_stream(self._index)
        return self._streams[lane]


def make_streams(device: torch.device) -> Streams:
    """The lanes of ``device``: streams, or a single lane if creating a stream fails."""
    if device.type in ("cpu", "meta"):
        return Streams()
    try:
        return DeviceStreams(device)
    except RuntimeError:  # such as XLA's, on which operations run in the order of their calls
        return Streams()


@dataclass(frozen=True)
class OnStream:
    """A function of a tensor that runs on the user's stream, in the order of the current one."""

    function: Callable[[torch.Tensor], None]
    stream: torch.Stream

    def __call__(self, tensor: torch.Tensor) -> None:
        """Run it, ordered both ways."""
        # Hooks run inside `on(ALL_REDUCE)`: this is that lane, not COMPUTE, which need not wait.
        index = self.stream.device_index
        current = torch.accelerator.current_stream(index)
        self.stream.wait_stream(current)
        with _OnStream(self.stream, index):
            self.function(tensor)
        current.wait_stream(self.stream)
