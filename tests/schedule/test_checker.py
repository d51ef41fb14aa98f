"""The happens-before checker and the oracle on tiny schedules that are written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fsdp2.core.device.streams import Lane
from fsdp2.record.notes import HOST, USER, Await
from fsdp2.testing.virtual import VirtualDevice, VirtualTensor, VirtualTransient
from tests.common.oracle import unordered_conflicts

pytestmark = pytest.mark.alone


def _buffer(device: VirtualDevice, name: str = "x") -> VirtualTensor:
    return device.empty((1,), torch.float32, name)


def _run(
    device: VirtualDevice,
    lane: Lane,
    reads: list[VirtualTensor] | None = None,
    writes: list[VirtualTensor] | None = None,
) -> None:
    with device.on(lane):
        device.run("op", reads or [], writes or [])


def _order(device: VirtualDevice, before: Lane, after: Lane) -> None:
    device.wait(after, device.record(before, "event"), "order")


def _read_unwritten(device: VirtualDevice) -> None:
    _run(device, Lane.COMPUTE, reads=[_buffer(device)])


def _read_without_wait(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    _run(device, Lane.REDUCE, reads=[x])


def _record_too_early(device: VirtualDevice) -> None:
    x = _buffer(device)
    event = device.record(Lane.COMPUTE, "event")
    _run(device, Lane.COMPUTE, writes=[x])
    device.wait(Lane.REDUCE, event, "order")
    _run(device, Lane.REDUCE, reads=[x])


def _wait_on_another_lane(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    _order(device, Lane.COMPUTE, Lane.COPY_IN)
    _run(device, Lane.ALL_GATHER, reads=[x])


def _write_after_read(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    _order(device, Lane.COMPUTE, Lane.REDUCE)
    _run(device, Lane.REDUCE, reads=[x])
    _run(device, Lane.COMPUTE, writes=[x])


def _write_after_one_of_two_reads(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    for lane in (Lane.COPY_IN, Lane.REDUCE):
        _order(device, Lane.COMPUTE, lane)
        _run(device, lane, reads=[x])
    _order(device, Lane.REDUCE, Lane.COMPUTE)
    _run(device, Lane.COMPUTE, writes=[x])


def _write_after_write(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.ALL_GATHER, writes=[x])
    _run(device, Lane.COMPUTE, writes=[x])


def _reuse_while_read(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    _order(device, Lane.COMPUTE, Lane.REDUCE)
    _run(device, Lane.REDUCE, reads=[x])
    del x
    _run(device, Lane.COMPUTE, writes=[_buffer(device, "y")])


def _wait_after_reuse(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.REDUCE, writes=[x])
    del x
    y = _buffer(device, "y")
    _run(device, Lane.COMPUTE, writes=[y])
    _order(device, Lane.REDUCE, Lane.COMPUTE)
    _run(device, Lane.COMPUTE, reads=[y])


def _reuse_on_a_third_lane(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.REDUCE, writes=[x])
    del x
    y = _buffer(device, "y")
    _order(device, Lane.REDUCE, Lane.COMPUTE)  # but the next to use it does not wait for COMPUTE
    _run(device, Lane.ALL_GATHER, writes=[y])


def _reuse_two_lives_later(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.REDUCE, writes=[x])
    del x
    y = _buffer(device, "y")
    del y
    _run(device, Lane.COMPUTE, writes=[_buffer(device, "z")])


WRONG: list[tuple[Callable[[VirtualDevice], None], str]] = [
    (_read_without_wait, "op reads x while compute#1 writes it"),
    (_record_too_early, "op reads x while compute#1 writes it"),
    (_wait_on_another_lane, "op reads x while compute#1 writes it"),
    (_write_after_read, "op writes x while reduce#1 reads it"),
    (_write_after_one_of_two_reads, "op writes x while copy_in#1 reads it"),
    (_write_after_write, "op writes x while all_gather#1 writes it"),
    (_reuse_while_read, "op uses y, whose memory reduce#1 still uses"),
    (_wait_after_reuse, "op uses y, whose memory reduce#1 still uses"),
    (_reuse_on_a_third_lane, "op uses y, whose memory reduce#1 still uses"),
    (_reuse_two_lives_later, "op uses z, whose memory reduce#1 still uses"),
]


@pytest.mark.parametrize(("schedule", "race"), WRONG)
def test_wrong_schedule(schedule: Callable[[VirtualDevice], None], race: str) -> None:
    device = VirtualDevice()
    schedule(device)
    assert device.races == [race]
    assert len(unordered_conflicts(device.trace)) == 1


def test_read_of_what_nothing_wrote() -> None:
    device = VirtualDevice()
    _read_unwritten(device)
    assert device.races == ["op reads x, which nothing wrote"]


def test_use_after_free() -> None:
    device = VirtualDevice()
    transient = VirtualTransient(device, 4, "x")
    view = transient.view(torch.float32, 0, (1,))
    _run(device, Lane.COMPUTE, writes=[view])
    transient.release()
    _run(device, Lane.COMPUTE, reads=[view])
    _run(device, Lane.COMPUTE, writes=[view])
    assert device.races == ["op uses a buffer that is not allocated"] * 2


def test_new_life_of_a_buffer_must_be_written() -> None:
    device = VirtualDevice()
    transient = VirtualTransient(device, 4, "x")
    view = transient.view(torch.float32, 0, (1,))
    _run(device, Lane.COMPUTE, writes=[view])
    transient.release()
    transient.acquire()
    _run(device, Lane.COMPUTE, reads=[view])
    assert device.races == ["op reads x, which nothing wrote"]


def _one_lane(device: VirtualDevice) -> None:
    for _ in range(3):
        x = _buffer(device)
        _run(device, Lane.COMPUTE, writes=[x])
        _run(device, Lane.COMPUTE, reads=[x], writes=[x])


def _there_and_back(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    _order(device, Lane.COMPUTE, Lane.REDUCE)
    _run(device, Lane.REDUCE, reads=[x], writes=[x])
    _order(device, Lane.REDUCE, Lane.COMPUTE)
    _run(device, Lane.COMPUTE, writes=[x])


def _over_a_third_lane(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COPY_IN, writes=[x])
    _order(device, Lane.COPY_IN, Lane.ALL_GATHER)
    _order(device, Lane.ALL_GATHER, Lane.COMPUTE)
    _run(device, Lane.COMPUTE, reads=[x])


def _reads_at_once(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    for lane in (Lane.COPY_IN, Lane.REDUCE):
        _order(device, Lane.COMPUTE, lane)
        _run(device, lane, reads=[x])
    _run(device, Lane.COMPUTE, reads=[x])


def _later_event_of_the_lane(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.REDUCE, writes=[x])
    _run(device, Lane.REDUCE)
    _order(device, Lane.REDUCE, Lane.COMPUTE)
    _run(device, Lane.COMPUTE, reads=[x])


def _reuse_after_wait(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.REDUCE, writes=[x])
    _order(device, Lane.REDUCE, Lane.COMPUTE)
    del x
    y = _buffer(device, "y")
    _run(device, Lane.COMPUTE, writes=[y])
    _order(device, Lane.COMPUTE, Lane.ALL_GATHER)
    _run(device, Lane.ALL_GATHER, reads=[y])


def _memory_of_another_lane(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    del x
    with device.on(Lane.REDUCE):  # its allocator has blocks of its own
        y = _buffer(device, "y")
    _run(device, Lane.REDUCE, writes=[y])


def _allocated_before_the_free(device: VirtualDevice) -> None:
    x, y = _buffer(device), _buffer(device, "y")
    _run(device, Lane.REDUCE, writes=[x])
    del x
    _run(device, Lane.COMPUTE, writes=[y])


@pytest.mark.parametrize(
    "schedule",
    [
        _one_lane,
        _there_and_back,
        _over_a_third_lane,
        _reads_at_once,
        _later_event_of_the_lane,
        _reuse_after_wait,
        _memory_of_another_lane,
        _allocated_before_the_free,
    ],
)
def test_right_schedule(schedule: Callable[[VirtualDevice], None]) -> None:
    device = VirtualDevice()
    schedule(device)
    assert device.races == []
    assert unordered_conflicts(device.trace) == []


def test_a_dropped_wait_is_counted_but_not_made() -> None:
    device = VirtualDevice(drop_wait=1)
    _there_and_back(device)
    assert device.waits == ["order", "order"]
    assert sum(isinstance(note, Await) for note in device.trace) == 1
    assert device.races == ["op writes x while reduce#1 writes it"]


# ---- the host and a stream of the user's


def _on_host(device: VirtualDevice, name: str = "x") -> VirtualTensor:
    with device.on(HOST):
        return _buffer(device, name)


def _host_reads_too_early(device: VirtualDevice) -> None:
    x = _on_host(device)
    source = _buffer(device, "y")
    _run(device, Lane.REDUCE, writes=[source])
    _run(device, Lane.REDUCE, reads=[source], writes=[x])
    _run(device, Lane.COMPUTE, reads=[x])  # all it touches is on the host, where it runs


def _host_writes_what_a_lane_reads(device: VirtualDevice) -> None:
    x, target = _on_host(device), _buffer(device, "y")
    _run(device, Lane.COMPUTE, writes=[x])
    _run(device, Lane.COPY_IN, reads=[x], writes=[target])
    _run(device, Lane.COMPUTE, writes=[x])


def _lane_that_the_host_knows_nothing_of(device: VirtualDevice) -> None:
    x, y = _buffer(device), _buffer(device, "y")
    _run(device, Lane.REDUCE, writes=[y])
    device.synchronize(device.record(Lane.REDUCE, "event"), "host")
    _run(device, Lane.REDUCE, writes=[x])  # after the event
    _run(device, Lane.COMPUTE, reads=[x])


def _user_without_an_event(device: VirtualDevice) -> None:
    x = _buffer(device)
    with device.on(USER):
        device.run("op", [], [x])
    _run(device, Lane.ALL_GATHER, reads=[x])


@pytest.mark.parametrize(
    ("schedule", "race"),
    [
        (_host_reads_too_early, "op reads x while reduce#2 writes it"),
        (_host_writes_what_a_lane_reads, "op writes x while copy_in#1 reads it"),
        (_lane_that_the_host_knows_nothing_of, "op reads x while reduce#2 writes it"),
        (_user_without_an_event, "op reads x while user#1 writes it"),
    ],
)
def test_wrong_schedule_beside_the_lanes(
    schedule: Callable[[VirtualDevice], None], race: str
) -> None:
    device = VirtualDevice()
    schedule(device)
    assert device.races == [race]
    assert len(unordered_conflicts(device.trace)) == 1


def _host_waits(device: VirtualDevice) -> None:
    x, source = _on_host(device), _buffer(device, "y")
    _run(device, Lane.REDUCE, writes=[source])
    _run(device, Lane.REDUCE, reads=[source], writes=[x])
    device.synchronize(device.record(Lane.REDUCE, "event"), "host")
    _run(device, Lane.COMPUTE, reads=[x], writes=[x])
    _run(device, Lane.COMPUTE, reads=[source])  # what the host issues is behind what it waited for


def _lane_after_the_host(device: VirtualDevice) -> None:
    x, target = _on_host(device), _buffer(device, "y")
    _run(device, Lane.COMPUTE, writes=[x])
    _run(device, Lane.COPY_IN, reads=[x], writes=[target])


def _host_memory_again(device: VirtualDevice) -> None:
    x, source = _on_host(device), _buffer(device, "source")
    _run(device, Lane.REDUCE, writes=[source])
    _run(device, Lane.REDUCE, reads=[source], writes=[x])
    del x  # the allocator of page-locked memory waits for the copy
    _run(device, Lane.COMPUTE, writes=[_on_host(device, "y")])


def _not_page_locked(device: VirtualDevice) -> None:
    shard = device.host_flat(4, False, pin=False).view(torch.float32, 0, (1,))
    mirror = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[shard])
    with device.on(Lane.COPY_IN):
        device.copy(mirror, shard)
        gradient = device.host_empty((8,), torch.float32, pin=False)
        device.to_host(gradient, mirror)
    _run(device, Lane.COMPUTE, reads=[gradient], writes=[shard])


def _user_with_events(device: VirtualDevice) -> None:
    x = _buffer(device)
    _run(device, Lane.COMPUTE, writes=[x])
    device.follow(USER, device.record(Lane.COMPUTE, "event"))
    with device.on(USER):
        device.run("op", [x], [x])
    device.follow(Lane.ALL_GATHER, device.record(USER, "event"))
    _run(device, Lane.ALL_GATHER, reads=[x])


@pytest.mark.parametrize(
    "schedule",
    [_host_waits, _lane_after_the_host, _host_memory_again, _not_page_locked, _user_with_events],
)
def test_right_schedule_beside_the_lanes(schedule: Callable[[VirtualDevice], None]) -> None:
    device = VirtualDevice()
    schedule(device)
    assert device.races == []
    assert unordered_conflicts(device.trace) == []
