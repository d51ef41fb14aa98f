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
