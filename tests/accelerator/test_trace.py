"""Traces where lanes are streams, on the stand-in: events' own times, and waits between lanes.

No GPU has run it. The stand-in runs each operation at once, so that an event's time is the host's
when it was recorded; what is checked is the order, and what waited for what.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fsdp2
from fsdp2.core.device.streams import DeviceStreams
from fsdp2.core.modules.registry import require_record
from fsdp2.testing.stand_in import device, group
from fsdp2.tracing import Timeline
from tests.accelerator import test_lanes as lanes
from tests.common import workers

BLOCKS = 3


def _traced(**options: Any) -> tuple[Timeline, int]:
    """A steady step, and how often a lane was made to wait in it."""
    mesh = lanes._mesh(device.NAME, group.COALESCING, (2,))
    model = lanes.sharded_layers(mesh, *[nn.Linear(64, 64) for _ in range(BLOCKS)], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    batch = torch.ones(4, 64, device=device.NAME)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    streams: Any = require_record(model).streams
    with tempfile.TemporaryDirectory() as folder:
        before = device.count_of("wait")
        with fsdp2.trace(Path(folder, "step-{rank}.json")) as trace:
            step()
        waits = device.count_of("wait") - before
    assert type(streams) is DeviceStreams
    step()
    assert not device.races()
    assert trace.timeline is not None
    return trace.timeline, waits


@workers.ranks(2)
def test_lanes_are_streams() -> None:
    timeline, waits = _traced()
    assert timeline.metadata["clock"] == "events"
    assert [s.unit for s in timeline.on("all-gather")] == [*"012", *"210"]
    scattered = [s.unit for s in timeline.on("reduce") if s.operation == "reduce-scatter"]
    assert scattered == [*"210"]
    edges = Counter((w.lane, w.on) for w in timeline.waits)
    assert edges["compute", "all-gather"] == 2 * BLOCKS
    assert edges["all-gather", "compute"] == 2 * BLOCKS
    assert edges["reduce", "compute"] == BLOCKS
    assert edges["compute", "reduce"] == BLOCKS
    assert sum(edges.values()) <= waits  # collectives' own, besides


@workers.ranks(2)
def test_times_are_those_of_events() -> None:
    """In the order of lanes, and within what the host saw."""
    timeline, _ = _traced()
    assert timeline.duration > 0
    for lane in ("compute", "all-gather", "reduce"):
        slices = timeline.on(lane)
        assert all(s.start <= s.end for s in slices)
        assert all(a.end <= b.start + 0.01 for a, b in itertools.pairwise(slices))
    for wait in timeline.waits:
        if wait.behind >= 0:
            assert timeline.slices[wait.behind].lane == wait.on
            assert timeline.slices[wait.behind].end <= wait.end + 0.01
    forward = [s for s in timeline.on("compute") if s.operation == "forward" and s.unit == "1"]
    (gather,) = [s for s in timeline.on("all-gather") if s.unit == "1"][:1]
    assert gather.end <= forward[-1].end


@workers.ranks(2)
def test_inputs_of_reductions_are_counted_while_they_are_there() -> None:
    """One at a time, as COMPUTE waits for a reduction before it stages the next."""
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    timeline, _ = _traced(mp_policy=policy)
    counted = [sample.bytes.get("reduction buffers", 0) for sample in timeline.memory]
    scattered = [s for s in timeline.slices if s.operation == "reduce-scatter"]
    assert 0 < max(counted) <= max(s.bytes for s in scattered)
    assert counted[-1] == 0
