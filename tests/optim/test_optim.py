"""`FlatOptimizer` steps as the plain optimizer does; its state is the plain optimizer's."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2.optim.flat import ELEMENTWISE, FlatOptimizer
from tests.common import models, parity
from tests.common.combinations import each_once
from tests.common.errors import raises
from tests.common.gradients import mlp, mlp_batches
from tests.common.workers import ranks

pytestmark = [pytest.mark.ranks, pytest.mark.feature("FlatOptimizer")]

AdamW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=True)
Make = Callable[[nn.Module], torch.optim.Optimizer]


def _plain(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), **options)


def _flat(model: nn.Module, **options: Any) -> FlatOptimizer:
    return FlatOptimizer(model, torch.optim.AdamW, **{**AdamW.keywords, **options})


def _states(optimizer: torch.optim.Optimizer) -> Any:
    """Everything in the state dict, DTensors as this rank's rows."""
    entries = _entries(optimizer.state_dict())
    return [(index, key, copy.deepcopy(_rows(value))) for index, key, value in entries]


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    before: Callable[[int], None] = lambda step: None,
) -> list[Any]:
    """What a few steps leave behind, each: parameters and state."""
    out = model.head.out_features if hasattr(model, "head") else 1
    seen = []
    for step, batch in enumerate(parity.regression_batches(models.DIM, out, steps=steps)):
        before(step)
        parity.regression_loss(model, parity.my_part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([parity.full_params(model), _states(optimizer)])
    return seen


def _own_rows(model: nn.Module) -> list[nn.Parameter]:
    return [nn.Parameter(param._local_tensor.detach()) for param in model.parameters()]


class _OverRows:
    """A plain optimizer over this rank's rows as plain tensors."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.params, self.optimizer = list(model.parameters()), optimizer
        self.state_dict = optimizer.state_dict

    def step(self) -> None:
        rows = self.optimizer.param_groups[0]["params"]
        for param, own in zip(self.params, rows, strict=True):
            own.grad = param.grad._local_tensor
        self.optimizer.step()

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


@ranks(2)
@pytest.mark.parametrize(
    ("optimizer_class", "model"),
    [
        *((cls, models.MLP) for cls in ELEMENTWISE),
        (torch.optim.AdamW, models.OddMLP),  # rows between which there is padding
        (torch.optim.SGD, models.OddMLP),
    ],
    ids=lambda value: value.__name__,
)
def test_steps_like_the_plain_optimizer(optimizer_class: Any, model: Any) -> None:
    """Foreach kernels treat each element alike, wherever it lies; so do those of one tensor."""
    options = {"lr": 1e-2, "foreach": True}
    if optimizer_class is torch.optim.SGD:
        options["momentum"] = 0.9
    plain, flat = (parity.shard(parity.OURS, models.seeded(model)) for _ in range(2))
    if optimizer_class is torch.optim.Rprop:  # torch's fails on DTensors
        optimizer: Any = _OverRows(plain, optimizer_class(_own_rows(plain), **options))
    else:
        optimizer = optimizer_class(plain.parameters(), **options)
    expected = _train(plain, optimizer)
    parity.assert_equal(_train(flat, FlatOptimizer(flat, optimizer_class, **options)), expected)


@ranks(2)
@each_once(mixed=[True, False], fused=[True, False])
def test_other_kernels(mixed: bool, fused: bool) -> None:
    """Vectors and the rest of a tensor may round differently, and begin elsewhere."""
    kernels = {"foreach": False, "fused": fused}
    plain, flat = (parity.shard(parity.OURS, mlp(), mixed=mixed) for _ in range(2))
    expected = _train(plain, _plain(plain, **kernels))
    parity.assert_close(_train(flat, _flat(flat, **kernels)), expected, parity.FP32)


@ranks(2)
def test_parameter_groups_and_schedules() -> None:
    """Options belong to groups, and follow a schedule; a group may be added later."""

    def run(make: Callable[..., torch.optim.Optimizer]) -> Any:
        model = parity.shard(parity.OURS, mlp())
        biases = [p for name, p in model.layers.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in model.layers.named_parameters() if name.endswith("weight")]
        optimizer = make(model, [{"params": weights}, {"params": biases, "weight_decay": 0.0}])
        optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.5})
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        seen = _train(model, optimizer, 4, lambda step: schedule.step() if step else None)
        return seen, [group["lr"] for group in optimizer.param_groups]

    plain = run(lambda model, groups: AdamW(groups))
    flat = run(
        lambda model, groups: FlatOptimizer(model, torch.optim.AdamW, groups, **AdamW.keywords)
    )
    parity.assert_equal(flat, plain)


Params = Callable[[nn.Module], Any]

WAYS: dict[str, Params] = {
    "generator": lambda model: model.parameters(),
    "named": lambda model: list(model.named_parameters()),
    "group of a generator": lambda model: [{"params": model.parameters(), "lr": 0.5}],
    "group of named": lambda model: [{"params": model.named_parameters(), "lr": 0.5}],
    "group of one": lambda model: [{"params": model.head.weight}],
    "empty group first": lambda model: [{"params": []}, {"params": model.parameters(), "lr": 0.5}],
}


@ranks(2)
@pytest.mark.parametrize("way", list(WAYS))
def test_parameters_are_named_in_any_way_that_the_class_takes(way: str) -> None:
    def run(make: Callable[..., torch.optim.Optimizer]) -> Any:
        model = parity.shard(parity.OURS, mlp())
        optimizer = make(model, WAYS[way](model))
        seen = _train(model, optimizer, 2)
        groups = optimizer.state_dict()["param_groups"]
        return seen, [(group["lr"], group.get("param_names"), group["params"]) for group in groups]

    plain = run(lambda _, params: AdamW(params))
    flat = run(
        lambda model, params: FlatOptimizer(model, torch.optim.AdamW, params, **AdamW.keywords)
    )
    parity.assert_equal(flat[0], plain[0])
    assert flat[1] == plain[1]


@ranks(2)
@pytest.mark.parametrize("nothing", [[], ()])
def test_no_parameters_at_all_are_refused_as_the_class_does(nothing: Any) -> None:
    model = parity.shard(parity.OURS, mlp())
    with pytest.raises(ValueError, match="empty parameter list"):
        FlatOptimizer(model, torch.optim.AdamW, nothing)


@ranks(2)
def test_parameters_without_a_gradient_are_not_stepped() -> None:
    """Some units rest in some steps, a parameter of the root always."""
    actives = [("a", "c"), ("a", "b"), ("b", "c"), ("a", "b", "c"), ("a",)]

    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, models.seeded(models.Choosy))
        return _train(
            model, make(model), len(actives), lambda step: setattr(model, "active", actives[step])
        )

    parity.assert_equal(run(_flat), run(_plain))


@ranks(2)
def test_a_parameter_frozen_now_and_then() -> None:
    """A run is cut where one of its parameters has no gradient, and stays cut: other counts."""

    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        weight = model.layers[1].weight
        return _train(model, make(model), 5, lambda step: weight.requires_grad_(step not in (1, 3)))

    parity.assert_equal(run(_flat), run(_plain))


@ranks(2)
def test_gradients_that_do_not_lie_side_by_side() -> None:
    """Set by the user, or added up over two backwards: copied, or found as they are."""

    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        optimizer = make(model)
        for step, batch in enumerate(mlp_batches()):
            for _ in range(2):
                parity.regression_loss(model, parity.my_part(batch)).backward()
            if step == 1:
                for param in model.parameters():
                    param.grad = param.grad.clone()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
        return parity.full_params(model), _states(optimizer)

    parity.assert_equal(run(_flat), run(_plain))


@ranks(2)
@pytest.mark.parametrize("kind", ["transposed", "dtypes"])
def test_gradients_that_only_seem_to_lie_side_by_side(kind: str) -> None:
    """One behind the other in one storage, yet not what a view over both would read."""

    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        weight, bias = model.layers[1].weight, model.layers[1].bias
        (rows, columns), length = weight._local_tensor.shape, bias._local_tensor.numel()
        dtypes = [torch.bfloat16, torch.float16] if kind == "dtypes" else [torch.float32] * 2
        flat = torch.linspace(-1, 1, rows * columns + length).to(dtypes[0])
        first, second = flat.split([rows * columns, length])
        first = first.view(rows, columns) if kind == "dtypes" else first.view(columns, rows).t()
        gradients = [first, second.view(dtypes[1])]
        optimizer = make(model)
        for param, dtype, rows_of_it in zip((weight, bias), dtypes, gradients, strict=True):
            param.grad_dtype = dtype
            param.grad = DTensor.from_local(rows_of_it, param.device_mesh, param.placements)
        optimizer.step()
        return parity.full_params(model)

    plain = run(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    flat = run(lambda model: FlatOptimizer(model, torch.optim.SGD, lr=0.1))
    parity.assert_equal(flat, plain)


@ranks(2)
def test_clipping_and_loss_scaling() -> None:
    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        optimizer = make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step, batch in enumerate(mlp_batches()):
            loss = parity.regression_loss(model, parity.my_part(batch)) * (
                torch.inf if step == 1 else 1
            )
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            fsdp2.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return parity.full_params(model), _states(optimizer), scaler.get_scale()

    parity.assert_equal(run(_flat), run(_plain))


@ranks(2)
def test_a_closure_is_evaluated_with_gradients() -> None:
    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        optimizer = make(model)
        batch = parity.my_part(mlp_batches()[0])

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = parity.regression_loss(model, batch)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).detach() for _ in range(3)]
        assert losses[2] < losses[0]
        return losses, parity.full_params(model)

    parity.assert_equal(run(_flat), run(_plain))


# -- state dicts ----------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("makes", [(_plain, _flat), (_flat, _plain), (_flat, _flat)])
def test_state_dicts_are_exchanged(makes: tuple[Make, Make]) -> None:
    """Halfway through, another optimizer takes over; as if it had been one."""
    first, second = makes
    model, whole = parity.shard(parity.OURS, mlp()), parity.shard(parity.OURS, mlp())
    expected = _train(whole, _plain(whole), 4)[-1]
    batches = parity.regression_batches(models.DIM, 4, steps=4)
    optimizer = first(model)
    for step, batch in enumerate(batches):
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = second(model)
            optimizer.load_state_dict(saved)
            parity.assert_equal(
                _states(optimizer), [(i, k, _rows(v)) for i, k, v in _entries(saved)]
            )
        parity.regression_loss(model, parity.my_part(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    parity.assert_equal([parity.full_params(model), _states(optimizer)], expected)


def _entries(saved: Any) -> list[Any]:
    entries = [(i, k, v) for i, state in saved["state"].items() for k, v in state.items()]
    return sorted(entries, key=lambda entry: entry[:2])


def _rows(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


@ranks(2)
def test_a_loaded_state_is_not_shared() -> None:
    """Step counts of a state dict of ours are one tensor each."""
    model = parity.shard(parity.OURS, mlp())
    optimizer = _flat(model)
    _train(model, optimizer, 2)
    counts = [state["step"] for state in optimizer.state.values()]
    assert len({id(count) for count in counts}) == len(counts) == 8
    assert all(count.item() == 2 for count in counts)


@ranks(2)
@pytest.mark.parametrize("makes", [(_plain, _flat), (_flat, _plain)])
def test_checkpoints_are_exchanged(makes: tuple[Make, Make], tmp_path: Path) -> None:
    """Through torch.distributed.checkpoint, into an optimizer that never stepped."""
    first, second = makes
    model, other = parity.shard(parity.OURS, mlp()), parity.shard(parity.OURS, mlp())
    writer, reader = first(model), second(other)
    _train(model, writer, 2)
    state = {"optimizer": get_optimizer_state_dict(model, writer)}
    dcp.save(state, checkpoint_id=str(tmp_path))
    target = {"optimizer": get_optimizer_state_dict(other, reader)}
    dcp.load(target, checkpoint_id=str(tmp_path))
    set_optimizer_state_dict(other, reader, target["optimizer"])
    parity.assert_equal(_states(reader), _states(writer))
    with torch.no_grad():
        for param, source in zip(other.parameters(), model.parameters(), strict=True):
            param._local_tensor.copy_(source._local_tensor)
    parity.assert_equal(_train(other, reader, 1), _train(model, writer, 1))


@ranks(2)
def test_state_may_be_written_to() -> None:
    model = parity.shard(parity.OURS, mlp())
    optimizer = _flat(model)
    _train(model, optimizer, 1)
    weight = model.layers[0].weight
    optimizer.state[weight]["exp_avg"]._local_tensor.fill_(3.0)
    assert (optimizer.state[weight]["exp_avg"]._local_tensor == 3).all()
    assert not (optimizer.state[model.layers[0].bias]["exp_avg"]._local_tensor == 3).any()


# -- when memory moves ----------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("move", ["dtype", "assign", "nothing"])
def test_shards_that_get_other_memory(move: str) -> None:
    """State follows the parameters; the runs are cut anew."""

    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        optimizer = make(model)
        seen = _train(model, optimizer, 2)
        if move == "dtype":
            model.to(torch.float64)
            model.to(torch.float32)
        elif move == "assign":
            values = {k: v.clone() for k, v in model.state_dict().items()}
            model.load_state_dict(values, assign=True)
            fsdp2.repoint_optimizer(optimizer)
        return seen + _train(model, optimizer, 2)

    parity.assert_equal(run(_flat), run(_plain))


@ranks(2)
def test_shards_that_get_other_memory_behind_the_units_back() -> None:
    """A layer of a unit is converted between backward and step: the unit's buffer is not it."""

    def run(make: Make) -> Any:
        model = mlp()
        parity.OURS.fully_shard(model)
        optimizer = make(model)
        seen = _train(model, optimizer, 1)
        parity.regression_loss(model, parity.my_part(mlp_batches()[0])).backward()
        model.layers[1].to(torch.float64).to(torch.float32)
        optimizer.step()
        optimizer.zero_grad()
        return seen + _train(model, optimizer, 2)

    parity.assert_equal(run(_flat), run(_plain))


# -- cost -----------------------------------------------------------------------------------------


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


@ranks(2)
def test_one_tensor_a_unit() -> None:
    """In a step there is a view of each unit's gradients and one kernel; nothing is copied."""
    model = parity.shard(parity.OURS, mlp())
    optimizer = _flat(model, foreach=False, fused=True)
    _train(model, optimizer, 1)
    parity.regression_loss(model, parity.my_part(mlp_batches()[0])).backward()
    with _Operators() as operators:
        optimizer.step()
    units = 4  # three layers and the root
    assert operators.counts["aten::as_strided"] == units
    assert operators.counts["aten::_fused_adamw_"] == 1
    kernels = {name for name in operators.counts if name.startswith("aten::")}
    assert kernels == {"aten::as_strided", "aten::_fused_adamw_", "aten::_foreach_add_.Scalar"}


class _Slowing(torch.optim.Optimizer):
    """Keeps count of its steps in its parameter groups, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] / group["k"])


@ranks(2)
def test_what_a_class_writes_into_its_groups() -> None:
    """It is there in the next step, also where runs are cut anew, and in the state dict."""

    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        optimizer = make(model)

        def before(step: int) -> None:
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())

        return _train(model, optimizer, 4, before), optimizer.param_groups[0]["k"]

    flat = run(lambda model: FlatOptimizer(model, _Slowing, elementwise=True, lr=0.1))
    parity.assert_equal(flat, run(lambda model: _Slowing(model.parameters(), 0.1)))
    assert flat[1] == 4


@ranks(2)
def test_classes_that_look_at_whole_parameters_are_refused() -> None:
    model = parity.shard(parity.OURS, mlp())
    with raises("not-elementwise"):
        FlatOptimizer(model, torch.optim.LBFGS)


@ranks(2)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(duplicate: Callable[[Any], Any]) -> None:
    """They would have neither model nor runs."""
    optimizer = _flat(parity.shard(parity.OURS, mlp()))
    with raises("copied-optimizer"):
        duplicate(optimizer)


@ranks(2)
def test_parameters_that_no_unit_manages() -> None:
    """They are stepped as they are."""

    def run(make: Callable[..., torch.optim.Optimizer]) -> Any:
        model = mlp()
        parity.OURS.fully_shard(model, ignored_params=set(model.head.parameters()))
        optimizer = make(model, foreach=False)  # torch's foreach takes no mixture
        return _train(model, optimizer)

    parity.assert_equal(run(_flat), run(_plain))
