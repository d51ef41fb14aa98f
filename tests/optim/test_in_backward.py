"""`FlatOptimizer(step_in_backward=True)`: the same steps, and gradients of few units at a time."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.optim.flat import FlatOptimizer
from tests.common import models, parity
from tests.common.combinations import each_once
from tests.common.errors import raises
from tests.common.gradients import mlp, mlp_batches
from tests.common.workers import ranks

pytestmark = [pytest.mark.ranks, pytest.mark.feature("Optimizer steps in backward")]

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}
Flat = partial(FlatOptimizer, optimizer_class=torch.optim.AdamW, **OPTIONS)
Early = partial(Flat, step_in_backward=True)
Before = Callable[[nn.Module, torch.optim.Optimizer, int], object]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    before: Before = lambda *_: None,
) -> list[Any]:
    """Parameters and state after each step."""
    out = model.head.out_features if hasattr(model, "head") else 1
    seen = []
    for step, batch in enumerate(parity.regression_batches(models.DIM, out, steps=steps)):
        before(model, optimizer, step)
        parity.regression_loss(model, parity.my_part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([parity.full_params(model), states(optimizer)])
    return seen


def states(optimizer: torch.optim.Optimizer) -> Any:
    """The state dict, DTensors as this rank's rows."""
    found = optimizer.state_dict()
    rows = {
        (index, key): getattr(value, "_local_tensor", value)
        for index, state in found["state"].items()
        for key, value in state.items()
    }
    return [(name, copy.deepcopy(rows[name])) for name in sorted(rows)]


@ranks(2)
@each_once(
    mixed=[False, True],
    model=[models.MLP, models.OddMLP, models.Repeated, models.Nested],
    reshard=[None, False],
)
def test_steps_are_those_of_the_whole(mixed: bool, model: Any, reshard: bool | None) -> None:
    """Units that are called twice, too: the second call's gradients are waited for."""
    runs = []
    for make in (Flat, Early):
        sharded = parity.shard(
            parity.OURS, models.seeded(model), mixed=mixed, reshard_after_forward=reshard
        )
        runs.append(train(sharded, make(sharded)))
    parity.assert_equal(runs[1], runs[0])


class Seen:
    """How many blocks have gradients, after each delivery."""

    def __init__(self, blocks: nn.Sequential) -> None:
        self.most = 0
        self._units = [list(block.parameters()) for block in blocks]
        for params in self._units:
            for param in params:
                param.register_post_accumulate_grad_hook(self._look)

    def _look(self, _: torch.Tensor) -> None:
        held = sum(any(param.grad is not None for param in unit) for unit in self._units)
        self.most = max(self.most, held)


@ranks(2)
def test_gradients_of_few_units_exist_at_a_time() -> None:
    """From the first step on; without it all units have theirs when backward ends."""
    most = {}
    for make in (Flat, Early):
        model = nn.Sequential(*(nn.Linear(models.DIM, models.DIM) for _ in range(6)))
        for block in model:
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(model)
        seen = Seen(model)
        optimizer = make(model)
        for _ in range(2):
            model(torch.randn(2, models.DIM)).sum().backward()
            if make is Early:
                assert all(param.grad is None for param in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        most[make] = seen.most
    assert most == {Flat: 6, Early: 1}


@ranks(2)
def test_units_that_rest_and_parameters_of_no_unit() -> None:
    """Calls that come to nothing, and what fully_shard left alone: `step` sees to them."""
    actives = [("a", "c"), ("a", "b"), ("b", "c"), ("a", "b", "c"), ("a",)]

    def choose(model: nn.Module, _: object, step: int) -> None:
        model.active = actives[step]

    runs = []
    for make in (Flat, Early):
        model = models.seeded(models.Choosy)
        left = next(model.parameters())
        for unit in models.units(model)[:-1]:
            fsdp2.fully_shard(unit, ignored_params={left})
        fsdp2.fully_shard(model, ignored_params={left})
        left.register_hook(lambda grad: parity.over_ranks(grad))
        runs.append(train(model, make(model), len(actives), choose))
    parity.assert_equal(runs[1], runs[0])


@ranks(2)
def test_groups_schedules_and_accumulation() -> None:
    """Micro-batches without a reduction, options that follow a schedule, a group added later."""
    runs = []
    for make in (Flat, Early):
        model = parity.shard(parity.OURS, mlp())
        biases = [p for name, p in model.layers.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in model.layers.named_parameters() if name.endswith("weight")]
        groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
        optimizer = make(model, params=groups)
        optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.5})
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for batch in mlp_batches():
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                parity.regression_loss(model, parity.my_part(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        rates = [group["lr"] for group in optimizer.param_groups]
        runs.append([parity.full_params(model), states(optimizer), rates])
    parity.assert_equal(runs[1], runs[0])


@ranks(2)
@pytest.mark.parametrize(("first", "second"), [(Flat, Early), (Early, Flat)])
def test_state_is_exchanged(first: Any, second: Any) -> None:
    whole, model = (parity.shard(parity.OURS, mlp()) for _ in range(2))
    expected = train(whole, Flat(whole), 4)[-1]
    optimizer = first(model)
    for step, batch in enumerate(parity.regression_batches(models.DIM, 4, steps=4)):
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            del optimizer
            gc.collect()
            optimizer = second(model)
            optimizer.load_state_dict(saved)
        parity.regression_loss(model, parity.my_part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    parity.assert_equal([parity.full_params(model), states(optimizer)], expected)


@ranks(2)
def test_a_class_may_count_in_its_groups() -> None:
    """Once per step, however many units it was made in; what the user writes there stays."""

    class Counting(torch.optim.SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr)
            for group in self.param_groups:
                group.setdefault("count", 0)

        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for group in self.param_groups:
                group["count"] += 1

    model = parity.shard(parity.OURS, mlp())
    optimizer = FlatOptimizer(model, Counting, elementwise=True, lr=0.1, step_in_backward=True)
    (group,) = optimizer.param_groups
    group["count"] = 0
    for step, batch in enumerate(mlp_batches()):
        parity.regression_loss(model, parity.my_part(batch)).backward()
        group["lr"] = 0.1 / (step + 1)
        optimizer.step()
        assert (group["count"], group["lr"]) == (step + 1, 0.1 / (step + 1))


@ranks(2)
def test_what_needs_all_gradients_is_refused() -> None:
    model = parity.shard(parity.OURS, mlp())
    optimizer = Early(model)
    with raises("stepped-twice-owner"):
        Early(model)
    with raises("stepped-closure"):
        optimizer.step(lambda: 0.0)
    batch = parity.my_part(mlp_batches()[0])
    parity.regression_loss(model, batch).backward()
    with raises("stepped-in-backward"):
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    with raises("stepped-again"):
        parity.regression_loss(model, batch).backward()


@ranks(2)
def test_an_optimizer_that_is_gone_steps_nothing() -> None:
    model = parity.shard(parity.OURS, mlp())
    optimizer = Early(model)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    before = parity.full_params(model)
    parity.regression_loss(model, parity.my_part(mlp_batches()[0])).backward()
    assert all(param.grad is not None for param in model.parameters())
    parity.assert_equal(parity.full_params(model), before)
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    Early(model)
