"""Offloaded shards and gradients, forced on the CPU, where every copy is there to be seen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import CPUOffloadPolicy
from fsdp2.core.device import kernels
from fsdp2.core.device.streams import Lane, Streams
from fsdp2.core.schedule.scheduler import offloading
from fsdp2.optim import FlatOptimizer
from fsdp2.testing.null_group import null_world
from tests.common.offloading import forced_offload
from tests.common.parity import world_mesh

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def _forced() -> Iterator[None]:
    with forced_offload():
        yield


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])


def _shard(model: nn.Module) -> nn.Module:
    arguments = {"mesh": world_mesh(), "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for block in model:
        fsdp2.fully_shard(block, **arguments)
    return fsdp2.fully_shard(model, **arguments)


def test_loaded_state_is_what_the_next_forward_computes_with() -> None:
    with null_world(1):
        model = _shard(_model())
        x = torch.randn(2, 8)
        model(x)
        state = copy.copy(model.state_dict())
        for name, value in state.items():
            state[name] = torch.zeros_like(value)
        model.load_state_dict(state)
        assert model(x).eq(0).all()


# ---- when the host waits for copies


class WatchedStreams(Streams):
    """Lanes on one thread whose events are real objects, and how often the host waited for one."""

    asynchronous = True

    def __init__(self) -> None:
        self.synchronized = 0

    def record(self, lane: Lane, label: str, event: Any = None) -> Any:
        return object()

    def synchronize(self, event: Any, label: str) -> None:
        if label == "host after copy-in":
            self.synchronized += 1


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> WatchedStreams:
    watched = WatchedStreams()
    device = torch.device("cpu")
    monkeypatch.setitem(kernels._stages, device, kernels.Stage(watched, kernels.Kernels(device)))
    return watched


UNITS = 3  # the root has no parameters


def _waits(streams: WatchedStreams, action: Callable[[], object]) -> int:
    """How many units' copies the host waited for in ``action``."""
    before = streams.synchronized
    action()
    return streams.synchronized - before


def test_a_training_forward_does_not_hold_up_the_host(streams: WatchedStreams) -> None:
    """Backward waits at its end, a forward without gradients at its own."""
    with null_world(1):
        model = _shard(_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(2, 8)
        losses: list[torch.Tensor] = []
        for _ in range(2):
            assert _waits(streams, lambda: losses.append(model(x).sum())) == 0
            assert _waits(streams, losses[-1].backward) == UNITS
            assert _waits(streams, optimizer.step) == 0
            with torch.no_grad():
                assert _waits(streams, lambda: model(x)) == UNITS


WRITES: dict[str, Callable[[Any], object]] = {
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "flat optimizer": lambda model: FlatOptimizer(model, torch.optim.SGD, lr=0.1).step(),
    "load": lambda model: model.load_state_dict(dict(model.state_dict())),
    "to": lambda model: model.to(torch.float64),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "reshard": lambda model: [unit.reshard() for unit in (*model, model)],
    "reset": lambda model: model.reset_iter_state(),
}


@pytest.mark.parametrize("write", WRITES)
def test_the_host_waits_for_copies_before_it_writes(streams: WatchedStreams, write: str) -> None:
    """After a training forward that has no backward."""
    with null_world(1):
        model = _shard(_model())
        model(torch.randn(2, 8))
        assert _waits(streams, lambda: WRITES[write](model)) == UNITS
        assert _waits(streams, lambda: WRITES["reshard"](model)) == 0
        assert model(torch.randn(2, 8, dtype=next(model.parameters()).dtype)).shape == (2, 8)


def test_an_optimizer_of_others_waits_for_nothing(streams: WatchedStreams) -> None:
    with null_world(1):
        model, other = _shard(_model()), nn.Linear(2, 2)
        model(torch.randn(2, 8))
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        assert _waits(streams, optimizer.step) == 0


def test_schedulers_of_offloaded_models_are_not_kept() -> None:
    with null_world(1):
        model = _shard(_model())
        model(torch.randn(2, 8)).sum().backward()
        known = len(offloading)
        assert known
        del model
        assert len(offloading) < known
