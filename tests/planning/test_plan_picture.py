"""A plan's timeline says of a step what the plan itself says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fsdp2.planning import hardware
from fsdp2.planning.planner import Plan, plan
from fsdp2.tracing import COLLECTIVES, summary

pytestmark = pytest.mark.alone

DIM, LAYERS = 256, 3


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)


def some(count: int = 1) -> Tensor:
    return torch.zeros(count, DIM)


def planned(device: str, mesh: int | tuple[int, int] = 8) -> Plan:
    backend = "gloo" if device == "cpu" else "nccl"
    machine = replace(hardware.load("h100"), device=device, backend=backend)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    return plan(model, some, units={Layer}, mesh=mesh, hardware=machine, batch=4)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_exposed_communication_is_the_plans(device: str) -> None:
    """On the CPU the host runs collectives, and compute stands still for each."""
    made = planned(device)
    found = summary(made.timeline())
    assert found.exposed == pytest.approx(made.time.exposed * 1e6, rel=1e-3)
    assert sum(row.exposed for row in found.units) == pytest.approx(found.exposed)
    assert found.exposed > 0
    assert made.units == found.units


def test_collectives_have_lanes_of_their_own_on_the_cpu() -> None:
    """As in a timeline of a real step on the CPU."""
    timeline = planned("cpu").timeline()
    compute = timeline.on("compute")
    assert not {s.operation for s in compute} & set(COLLECTIVES)
    assert [s.unit for s in timeline.on("all-gather")] == [*"012", *"210"]
    order = [s.name for s in compute if s.operation in ("forward", "backward") and s.unit]
    assert order == [*(f"forward {n}" for n in "012"), *(f"backward {n}" for n in "210")]


def test_groups_are_named_as_those_of_real_steps() -> None:
    """Ranks of a replicate group do not follow each other."""
    slices = planned("cuda", mesh=(2, 4)).timeline().slices
    named = {s.operation: s.group for s in slices if s.group}
    assert named["all-gather"] == named["reduce-scatter"] == "ranks 0-3"
    assert named["all-reduce"] == "ranks 0, 4"
