"""What a plain step costs the host, counted: nobody pays for what other steps can do.

Functions of fsdp2 that are called; those of torch differ from version to version.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.core.modules import optimizers
from fsdp2.testing import counting
from fsdp2.testing.null_group import null_mesh, null_world

pytestmark = pytest.mark.alone

DIM = 8


@pytest.fixture(autouse=True)
def _nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests of this process have saved in the background listens to steps for good."""
    monkeypatch.setattr(optimizers.steps, "functions", [])


def called(run: Callable[[], object]) -> dict[str, int]:
    """Functions of fsdp2 that ``run`` calls, by module and name; comprehensions are none."""
    own = {name: n for name, n in counting.called(run)[0].items() if name.startswith("fsdp2.")}
    return {name.removeprefix("fsdp2."): n for name, n in own.items() if "<" not in name}


def steady(units: int, make: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    """A model with gradients, and its optimizer, which has stepped."""
    mesh = null_mesh(2)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(units)))
    for module in (*model, model):
        fsdp2.fully_shard(module, mesh=mesh)
    optimizer = make(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, DIM)).sum().backward()
        optimizer.step()
    return model, optimizer


def flat(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, lr=1e-3, fused=True, **options)


def torchs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@pytest.mark.parametrize("units", [2, 5])
@pytest.mark.parametrize("offload", [False, True])
def test_a_step_of_the_flat_optimizer(units: int, offload: bool) -> None:
    """Of it, and of the optimizer inside, torch's hooks are two each; the rest is per unit.

    Shards in CPU memory are stepped where they are, whether they are said to be offloaded or not.
    """
    with null_world(2):
        _, optimizer = steady(units, partial(flat, offload=offload))
        assert called(optimizer.step) == {
            "core.modules.optimizers.before": 2,
            "core.modules.optimizers.after": 2,
            "optim.flat.step": 1,
            "optim.in_backward.step_sections": 1,
            "optim.in_backward.prepare": 1,
            "optim.runs.set_gradients": 1,
            "optim.runs.set_gradient": units,
            "optim.runs.side_by_side": units,
            "optim.runs.step": 1,
            "optim.runs.options_of": 2,
            "optim.runs.drop_gradient": units,
            "optim.runs.written": 1,
            "optim.in_backward.hand_back": 1,
        }
        assert called(optimizer.zero_grad) == {}


@pytest.mark.parametrize("units", [2, 5])
def test_a_step_of_torchs_optimizer(units: int) -> None:
    """Nothing but the hooks that count steps."""
    with null_world(2):
        _, optimizer = steady(units, torchs)
        step = {"core.modules.optimizers.before": 1, "core.modules.optimizers.after": 1}
        assert called(optimizer.step) == step
        assert called(optimizer.zero_grad) == {}


def test_clipping_asks_no_parameter_whether_its_gradient_is_elsewhere() -> None:
    """Unless an optimizer of this process takes gradients in backward."""
    asks = {"optim.in_backward.refuse_stepped"}
    with null_world(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp2.optim.in_backward.InBackward, "count", 0)  # of tests before this one
        model, _ = steady(3, flat)
        found = called(lambda: fsdp2.clip_grad_norm_(model.parameters(), 1.0))
        assert asks.isdisjoint(found)
        optimizer = fsdp2.optim.FlatOptimizer(
            model, torch.optim.SGD, lr=1e-3, step_in_backward=True
        )
        del optimizer
        found = called(lambda: fsdp2.clip_grad_norm_(model.parameters(), 1.0))
        assert asks <= found.keys()
