"""An accelerator's lanes, which are streams, and its event rings, on stand-ins."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fsdp2.core.device.streams import SIDE_LANES, DeviceStreams, Lane, OnStream

pytestmark = pytest.mark.alone


class FakeStream:
    """A queue of numbered operations, and how far of each other stream it is behind."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device
        self.priority = priority
        self.length = 0
        self.behind: dict[FakeStream, int] = {}

    def run(self) -> int:
        self.length += 1
        return self.length


class FakeEvent:
    """An event that can be recorded again, as a device's can."""

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.stream: FakeStream | None = None
        self.length = 0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.length = stream, stream.length

    def wait(self, stream: FakeStream) -> None:
        assert self.stream is not None
        behind = stream.behind.get(self.stream, 0)
        stream.behind[self.stream] = max(behind, self.length)


class FakeAccelerator:
    """Knows the current stream of each device index."""

    def __init__(self) -> None:
        self.index = 3
        self.user = FakeStream()
        self.current = self.user

    def current_stream(self, index: int) -> FakeStream:
        assert index == self.index
        return self.current

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    fake = FakeAccelerator()
    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.accelerator, "set_stream", fake.set_stream)
    return fake


@pytest.fixture
def streams(accelerator: FakeAccelerator) -> DeviceStreams:
    return DeviceStreams(torch.device("cuda", accelerator.index))


def _current(streams: DeviceStreams, accelerator: FakeAccelerator, lane: Lane) -> FakeStream:
    if lane is Lane.COMPUTE:
        return accelerator.current
    with streams.on(lane):
        return accelerator.current


@pytest.mark.parametrize("lane", SIDE_LANES)
def test_compute_waits_for_all_but_all_reduces(
    streams: DeviceStreams, accelerator: FakeAccelerator, lane: Lane
) -> None:
    """Those have the default priority, as torch's."""
    priority = _current(streams, accelerator, lane).priority
    assert priority == (0 if lane is Lane.ALL_REDUCE else -1)


def test_on_restores_the_users_stream(streams: DeviceStreams, accelerator: FakeAccelerator) -> None:
    accelerator.current = own = FakeStream()
    with streams.on(Lane.REDUCE):
        assert accelerator.current not in (own, accelerator.user)
    assert accelerator.current is own
    with pytest.raises(KeyError, match="mine"), streams.on(Lane.REDUCE):
        raise KeyError("mine")
    assert accelerator.current is own


def test_compute_is_whatever_stream_is_current(
    streams: DeviceStreams, accelerator: FakeAccelerator
) -> None:
    accelerator.current = own = FakeStream()
    own.run()
    event = streams.record(Lane.COMPUTE, "event")
    streams.wait(Lane.REDUCE, event, "order")
    assert _current(streams, accelerator, Lane.REDUCE).behind == {own: 1}
    streams.wait(Lane.COMPUTE, streams.record(Lane.REDUCE, "event"), "order")
    assert list(own.behind) == [_current(streams, accelerator, Lane.REDUCE)]
    assert accelerator.user.behind == {}


@pytest.mark.parametrize("records_between", [0, 1, 15, 16, 40])
def test_a_late_wait_is_never_too_weak(
    streams: DeviceStreams, accelerator: FakeAccelerator, records_between: int
) -> None:
    gather = _current(streams, accelerator, Lane.ALL_GATHER)
    gather.run()
    gather.run()
    event = streams.record(Lane.ALL_GATHER, "all-gather done")
    needed = gather.length
    for _ in range(records_between):
        gather.run()
        streams.record(Lane.ALL_GATHER, "all-gather done")
    streams.wait(Lane.COMPUTE, event, "compute after all-gather")
    assert needed <= accelerator.user.behind[gather] <= gather.length
    if records_between < DeviceStreams.RING:
        assert accelerator.user.behind[gather] == needed  # not stricter than it must be


@pytest.mark.parametrize("records_between", [0, 16, 40])
def test_a_wait_for_an_event_of_ones_own_is_never_too_strict(
    streams: DeviceStreams, accelerator: FakeAccelerator, records_between: int
) -> None:
    gather = _current(streams, accelerator, Lane.ALL_GATHER)
    events = [streams.make_event() for _ in range(records_between + 1)]
    for event in events:
        gather.run()
        assert streams.record(Lane.ALL_GATHER, "all-gather done", event) is event
    for number, event in enumerate(events, 1):
        streams.wait(Lane.COMPUTE, event, "compute after all-gather")
        assert accelerator.user.behind[gather] == number


# ---- a stream of the user's


class UsersStream(FakeStream):
    """A stream that can wait for another one."""

    device_index = 3

    def wait_stream(self, other: FakeStream) -> None:
        self.behind[other] = other.length


@pytest.mark.parametrize("fails", [False, True])
def test_a_function_on_a_stream_is_ordered_both_ways(
    accelerator: FakeAccelerator, fails: bool
) -> None:
    """And the current stream is back after an error."""
    accelerator.current = lane = UsersStream()
    own = UsersStream()
    lane.run()

    def hook(tensor: torch.Tensor) -> None:
        assert accelerator.current is own
        assert own.behind == {lane: 1}
        own.run()
        if fails:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") if fails else nullcontext():
        OnStream(hook, own)(torch.zeros(1))  # type: ignore[arg-type]  # a stand-in
    assert accelerator.current is lane
    assert fails or lane.behind == {own: 1}
