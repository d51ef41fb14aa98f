"""Functions of fsdp2 inside compiled functions: they break the graph, and compute as outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fsdp2
import fsdp2.optim
from tests.common import compiling, gradients, models, parity
from tests.common.workers import ranks


def _gathered(model: Any) -> Callable[[], object]:
    def total() -> Tensor:
        with fsdp2.gathered(model):
            return torch.stack([param.sum() for param in model.parameters()]).sum()

    return total


def _swapped(model: Any) -> Callable[[], object]:
    ema = fsdp2.optim.EMA(model, 0.5)
    inputs = gradients.part(0)[0]

    def evaluate() -> Tensor:
        with torch.no_grad(), ema.swapped():
            found: Tensor = model(inputs)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)
        ema.update()
        return found * 3

    return evaluate


def _scaled(model: Any) -> Callable[[], object]:
    def scale() -> Tensor:
        norm = fsdp2.optim.get_total_norm([param.grad for param in model.parameters()])
        fsdp2.optim.clip_grads_with_norm_(model.parameters(), 0.1, norm * 2)
        return norm * 3

    return scale


TOOLS: dict[str, Callable[[Any], Callable[[], object]]] = {
    "clip_grad_norm_": lambda m: lambda: fsdp2.clip_grad_norm_(m.parameters(), 0.1) + 1,
    "get_total_norm": _scaled,
    "torch's": lambda m: lambda: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "torch's, by value": lambda m: lambda: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3),
    "EMA": lambda m: fsdp2.optim.EMA(m, 0.9).update,
    "EMA.swapped": _swapped,
    "gathered": _gathered,
    "Muon": lambda m: fsdp2.optim.Muon(m, lr=0.01).step,
    "FlatOptimizer": lambda m: fsdp2.optim.FlatOptimizer(m, torch.optim.AdamW, lr=0.01).step,
}


def _run(tool: str, compiles: bool) -> list[Any]:
    torch._dynamo.reset()
    model = models.seeded(models.MLP)
    for unit in models.units(model):
        fsdp2.fully_shard(unit, mesh=parity.world_mesh())
    fsdp2.fully_shard(model, mesh=parity.world_mesh())
    function = TOOLS[tool](model)
    if compiles:
        function = torch.compile(function, backend="aot_eager")
    found: list[Any] = []
    for step in range(3):
        parity.regression_loss(model, gradients.part(step)).backward()
        value = function()
        found.append(value.detach() if isinstance(value, Tensor) else None)
        found += [parity.full_grads(model), parity.full_params(model)]
    return found


@ranks(2, timeout=300)
def test_results_are_those_outside_of_graphs() -> None:
    with compiling.fresh_dynamo():
        for tool in TOOLS:
            eager, compiled = _run(tool, False), _run(tool, True)
            for ours, expected in zip(compiled, eager, strict=True):
                if isinstance(expected, dict):
                    parity.assert_equal(ours, expected, tool)
                elif expected is not None:
                    assert torch.equal(parity.full(ours), parity.full(expected)), tool
