"""Forwards in any number, without gradients, by other methods; what units take and return.

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
from tests.common.backends import packs
from tests.common.combinations import each_once
from tests.common.workers import ranks


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_unit_called_several_times_in_a_forward(reshard_after_forward: bool | None) -> None:
    build = partial(models.seeded, models.Repeated)
    batches = parity.regression_batches(models.DIM, 2, steps=running.STEPS)
    parity.check_training(build, batches, reshard_after_forward=reshard_after_forward)


@packs
@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_two_forwards_before_one_backward(reshard_after_forward: bool | None) -> None:
    """Each group is reduced once, when both contributions are there."""

    def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
        x, y = part
        return (model(x) * model(x.flip(1)) - y).square().mean()

    arguments = {"reshard_after_forward": reshard_after_forward}
    parity.check_training(running.mlp, running.mlp_batches(), loss=loss, **arguments)
    model = parity.shard(parity.OURS, running.mlp(), **arguments)
    value = loss(model, parity.my_part(running.one_batch()))
    with parity.CountCollectives() as backward:
        value.backward()
    assert backward.reduce_scatters == len(running.fsdp_modules(model)) == 4


@ranks(2)
def test_backward_twice_through_one_forward() -> None:
    def run(api: Any) -> Any:
        model = parity.shard(api, running.mlp(), reshard_after_forward=True)
        loss = parity.regression_loss(model, parity.my_part(running.one_batch()))
        loss.backward(retain_graph=True)
        loss.backward()
        return parity.full_grads(model)

    ours = parity.same_as_torch(run)
    once = running.unsharded_grads(
        running.mlp(),
        lambda m, rank: parity.regression_loss(
            m, parity.my_part(running.one_batch(), rank)
        ).backward(),
    )
    doubled = {name: None if grad is None else 2 * grad for name, grad in once.items()}
    parity.assert_close(ours, doubled, parity.FP32, "unsharded")


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_inference_mode_then_training(reshard_after_forward: bool | None) -> None:
    """The very first gather happens in inference mode, and no inference tensor may survive it.

    The unsharded model is the judge: it trains after an evaluation like that.
    """
    model = parity.shard(parity.OURS, running.mlp(), reshard_after_forward=reshard_after_forward)
    optimizer = parity.adamw(
        model.parameters()
    )  # before an evaluation can leave whole parameters behind
    plain = running.mlp()
    for x, _ in running.mlp_batches()[:2]:
        with torch.inference_mode():
            parity.assert_close(model(x).clone(), plain(x), parity.FP32, "evaluation")
    steps = parity.train_sharded(
        model, lambda _: optimizer, parity.regression_loss, running.mlp_batches()
    )
    unsharded = parity.train_unsharded(
        plain, parity.adamw, parity.regression_loss, running.mlp_batches()
    )
    parity.assert_close(steps, unsharded, parity.FP32, "training")
    with torch.inference_mode():
        parity.assert_close(model(x).clone(), plain(x), parity.FP32, "evaluation after training")


class _Coder(nn.Module):
    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, models.DIM)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Tanh of a linear map."""
        return torch.tanh(self.linear(x)) * scale

    def decode(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.linear(x)}

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("call encode and decode")


class _CodersModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coders = nn.ModuleList(_Coder() for _ in range(2))
        self.head = nn.Linear(models.DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        for coder in self.coders:
            x = coder.decode(coder.encode(x, scale=0.5))["out"]
        return self.head(x)


@ranks(2)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_register_fsdp_forward_method(mixed: bool) -> None:
    def run(api: Any) -> Any:
        model = parity.shard(
            api, models.seeded(_CodersModel), mixed=mixed, reshard_after_forward=True
        )
        for coder in model.coders:
            api.register_fsdp_forward_method(coder, "encode")
            api.register_fsdp_forward_method(coder, "decode")
        assert model.coders[0].encode.__doc__ == "Tanh of a linear map."
        steps = parity.train_sharded(
            model, parity.adamw, parity.regression_loss, running.mlp_batches()
        )
        assert all(running.is_sharded(coder.linear) for coder in model.coders)
        return steps

    ours = parity.same_as_torch(run)
    plain = models.seeded(_CodersModel)
    batches = running.mlp_batches()
    steps = parity.train_unsharded(
        plain, parity.adamw, parity.regression_loss, batches, slices=True, mixed=mixed
    )
    parity.assert_equal(ours, steps, "unsharded")


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
