"""The happens-before checker and the oracle on tiny schedules that are written by hand.

A schedule is a string of steps. Lanes are c (COMPUTE), i (COPY_IN), g (ALL_GATHER), r (REDUCE),
h (the host) and u (a stream of the user's):

    c+x     x is allocated on COMPUTE            -x      and freed
    c=x     an operation writes x                c?x     one reads it      c?x=y   both
    c>r     REDUCE waits for an event recorded on COMPUTE now
    c!      an event is recorded on COMPUTE      r<      REDUCE waits for it
"""

from __future__ import annotations

import re

import pytest
import torch

from fsdp2.core.device.streams import Lane
from fsdp2.testing.virtual import VirtualDevice, VirtualTensor, VirtualTransient
from fsdp2.tracing.record.notes import HOST, USER, Await, Place
from tests.schedule.oracle import unordered_conflicts

pytestmark = pytest.mark.alone

LANES: dict[str, Place] = {
    "c": Lane.COMPUTE,
    "i": Lane.COPY_IN,
    "g": Lane.ALL_GATHER,
    "r": Lane.REDUCE,
    "h": HOST,
    "u": USER,
}

STEP = re.compile(r"(\w?)([-+!<>?=])([\w,]*)(?:=(\w+))?$")


def _run(device: VirtualDevice, schedule: str) -> None:
    tensors: dict[str, VirtualTensor] = {}
    event = -1
    for step in schedule.split():
        found = STEP.match(step)
        assert found is not None, step
        where, what, names, written = found.groups()
        lane = LANES.get(where, Lane.COMPUTE)
        if what == "+":
            with device.on(lane):
                tensors[names] = device.empty((1,), torch.float32, names)
        elif what == "-":
            del tensors[names]
        elif what == "!":
            event = device.record(lane, "event")
        elif what == "<":
            _wait(device, lane, event)
        elif what == ">":
            _wait(device, LANES[names], device.record(lane, "event"))
        else:
            reads = names if what == "?" else ""
            writes = written if what == "?" else names
            with device.on(lane):
                device.run(
                    "op", *([tensors[n] for n in (s or "") if n != ","] for s in (reads, writes))
                )


def _wait(device: VirtualDevice, lane: Place, event: int) -> None:
    if lane is HOST:
        device.synchronize(event, "host")
    elif lane is USER:
        device.follow(lane, event)
    else:
        device.wait(lane, event, "order")


THERE_AND_BACK = "c+x c=x c>r r?x=x r>c c=x"

WRONG = [
    ("c+x c=x r?x", "op reads x while compute#1 writes it"),
    ("c+x c! c=x r< r?x", "op reads x while compute#1 writes it"),
    ("c+x c=x c>i g?x", "op reads x while compute#1 writes it"),
    ("c+x c=x c>r r?x c=x", "op writes x while reduce#1 reads it"),
    ("c+x c=x c>i i?x c>r r?x r>c c=x", "op writes x while copy_in#1 reads it"),
    ("c+x g=x c=x", "op writes x while all_gather#1 writes it"),
    ("c+x c=x c>r r?x -x c+y c=y", "op uses y, whose memory reduce#1 still uses"),
    ("c+x r=x -x c+y c=y r>c c?y", "op uses y, whose memory reduce#1 still uses"),
    # The next to use it does not wait for COMPUTE.
    ("c+x r=x -x c+y r>c g=y", "op uses y, whose memory reduce#1 still uses"),
    ("c+x r=x -x c+y -y c+z c=z", "op uses z, whose memory reduce#1 still uses"),
    # All that the last operation touches is on the host, where it runs.
    ("h+x c+y r=y r?y=x c?x", "op reads x while reduce#2 writes it"),
    ("h+x c+y c=x i?x=y c=x", "op writes x while copy_in#1 reads it"),
    ("c+x c+y r=y r>h r=x c?x", "op reads x while reduce#2 writes it"),
    ("c+x u=x g?x", "op reads x while user#1 writes it"),
]

RIGHT = [
    "c+x c=x c?x=x -x c+x c=x c?x=x",
    THERE_AND_BACK,
    "c+x i=x i>g g>c c?x",
    "c+x c=x c>i i?x c>r r?x c?x",
    "c+x c+y r=x r=y r>c c?x",
    "c+x r=x r>c -x c+y c=y c>g g?y",
    "c+x c=x -x r+y r=y",  # each lane's allocator has blocks of its own
    "c+x c+y r=x -x c=y",
    "h+x c+y r=y r?y=x r>h c?x=x c?y",  # what the host issues comes after what it waited for
    "h+x c+y c=x i?x=y",
    "h+x c+s r=s r?s=x -x h+y c=y",  # the allocator of page-locked memory waits for the copy
    "c+x c=x c>u u?x=x u>g g?x",
]


@pytest.mark.parametrize(("schedule", "race"), WRONG)
def test_wrong_schedule(schedule: str, race: str) -> None:
    device = VirtualDevice()
    _run(device, schedule)
    assert device.races == [race]
    assert len(unordered_conflicts(device.trace)) == 1


@pytest.mark.parametrize("schedule", RIGHT)
def test_right_schedule(schedule: str) -> None:
    device = VirtualDevice()
    _run(device, schedule)
    assert device.races == []
    assert unordered_conflicts(device.trace) == []


def test_read_of_what_nothing_wrote() -> None:
    device = VirtualDevice()
    _run(device, "c+x c?x")
    assert device.races == ["op reads x, which nothing wrote"]


def test_memory_that_comes_and_goes() -> None:
    device = VirtualDevice()
    transient = VirtualTransient(device, 4, "x")
    view = transient.view(torch.float32, 0, (1,))
    device.run("op", [], [view])
    transient.release()
    device.run("op", [view], [])
    device.run("op", [], [view])
    transient.acquire()
    device.run("op", [view], [])
    freed = ["op uses a buffer that is not allocated"] * 2
    assert device.races == [*freed, "op reads x, which nothing wrote"]


def test_memory_that_is_not_page_locked() -> None:
    device = VirtualDevice()
    shard = device.host_flat(4, False, pin=False).view(torch.float32, 0, (1,))
    mirror = device.empty((1,), torch.float32, "x")
    device.run("op", [], [shard])
    with device.on(Lane.COPY_IN):
        device.copy(mirror, shard)
        gradient = device.host_empty((8,), torch.float32, pin=False)
        device.to_host(gradient, mirror)
    device.run("op", [gradient], [shard])
    assert device.races == []
    assert unordered_conflicts(device.trace) == []


def test_a_dropped_wait_is_counted_but_not_made() -> None:
    device = VirtualDevice(drop_wait=1)
    _run(device, THERE_AND_BACK)
    assert device.waits == ["order", "order"]
    assert sum(isinstance(note, Await) for note in device.trace) == 1
    assert device.races == ["op writes x while reduce#1 writes it"]
