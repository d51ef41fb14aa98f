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

from tests.common.combinations import each_once
from tests.common.models import (
    DIM,
    Fork,
    Forked,
    Halves,
    halves,
    seeded,
)
from tests.common.parity import (
    OURS,
    assert_equal,
    check_training,
    full_grads,
    my_part,
    regression_batches,
    same_as_torch,
    shard,
)
from tests.common.running import (
    STEPS,
    TORCHS_TAKES_DATACLASSES,
    mlp,
    mlp_batches,
    one_batch,
)
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks


@ranks(2)
@each_once(mode=["tuple", "dict", "dataclass"], used=["both", "left", "right"])
def test_outputs_in_containers_some_of_them_unused(mode: str, used: str) -> None:
    build = partial(seeded, partial(Forked, mode, used))
    batches = regression_batches(DIM, 2, steps=2)
    torch_too = mode != "dataclass" or TORCHS_TAKES_DATACLASSES
    steps = check_training(build, batches, torch_too=torch_too, reshard_after_forward=True)
    unused = {"both": "none", "left": "right", "right": "left"}[used]
    for name, grad in steps[0].grads.items():
        assert (grad is None) == (f".{unused}." in name), name


@ranks(2)
@pytest.mark.parametrize("mode", ["tuple", "dict", "dataclass"])
def test_root_returns_a_container(mode: str) -> None:
    """The hook that starts backward hangs on whichever tensors are inside."""

    def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        left, right = halves(model(part[0]))
        return (left - part[1]).square().mean() + right.mean()

    batches = regression_batches(DIM, DIM, steps=STEPS)
    build = partial(seeded, partial(Fork, mode))
    torch_too = mode != "dataclass" or TORCHS_TAKES_DATACLASSES
    check_training(build, batches, loss=loss, torch_too=torch_too, reshard_after_forward=True)


class _Carrier(nn.Module):
    """Takes and returns its tensors inside a dataclass, with more than tensors beside them."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, halves: Halves, *, options: dict[str, Any]) -> Halves:
        left = torch.tanh(self.linear(halves.left)) * options["factor"]
        return Halves(left, {"right": halves.rest["right"] + left, "nothing": None})


class _Carriers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.carriers = nn.ModuleList(_Carrier() for _ in range(3))
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        carried = Halves(self.first(x), {"right": x, "nothing": None})
        options = {"factor": torch.full((1,), 0.5), "name": "half"}
        for carrier in self.carriers:
            carried = carrier(carried, options=options)
        assert carried.rest["right"] is not None
        return self.head(carried.left + carried.rest["right"])


@ranks(2)
def test_units_that_pass_dataclasses_to_each_other() -> None:
    check_training(
        partial(seeded, _Carriers),
        mlp_batches(),
        torch_too=TORCHS_TAKES_DATACLASSES,
        reshard_after_forward=True,
    )


@ranks(2)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_gradient_of_the_input(requires_grad: bool) -> None:
    def run(api: Any) -> Any:
        model = shard(api, mlp(), reshard_after_forward=True)
        x = my_part(one_batch())[0].requires_grad_(requires_grad)
        model(x).square().sum().backward()
        return [x.grad, full_grads(model)]

    ours = same_as_torch(run)
    plain = mlp()
    x = my_part(one_batch())[0].requires_grad_(requires_grad)
    plain(x).square().sum().backward()
    assert_equal(ours[0], x.grad, "unsharded")
    assert (ours[0] is not None) == requires_grad


class _SavesViews(nn.Module):
    """Autograd saves views of its parameters, which must be valid again in backward."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * DIM, DIM) / 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.weight.view(2, DIM, DIM).unbind(0)
        return torch.tanh(x @ left.t()) * (x @ right) + x * self.weight[0].detach()


@ranks(2, extended=(4,))
def test_views_of_parameters_saved_for_backward() -> None:
    def build() -> nn.Module:
        return nn.Sequential(_SavesViews(), _SavesViews(), nn.Linear(DIM, 4))

    check_training(partial(seeded, build), mlp_batches(), reshard_after_forward=True)


@ranks(2)
def test_user_hooks_around_ours() -> None:
    """A user's pre-hook sees whole parameters whenever it was registered; a post-hook registered
    after sharding sees shards."""
    model = mlp()
    seen = []
    model.layers[0].register_forward_pre_hook(lambda m, _: seen.append(type(m.weight.data)))
    shard(OURS, model)
    model.layers[0].register_forward_pre_hook(lambda m, _: seen.append(type(m.weight.data)))
    model.layers[0].register_forward_hook(lambda m, *_: seen.append(type(m.weight.data)))
    model(torch.randn(2, DIM))
    assert seen == [Tensor, Tensor, DTensor]
