"""`step_shards`: torch's kernels on shards as plain tensors; all else as DTensors would have it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2.optim import step_shards
from fsdp2.optim.flat import ELEMENTWISE
from tests.common import models, parity
from tests.common.errors import raises
from tests.common.gradients import mlp, mlp_batches
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks

Make = Callable[[Any], torch.optim.Optimizer]

AdamW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=True)


def _left(optimizer: torch.optim.Optimizer) -> Any:
    """All of a state dict, of DTensors the rows and how they are spread."""

    def seen(value: object) -> object:
        if isinstance(value, DTensor):
            return str(value.placements), str(value.shape), value._local_tensor.clone()
        if isinstance(value, dict):
            return {str(key): seen(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [seen(inner) for inner in value]
        return value.clone() if isinstance(value, Tensor) else value

    return seen(optimizer.state_dict())


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    before: Callable[[int], None] = lambda step: None,
) -> list[Any]:
    """What each step leaves behind: parameters, gradients and state."""
    seen = []
    for step, batch in enumerate(mlp_batches(steps=steps)):
        before(step)
        parity.regression_loss(model, parity.my_part(batch)).backward()
        optimizer.step()
        seen.append([parity.full_params(model), parity.full_grads(model), _left(optimizer)])
        optimizer.zero_grad()
    return seen


def _on_shards(params: Any, make: Make = AdamW) -> torch.optim.Optimizer:
    optimizer = make(params)
    step_shards(optimizer)
    return optimizer


def _check_alike(run: Callable[[Make], Any], make: Make = AdamW) -> None:
    """A run with shards stepped as plain tensors leaves the bits of one over DTensors."""
    parity.assert_equal(run(partial(_on_shards, make=make)), run(make))


class _Operators(TorchDispatchMode):
    """Whether operators were called on DTensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.on_dtensors: list[str] = []
        self.plain: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        found = any(isinstance(value, DTensor) for value in flat)
        (self.on_dtensors if found else self.plain).append(str(func))
        return func(*args, **(kwargs or {}))


CASES: list[tuple[Any, dict[str, Any]]] = [
    *((cls, {"foreach": True}) for cls in ELEMENTWISE if cls is not torch.optim.Rprop),
    *((cls, {"foreach": False}) for cls in (torch.optim.Adagrad, torch.optim.NAdam)),
    *((torch.optim.AdamW, options) for options in ({}, {"fused": True}, {"maximize": True})),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "foreach": False}),
]
"""Without what DTensor has no rule for: Rprop, fused SGD and Adagrad."""


@ranks(2)
@pytest.mark.parametrize(("optimizer_class", "options"), CASES)
def test_steps_to_the_bit(optimizer_class: Any, options: dict[str, Any]) -> None:
    """All classes, with torch's three kinds of kernels."""

    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        return _train(model, make(model.parameters()))

    _check_alike(run, partial(optimizer_class, lr=1e-2, **options))


@ranks(2)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"lr": 0.1}], ids=str)
def test_uneven_rows_and_bf16(options: dict[str, Any]) -> None:
    """Of some parameters a rank has no rows; gradients may be of another dtype."""
    make = partial(torch.optim.Adam, **{"lr": 1e-2, **options})

    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, models.seeded(models.OddMLP), mixed=True)
        return parity.train_sharded(
            model,
            make,
            parity.regression_loss,
            parity.regression_batches(models.DIM, 1, steps=3),
        )

    _check_alike(run, make)


@ranks(2)
def test_sgd_without_state_or_with_it_later() -> None:
    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        optimizer = make(model.parameters())
        group = optimizer.param_groups[0]
        return _train(model, optimizer, 4, lambda step: group.update(momentum=0.9 * (step > 1)))

    _check_alike(run, partial(torch.optim.SGD, lr=0.1, foreach=True))


@ranks(2)
def test_kernels_see_plain_tensors_once_there_is_state() -> None:
    """torch makes the state; from the second step on its kernels are called on rows."""
    model = parity.shard(parity.OURS, mlp())
    optimizer = AdamW(model.parameters(), foreach=False, fused=True)
    handle = step_shards(optimizer)
    found = []
    for _ in range(3):
        parity.regression_loss(model, parity.my_part(mlp_batches()[0])).backward()
        if len(found) == 2:
            handle.remove()
        with _Operators() as operators:
            optimizer.step()
        found.append(
            tuple(
                "aten._fused_adamw_.default" in names
                for names in (operators.on_dtensors, operators.plain)
            )
        )
    assert found == [(True, False), (False, True), (True, False)]


@ranks(2)
def test_parameter_groups_schedules_and_tensor_lr() -> None:
    """Options belong to groups and follow a schedule; a group and a learning rate come later."""

    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        weights = [p for p in model.layers.parameters() if p.ndim > 1]
        biases = [p for p in model.layers.parameters() if p.ndim == 1]
        optimizer = make([{"params": weights}, {"params": biases, "weight_decay": 0.0}])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

        def before(step: int) -> None:
            if step == 1:
                schedule.step()
            if step == 2:
                optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.5})
            if step == 3:
                optimizer.param_groups[0]["lr"] = torch.tensor(0.25)

        seen = _train(model, optimizer, 5, before)
        return seen, [float(group["lr"]) for group in optimizer.param_groups]

    _check_alike(run, partial(torch.optim.AdamW, lr=1e-2, foreach=False))


@ranks(2)
def test_a_closure_is_evaluated_with_gradients() -> None:
    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        optimizer = make(model.parameters())
        batch = parity.my_part(mlp_batches()[0])

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = parity.regression_loss(model, batch)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).detach() for _ in range(3)]
        losses.append(optimizer.step(closure=closure).detach())
        assert losses[3] < losses[0]
        return losses, parity.full_params(model), _left(optimizer)

    _check_alike(run)


@ranks(2)
def test_hooks_that_change_gradients() -> None:
    """One that was there before counts, and one that came later; they know the optimizer."""

    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        params = list(model.parameters())
        seen = []

        def replace(optimizer: torch.optim.Optimizer, *_: object) -> None:
            assert optimizer.param_groups[0]["params"][0] is params[0]
            for param in params:
                param.grad = param.grad * 0.5

        def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
            state = optimizer.state[params[0]]
            seen.append(state["exp_avg"].full_tensor())

        optimizer = make(params)
        optimizer.register_step_pre_hook(replace)
        optimizer.register_step_post_hook(look)
        return _train(model, optimizer), seen

    _check_alike(run)


@ranks(2)
def test_loss_scaling() -> None:
    """A fused optimizer is given the scale, and whether gradients are finite."""

    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step, batch in enumerate(mlp_batches()):
            loss = parity.regression_loss(model, parity.my_part(batch))
            scaler.scale(loss * (torch.inf if step == 1 else 1)).backward()
            scaler.unscale_(optimizer)
            fsdp2.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return parity.full_params(model), _left(optimizer), scaler.get_scale()

    _check_alike(run)


@ranks(2)
def test_some_parameters_without_a_gradient_or_a_unit() -> None:
    """They are not stepped, or as they are; one that comes later gets its state from torch."""

    def run(make: Make) -> Any:
        model = mlp()
        parity.OURS.fully_shard(model, ignored_params=set(model.head.parameters()))
        first = next(model.layers.parameters())
        optimizer = make(model.parameters())
        return _train(model, optimizer, 4, lambda step: first.requires_grad_(step > 1))

    _check_alike(run, partial(torch.optim.AdamW, lr=1e-2, foreach=False))


@ranks(2)
def test_state_and_gradients_that_are_replaced() -> None:
    """Each step looks anew; what is not spread as its parameter is goes through DTensor."""

    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        param = next(model.parameters())
        optimizer = make(model.parameters())
        batches = mlp_batches(steps=4)
        for step, batch in enumerate(batches):
            parity.regression_loss(model, parity.my_part(batch)).backward()
            if step == 1:
                state = optimizer.state[param]
                state["exp_avg"] = state["exp_avg"] * 2
            if step == 2:
                whole = param.grad.full_tensor()
                param.grad = distribute_tensor(whole, param.device_mesh, [Replicate()])
            if step == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.step()
            optimizer.zero_grad()
        return parity.full_params(model), _left(optimizer)

    _check_alike(run, partial(torch.optim.AdamW, lr=1e-2, foreach=False))


@ranks(2)
def test_copies_and_pickles() -> None:
    """They are the class's own; a copy steps through DTensor, with the same results."""
    model = parity.shard(parity.OURS, mlp())
    optimizer = _on_shards(model.parameters())
    _train(model, optimizer)
    duplicate = copy.deepcopy(optimizer)
    assert type(duplicate) is torch.optim.AdamW
    parity.assert_equal(_left(duplicate), _left(optimizer))
    plain = AdamW(model.parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert pickle.dumps(optimizer.param_groups[0]["lr"])
    parity.assert_equal(_left(plain), _left(optimizer))


@ranks(2)
def test_nothing_of_a_step_stays() -> None:
    """Gradients end with `zero_grad`, also where the step raised; parameters count the write."""
    model = parity.shard(parity.OURS, mlp())
    optimizer = _on_shards(model.parameters())
    _train(model, optimizer, 2)
    param = next(model.parameters())

    def backward() -> StorageWeakRef:
        parity.regression_loss(model, parity.my_part(mlp_batches()[0])).backward()
        return StorageWeakRef(param.grad._local_tensor.untyped_storage())

    memory, version = backward(), param._version
    optimizer.step()
    assert param._version > version
    optimizer.zero_grad()
    assert memory.expired()
    memory = backward()
    optimizer.state[param]["step"] = "no number"
    with pytest.raises(RuntimeError, match="singleton"):
        optimizer.step()
    optimizer.zero_grad()
    assert memory.expired()
    assert type(optimizer.param_groups[0]["params"][0]) is DTensor


class _Own(torch.optim.AdamW):
    """It may do anything in its step."""


OTHERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "of whole parameters": lambda model: torch.optim.LBFGS(model.parameters()),
    "a subclass": lambda model: _Own(model.parameters()),
    "flat": lambda model: fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW),
}


@ranks(2)
@pytest.mark.parametrize("other", list(OTHERS))
def test_other_classes_are_refused(other: str) -> None:
    optimizer = OTHERS[other](parity.shard(parity.OURS, mlp()))
    with raises("not-steppable-by-shard"):
        step_shards(optimizer)
