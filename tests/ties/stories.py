"""Stories of a model that end alike whether it is sharded or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fsdp2
from fsdp2.core.modules.registry import records_below
from tests.common import models, parity

IDS = torch.arange(6).view(2, 3)

Shard = Callable[..., None]
"""Makes a unit of each module, or of each list of modules, with arguments of `fully_shard`; or
nothing."""

Story = Callable[[Any, Shard], Any]
"""What happens to a model until its last backward; returns what both must tell alike."""


def shard(*modules: Any, **arguments: Any) -> None:
    for module in modules:
        fsdp2.fully_shard(module, **{"mesh": parity.world_mesh(), **arguments})


def not_at_all(*_: Any, **__: Any) -> None: ...


def reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, fsdp2.FSDPModule):
            module.reshard()


def names(model: nn.Module) -> list[list[str]]:
    """All names of each parameter."""
    found: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), []).append(name)
    return list(found.values())


def managed(model: nn.Module) -> int:
    """How many parameters have a shard."""
    return sum(len(g.params) for r in records_below(model) for g in r.unit.own_groups)


def as_without_sharding(make: Callable[[], Any], story: Story) -> Any:
    """Both models end with the same names, gradients and parameters. Returns the sharded one."""
    plain, model = models.seeded(make), models.seeded(make)
    expected, told = story(plain, not_at_all), story(model, shard)
    parity.assert_close(told, expected, parity.FP32, "told")
    reshard(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert names(model) == names(plain)
    parity.assert_close(parity.full_grads(model), parity.full_grads(plain), parity.FP32)
    parity.assert_close(parity.full_params(model), parity.full_params(plain), parity.FP32)
    return model


def train(
    model: Any, *batches: Tensor, optimizer: torch.optim.Optimizer | None = None
) -> list[Tensor]:
    """A step for each batch, the gradients of the last one left; returns the outputs."""
    optimizer = optimizer or parity.adamw(model.parameters())
    outputs = []
    for batch in batches:
        model.zero_grad()
        output = model(batch)
        output.square().mean().backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs
