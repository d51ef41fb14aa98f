"""When what `FlatOptimizer(offload=True)` does would run: copies, steps and backward side by side.

Streams and copies are noted as the optimizer asks for them, and replayed with given durations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.core.device.kernels import Kernels
from fsdp2.core.device.streams import COMPUTE, Streams
from fsdp2.optim import offloaded
from fsdp2.optim.offloaded import BACK, OUT, HostSection
from fsdp2.optim.runs import Section
from fsdp2.testing.null_group import null_mesh, null_world
from fsdp2.tracing.record.notes import HOST, Await, Notes, Operation, Place
from fsdp2.tracing.record.replay import Cost, Replay, Span, replay

pytestmark = pytest.mark.alone

UNITS, DIM = 6, 8


class NotedStreams(Notes, Streams):
    """Lanes that note what is asked of them."""

    asynchronous = False  # memory is not page-locked
    captures = None

    def make_event(self) -> Any:
        return None

    def record(self, lane: Place, label: str, event: Any = None) -> Any:
        return self.signal(lane, label)

    def wait(self, lane: Place, event: Any, label: str) -> None:
        if event is not None:
            self.note(Await(lane, event, label))

    def synchronize(self, event: Any, label: str) -> None:
        self.wait(HOST, event, label)

    def ran(self, lane: Place, name: str, unit: int) -> None:
        self.note(Operation(lane, name, "", unit=str(unit)))


class NotedKernels(Kernels):
    """Copies that are noted for the unit that the optimizer is at."""

    def __init__(self, streams: NotedStreams) -> None:
        super().__init__(torch.device("cpu"))
        self.streams, self.unit = streams, -1

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().to_host(target, source)
        self.streams.ran(self.streams.lane, "out", self.unit)

    def from_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().from_host(target, source)
        self.streams.ran(self.streams.lane, "back", self.unit)


@contextmanager
def noted() -> Iterator[tuple[NotedStreams, NotedKernels]]:
    """Shards in CPU memory travel, and what moves them is noted."""
    streams = NotedStreams()
    kernels = NotedKernels(streams)
    with ExitStack() as exits:
        for name, value in (("travels", True), ("make_streams", streams), ("kernels_for", kernels)):
            exits.enter_context(mock.patch.object(offloaded, name, return_value=value))
        yield streams, kernels


def told(kernels: NotedKernels, numbers: dict[Section, int]) -> ExitStack:
    """Calls of sections tell the kernels which unit it is; a step is an operation of the host."""

    def telling(owner: type[Section], name: str) -> Callable[..., None]:
        original = getattr(owner, name)

        def call(section: Section, *args: Any) -> None:
            kernels.unit = numbers.get(section, -1)
            if owner is Section and kernels.unit >= 0:
                kernels.streams.ran(HOST, "step", kernels.unit)
            original(section, *args)

        return call

    exits = ExitStack()
    for owner, name in ((HostSection, "leave"), (Section, "step")):
        exits.enter_context(mock.patch.object(owner, name, telling(owner, name)))
    return exits


def build(streams: NotedStreams) -> tuple[nn.Module, Callable[[], None]]:
    """A model of equal units, and a backward that notes when COMPUTE computes them."""
    mesh = null_mesh(2)
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(UNITS)))
    for number, block in enumerate(model):
        fsdp2.fully_shard(block, mesh=mesh)
        block.weight.register_post_accumulate_grad_hook(
            lambda _, number=number: streams.ran(COMPUTE, "backward", number)
        )
    fsdp2.fully_shard(model, mesh=mesh)

    def backward() -> None:
        x = torch.ones(2, DIM, requires_grad=True)  # the first unit's end is seen, too
        model(x).sum().backward()

    return model, backward


def in_time(step: float) -> Replay:
    """A steady iteration, whose copies take 1 and whose backward takes 3 per unit."""
    durations = {"out": 1.0, "back": 1.0, "backward": 3.0, "step": step}
    with null_world(2), noted() as (streams, kernels):
        model, backward = build(streams)
        options: dict[str, Any] = {"lr": 0.1, "offload": True}
        optimizer = fsdp2.optim.FlatOptimizer(model, torch.optim.SGD, **options)
        sections = [each for each in optimizer._sections if isinstance(each, HostSection)]
        assert len(sections) == UNITS
        for steady in (False, True):
            streams.notes.clear()
            with told(kernels, {section: i for i, section in enumerate(sections)}):
                backward()
                optimizer.step()
                optimizer.zero_grad()
            assert steady or streams.notes
        return replay(streams.notes, lambda operation: Cost(durations[operation.name]))


def spans_of(found: Replay, name: str) -> dict[int, list[Span]]:
    spans: dict[int, list[Span]] = {}
    for span in found.spans:
        if span.operation.name == name:
            spans.setdefault(int(span.operation.unit), []).append(span)
    return spans


def overlap(a: Span, b: Span) -> float:
    return max(0.0, min(a.end, b.end) - max(a.start, b.start))


def test_a_unit_leaves_while_one_is_stepped_and_one_goes_back() -> None:
    found = in_time(step=2.0)
    out, step, back = (spans_of(found, name) for name in ("out", "step", "back"))
    lanes = {span.operation.name: span.operation.lane for span in found.spans}
    assert lanes == {"backward": COMPUTE, "out": OUT, "step": HOST, "back": BACK}
    for unit in range(1, UNITS - 1):  # the last unit is the first to be stepped
        (stepped,) = step[unit]
        assert sum(overlap(span, stepped) for span in out[unit - 1]) == 2.0  # all of it
        assert overlap(back[unit + 1][0], stepped) == 1.0
    # Behind backward nothing but the first copies, all steps, and the last copy shows.
    assert found.end == 3.0 * UNITS + 2.0 + 2.0 * UNITS + 1.0


def test_backward_goes_on_while_a_unit_is_stepped() -> None:
    """The step of a unit ends only when the next one's gradients have been delivered."""
    with null_world(2), noted() as (streams, _):
        model, backward = build(streams)
        delivered = {number: threading.Event() for number in range(UNITS)}
        for number, block in enumerate(model):
            block.weight.register_post_accumulate_grad_hook(
                lambda _, number=number: delivered[number].set()
            )
        options: dict[str, Any] = {"lr": 0.1, "offload": True, "step_in_backward": True}
        optimizer = fsdp2.optim.FlatOptimizer(model, torch.optim.SGD, **options)
        sections = [each for each in optimizer._sections if isinstance(each, HostSection)]
        original, came, threads = HostSection.step, [], set()

        def step(section: HostSection, *args: Any) -> None:
            number = sections.index(section)
            came.append(number == 0 or delivered[number - 1].wait(60))
            threads.add(threading.get_ident())
            original(section, *args)

        with mock.patch.object(HostSection, "step", step):
            backward()
            assert came == [True] * UNITS
            optimizer.step()
        assert len(came) == UNITS
        assert threads.isdisjoint({threading.get_ident()})
        assert len(threads) == 1
