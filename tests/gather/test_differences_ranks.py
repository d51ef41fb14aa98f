"""Differences among real ranks: equal bits, near to exact training, in every setting."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.core.gather.coded import ReferenceRows
from tests.common import parity
from tests.common.workers import ranks
from tests.gather import test_wire_format as formats

DIFFERENCES = ("int8 differences", "int4 differences")
STEPS = 6


def train(
    model: nn.Module, steps: int = STEPS, micro: int = 1, sync: bool = True, first: int = 0
) -> tuple[list[float], torch.optim.Optimizer]:
    optimizer = parity.ShardwiseAdamW(model.parameters(), lr=1e-3)
    return continued(model, optimizer, range(first, first + steps), micro, sync), optimizer


def continued(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    micro: int = 1,
    sync: bool = True,
) -> list[float]:
    losses = []
    for step in steps:
        for number in range(micro):
            model.set_requires_gradient_sync(sync or number == micro - 1)
            loss = formats.loss_of(model, formats.batch(step * micro + number))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_equal_on_ranks(model: nn.Sequential) -> None:
    for name, value in formats.gathered_weights(model).items():
        first, *others = formats.everyones(value.float())
        assert all(torch.equal(first, other) for other in others), name


def near(model: nn.Sequential, gather: str) -> None:
    """Gathered weights are off by less than a format's part of a few steps' change."""
    exact = [param.full_tensor() for param in model.parameters()]
    for value in formats.gathered_weights(model).values():
        same = [param for param in exact if param.shape == value.shape]
        wrong = min((param.to(value.dtype) - value).abs().max() for param in same)
        rounding = 2**-9 if value.dtype is not torch.float32 else 1e-6
        assert wrong <= 4e-3 * (1 / 254 if "8" in gather else 1 / 13) + rounding


SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, **formats.SETTINGS}


@ranks(2, extended=(3, 4))
@pytest.mark.parametrize("gather", DIFFERENCES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_training_is_beside_exact_training(gather: str, setting: str) -> None:
    arguments = SETTINGS[setting]
    model = formats.sharded(gather, None, **arguments)
    exact = formats.sharded(None, None, **arguments)
    found, expected = train(model)[0], train(exact)[0]
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0)
    assert_equal_on_ranks(model)
    near(model, gather)


@ranks(4)
@pytest.mark.parametrize("gather", DIFFERENCES)
def test_replicas_have_equal_references(gather: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = formats.sharded(gather, "int8", mesh=mesh)
    train(model)
    assert_equal_on_ranks(model)
    near(model, gather)


class Averages:
    """Averages of weights, swapped in for an evaluation."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.values = [param.detach().clone() for param in self.params]

    def update(self) -> None:
        torch._foreach_lerp_(
            [v.to_local() for v in self.values], [p.detach().to_local() for p in self.params], 0.1
        )

    def swap(self) -> None:
        """By a route that no version counter shows."""
        for param, value in zip(self.params, self.values, strict=True):
            rows, other = param.data.to_local(), value.to_local()
            kept = rows.clone()
            rows.copy_(other)
            other.copy_(kept)


def whole_loss(model: nn.Module) -> float:
    """Of the weights that the shards hold."""
    plain = formats.build()
    for mine, param in zip(plain.parameters(), model.parameters(), strict=True):
        mine.data.copy_(param.full_tensor())
    return formats.loss_of(plain, formats.batch(9)).item()


@ranks(2)
@pytest.mark.parametrize("gather", DIFFERENCES)
def test_averages_are_swapped_in_for_evaluations(gather: str) -> None:
    model = formats.sharded(gather, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    averages = Averages(model)
    for step in range(4):
        continued(model, optimizer, range(step, step + 1))
        averages.update()
        averages.swap()
        expected = whole_loss(model)
        with torch.no_grad():
            found = [formats.loss_of(model, formats.batch(9)).item() for _ in range(5)]
        assert found[-1] == pytest.approx(expected, rel=1e-4)
        averages.swap()
        expected = whole_loss(model)
        loss = formats.loss_of(model, formats.batch(9))  # with weights, not averages
        coarse = 2e-3 if "int8" in gather else 0.05  # one message of all that was swapped
        assert loss.item() == pytest.approx(expected, rel=coarse)
        loss.backward()
    assert_equal_on_ranks(model)


STEPPED = {
    "operators": lambda param: param.sub_(0.05 * param.grad),
    "data": lambda param: param.data.sub_(0.05 * param.grad),
    "local tensors": lambda param: param.to_local().detach().sub_(0.05 * param.grad.to_local()),
}


@ranks(2)
@pytest.mark.parametrize("route", STEPPED)
@pytest.mark.parametrize("drops", ["model", "none", "before backward"])
def test_steps_by_hand(route: str, drops: str) -> None:
    model, exact = formats.sharded("int8 differences", None), formats.sharded(None, None)
    losses: list[list[float]] = []
    for each in (model, exact):
        seen = []
        for step in range(5):
            loss = formats.loss_of(each, formats.batch(step))
            if drops == "before backward":
                each.zero_grad()
            loss.backward()
            with torch.no_grad():
                for param in each.parameters():
                    STEPPED[route](param)
            if drops == "model":
                each.zero_grad()
            elif drops == "none":
                for param in each.parameters():
                    param.grad = None
            seen.append(loss.item())
        losses.append(seen)
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)


@ranks(2)
def test_parameters_that_are_made_late_and_frozen_or_tied() -> None:
    losses = []
    for format in ("int4 differences", None):
        with torch.device("meta"):
            model = formats.build()
        model[1].up.weight = model[0].up.weight
        model[0].down.weight.requires_grad_(False)
        for block in model[:2]:
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(model)
        formats.coded(model, format, None)
        model.to_empty(device="cpu")
        torch.manual_seed(dist.get_rank())
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(0, 0.1)
        losses.append(train(model)[0])
        assert_equal_on_ranks(model)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@ranks(2)
def test_a_checkpoint_of_weights_is_loaded() -> None:
    """Exactly, whatever was gathered before."""
    model = formats.sharded("int4 differences", None)
    saved = copy.deepcopy(model.state_dict())
    train(model)
    model.load_state_dict(saved)
    exact = formats.build()
    found = formats.loss_of(model, formats.batch()).item()
    assert found == formats.loss_of(exact, formats.batch()).item()


@ranks(2, extended=(3,))
@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("setting", ["plain", "mixed"])
def test_references_are_restored(weights_first: bool, setting: str) -> None:
    """To the bit what goes on without an interruption."""
    arguments = SETTINGS[setting]
    model = formats.sharded("int4 differences", None, **arguments)
    _, optimizer = train(model, 3)
    weights = copy.deepcopy(model.state_dict())
    moments = copy.deepcopy(optimizer.state_dict())
    rows = [[(slot, r.clone()) for slot, r in each.own_rows()] for each in references(model)]
    expected = continued(model, optimizer, range(3, 6))

    other = formats.sharded("int4 differences", None, **arguments)
    _, again = train(other, 1, first=50)
    if weights_first:
        other.load_state_dict(weights)
        for record in other._records(True):
            for group in record.unit.own_groups:
                group.bind()
    for each, saved in zip(references(other), rows, strict=True):
        each.restore(saved)
    if not weights_first:
        other.load_state_dict(weights)
    again.load_state_dict(moments)
    assert continued(other, again, range(3, 6)) == expected
    for mine, its in zip(
        formats.gathered_weights(model).values(),
        formats.gathered_weights(other).values(),
        strict=True,
    ):
        assert torch.equal(mine, its)


def references(model: nn.Module) -> list[ReferenceRows]:
    groups = [group for record in model._records(True) for group in record.unit.own_groups]
    found = [part.kept for group in groups for part in group.bound.parts]
    return [kept for kept in found if isinstance(kept, ReferenceRows)]


@ranks(2)
def test_ranks_are_checked() -> None:
    with fsdp2.debug(check_ranks=True, check_writes=True):
        train(formats.sharded("int4 differences", None), micro=2)
    with fsdp2.debug(check_ranks=True):
        model = formats.sharded(None, None)
        differences = dist.get_rank() == 1
        model.set_wire_format(gather="int8", differences=differences, exact_below=100)
        with pytest.raises(fsdp2.errors.RankMismatchError, match="differences"):
            formats.loss_of(model, formats.batch())


@ranks(2)
def test_all_gather_what_one_rank_has_freed() -> None:
    for checked in (False, True):
        with fsdp2.debug(check_ranks=checked):
            model = formats.sharded("int8 differences", None)
            formats.loss_of(model, formats.batch()).backward()
            if dist.get_rank() == 1:
                model[0].reshard()
            formats.loss_of(model, formats.batch()).backward()
            assert_equal_on_ranks(model)
