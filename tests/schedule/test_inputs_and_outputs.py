"""What units take and return: containers, views, inputs with gradients, users' hooks.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.common import models, parity, running
from tests.common.combinations import each_once
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks


@ranks(2)
@each_once(mode=["tuple", "dict", "dataclass"], used=["both", "left", "right"])
def test_outputs_in_containers_some_of_them_unused(mode: str, used: str) -> None:
    build = partial(models.seeded, partial(models.Forked, mode, used))
    batches = parity.regression_batches(models.DIM, 2, steps=2)
    torch_too = mode != "dataclass" or running.TORCHS_TAKES_DATACLASSES
    steps = parity.check_training(build, batches, torch_too=torch_too, reshard_after_forward=True)
    unused = {"both": "none", "left": "right", "right": "left"}[used]
    for name, grad in steps[0].grads.items():
        assert (grad is None) == (f".{unused}." in name), name


@ranks(2)
@pytest.mark.parametrize("mode", ["tuple", "dict", "dataclass"])
def test_root_returns_a_container(mode: str) -> None:
    """The hook that starts backward hangs on whichever tensors are inside."""

    def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        left, right = models.halves(model(part[0]))
        return (left - part[1]).square().mean() + right.mean()

    batches = parity.regression_batches(models.DIM, models.DIM, steps=running.STEPS)
    build = partial(models.seeded, partial(models.Fork, mode))
    torch_too = mode != "dataclass" or running.TORCHS_TAKES_DATACLASSES
    parity.check_training(
        build, batches, loss=loss, torch_too=torch_too, reshard_after_forward=True
    )


class _Carrier(nn.Module):
    """Takes and returns its tensors inside a dataclass, with more than tensors beside them."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, models.DIM)

    def forward(self, halves: models.Halves, *, options: dict[str, Any]) -> models.Halves:
        left = torch.tanh(self.linear(halves.left)) * options["factor"]
        return models.Halves(left, {"right": halves.rest["right"] + left, "nothing": None})


class _Carriers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.DIM, models.DIM)
        self.carriers = nn.ModuleList(_Carrier() for _ in range(3))
        self.head = nn.Linear(models.DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        carried = models.Halves(self.first(x), {"right": x, "nothing": None})
        options = {"factor": torch.full((1,), 0.5), "name": "half"}
        for carrier in self.carriers:
            carried = carrier(carried, options=options)
        assert carried.rest["right"] is not None
        return self.head(carried.left + carried.rest["right"])


@ranks(2)
def test_units_that_pass_dataclasses_to_each_other() -> None:
    parity.check_training(
        partial(models.seeded, _Carriers),
        running.mlp_batches(),
        torch_too=running.TORCHS_TAKES_DATACLASSES,
        reshard_after_forward=True,
    )


@ranks(2)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_gradient_of_the_input(requires_grad: bool) -> None:
    def run(api: Any) -> Any:
        model = parity.shard(api, running.mlp(), reshard_after_forward=True)
        x = parity.my_part(running.one_batch())[0].requires_grad_(requires_grad)
        model(x).square().sum().backward()
        return [x.grad, parity.full_grads(model)]

    ours = parity.same_as_torch(run)
    plain = running.mlp()
    x = parity.my_part(running.one_batch())[0].requires_grad_(requires_grad)
    plain(x).square().sum().backward()
    parity.assert_equal(ours[0], x.grad, "unsharded")
    assert (ours[0] is not None) == requires_grad


class _SavesViews(nn.Module):
    """Autograd saves views of its parameters, which must be valid again in backward."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * models.DIM, models.DIM) / 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.weight.view(2, models.DIM, models.DIM).unbind(0)
        return torch.tanh(x @ left.t()) * (x @ right) + x * self.weight[0].detach()


@ranks(2, extended=(4,))
def test_views_of_parameters_saved_for_backward() -> None:
    def build() -> nn.Module:
        return nn.Sequential(_SavesViews(), _SavesViews(), nn.Linear(models.DIM, 4))

    parity.check_training(
        partial(models.seeded, build), running.mlp_batches(), reshard_after_forward=True
    )


@ranks(2)
def test_user_hooks_around_ours() -> None:
    """A user's pre-hook sees whole parameters whenever it was registered; a post-hook registered
    after sharding sees shards."""
    model = running.mlp()
    seen = []
    model.layers[0].register_forward_pre_hook(lambda m, _: seen.append(type(m.weight.data)))
    parity.shard(parity.OURS, model)
    model.layers[0].register_forward_pre_hook(lambda m, _: seen.append(type(m.weight.data)))
    model.layers[0].register_forward_hook(lambda m, *_: seen.append(type(m.weight.data)))
    model(torch.randn(2, models.DIM))
    assert seen == [Tensor, Tensor, DTensor]
