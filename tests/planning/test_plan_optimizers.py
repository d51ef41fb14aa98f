"""What a plan says of the memory of `fsdp2.optim.Muon`, beside a step on two ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.core.layout.mesh import local_of
from fsdp2.planning.memory import Ledger
from fsdp2.tracing.record.notes import Operation
from tests.common import workers
from tests.common.models import seeded
from tests.planning.planned_memory import peak_of

pytestmark = pytest.mark.ranks

DIM = 96


class Block(nn.Module):
    """Two matrices of one size, so that two owners have one each, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(3)))


NAMES = [name for name, _ in build().named_parameters()]


def muon(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return fsdp2.optim.Muon(zip(NAMES, params, strict=True))


def planned() -> tuple[int, int]:
    """Bytes of states, and the most that the optimizer's step allocates beside what is there."""
    made = fsdp2.plan(
        build, lambda: torch.zeros(4, DIM), units={Block}, mesh=2, hardware="h100", optimizer=muon
    )
    recording = made.rehearsal.recording
    ledger = Ledger(recording, 1)
    start = most = 0
    for note in recording.notes:
        ledger.take(note)
        if isinstance(note, Operation) and note.phase == "optimizer":
            start = start or ledger.live
        most = max(most, ledger.live - start) if start else 0
    return made.memory.before.categories["optimizer"], most


def seen() -> tuple[int, int]:
    """The same of a step."""
    model: Any = seeded(build)
    for block in model:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    optimizer = muon(model.parameters())
    for _ in range(2):
        model(torch.ones(4, DIM)).sum().backward()
        with torch.profiler.profile(profile_memory=True) as profiler:
            optimizer.step()
    most = peak_of(profiler)
    values = (value for kept in optimizer.state.values() for value in kept.values())
    return sum(local_of(value).nbytes for value in values if isinstance(value, Tensor)), most


def test_states_of_muon_are_as_planned() -> None:
    """Step counts of the vectors are in CPU memory. What is whole in a step is not planned."""
    states, most = planned()
    for seen_states, seen_most in workers.run_on_ranks(2, seen):
        assert seen_states == states + 4 * len(NAMES[::3])
        assert seen_most > most
