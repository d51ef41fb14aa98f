"""When the operations of a trace run, on traces that can be timed by hand."""

from __future__ import annotations

import pytest
import torch

from fsdp2.core.device.streams import Lane
from fsdp2.testing.virtual import VirtualDevice
from fsdp2.tracing.record.notes import HOST, Operation
from fsdp2.tracing.record.replay import Cost, Replay

pytestmark = pytest.mark.alone

TIMES = {"all_gather": 3.0, "reduce_scatter": 4.0, "forward": 5.0}


def _took(op: Operation) -> Cost:
    return Cost(TIMES.get(op.kind, 0.0))


def _run(device: VirtualDevice, lane: Lane, kind: str) -> None:
    with device.on(lane):
        device.run(kind, [], [device.empty((1,), torch.float32, "buffer")])


def test_lanes_run_beside_one_another() -> None:
    device = VirtualDevice()
    for lane, kind in ((Lane.ALL_GATHER, "all_gather"), (Lane.COMPUTE, "forward")) * 2:
        _run(device, lane, kind)
    step = Replay(device.trace, _took)
    assert [(span.start, span.end) for span in step.slices] == [(0, 3), (0, 5), (3, 6), (5, 10)]
    assert step.idle(Lane.COMPUTE) == 0
    assert step.idle(Lane.ALL_GATHER) == 4


def test_a_lane_waits_for_what_its_event_is_behind() -> None:
    device = VirtualDevice()
    _run(device, Lane.ALL_GATHER, "all_gather")
    first = device.record(Lane.ALL_GATHER, "")
    _run(device, Lane.ALL_GATHER, "all_gather")
    device.wait(Lane.COMPUTE, first, "")
    _run(device, Lane.COMPUTE, "forward")
    step = Replay(device.trace, _took)
    assert [(span.start, span.end) for span in step.slices] == [(0, 3), (3, 6), (3, 8)]
    assert step.idle(Lane.COMPUTE) == 3


def test_what_the_host_waits_for_holds_up_all_that_it_launches_next() -> None:
    device = VirtualDevice()
    _run(device, Lane.COMPUTE, "forward")
    device.synchronize(device.record(Lane.COMPUTE, ""), "")
    _run(device, Lane.ALL_GATHER, "all_gather")
    step = Replay(device.trace, _took)
    assert [(span.start, span.end) for span in step.slices] == [(0, 5), (5, 8)]
    assert step.idle(HOST) == 8


@pytest.mark.parametrize(("channel", "end"), [(None, 4.0), ("communicator", 7.0)])
def test_collectives_of_one_communicator(channel: str | None, end: float) -> None:
    device = VirtualDevice()
    _run(device, Lane.ALL_GATHER, "all_gather")
    _run(device, Lane.REDUCE, "reduce_scatter")
    step = Replay(device.trace, lambda op: Cost(_took(op).time, channel=channel))
    assert step.slices[-1].end == end


def test_what_was_recorded_before_the_trace_is_over() -> None:
    device = VirtualDevice()
    _run(device, Lane.ALL_GATHER, "all_gather")
    event = device.record(Lane.ALL_GATHER, "")
    start = len(device.trace)
    device.wait(Lane.COMPUTE, event, "")
    _run(device, Lane.COMPUTE, "forward")
    (span,) = Replay(device.trace[start:], _took).slices
    assert (span.start, span.end) == (0, 5)


def test_nothing_takes_no_time() -> None:
    assert Replay([], _took).idle(Lane.COMPUTE) == 0
