"""`FlatOptimizer`: the steps and the state of torch's optimizer, in whatever way it steps.

It steps at the end or in backward, over shards where they are or over copies in CPU memory. Shards
in CPU memory are taken for shards on a device here, so that they travel from CPU memory to other
CPU memory; streams and their order are those of tests/accelerator/test_offloaded_states.py.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.optim import offloaded
from fsdp2.optim.flat import ELEMENTWISE, FlatOptimizer
from fsdp2.testing.counting import operators
from tests.common import meshes, models, parallelisms, parity
from tests.common.cases import in_turn
from tests.common.combinations import each_once
from tests.common.errors import raises
from tests.common.gradients import mlp, mlp_batches
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}
MODES: dict[str, dict[str, Any]] = {
    "flat": {},
    "backward": {"step_in_backward": True},
    "host": {"offload": True},
    "host in backward": {"offload": True, "step_in_backward": True},
}
AT_THE_END = ["flat", "host"]
"""Modes in which all gradients are there between backward and the step."""

Make = Callable[..., torch.optim.Optimizer]
Before = Callable[[Any, Any, int], object]


def _plain(model: nn.Module, params: Any = None, **options: Any) -> torch.optim.Optimizer:
    params = model.parameters() if params is None else params
    return parity.ShardwiseAdamW(params, **{**OPTIONS, **options})


def _flat(model: nn.Module, params: Any = None, **options: Any) -> FlatOptimizer:
    params = model.parameters() if params is None else params
    return FlatOptimizer(params, torch.optim.AdamW, **{**OPTIONS, **options})


def made(make: Make, **options: Any) -> tuple[Any, Any]:
    """A sharded MLP and its optimizer."""
    model = parity.shard(parity.OURS, mlp())
    return model, make(model, **options)


def _states(optimizer: torch.optim.Optimizer) -> Any:
    """Everything in the state dict, DTensors as this rank's rows."""
    entries = _entries(optimizer.state_dict())
    return [(index, key, copy.deepcopy(_rows(value))) for index, key, value in entries]


def _entries(saved: Any) -> list[Any]:
    entries = [(i, k, v) for i, state in saved["state"].items() for k, v in state.items()]
    return sorted(entries, key=lambda entry: entry[:2])


def _rows(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _leave_alone(*_: object) -> None:
    """Nothing to be done."""


def _train(
    model: Any,
    optimizer: Any,
    batches: int | list[Any] = 3,
    before: Before = _leave_alone,
    after: Before = _leave_alone,
) -> list[Any]:
    """Parameters and states after each step.

    Args:
        batches: this rank's part of each batch; or how many steps.
        before: called ahead of each backward with the model, the optimizer and the step's number.
        after: the same behind it.
    """
    if isinstance(batches, int):
        batches = _parts(batches, model.head.out_features if hasattr(model, "head") else 1)
    seen = []
    for step, batch in enumerate(batches):
        before(model, optimizer, step)
        parity.regression_loss(model, batch).backward()
        after(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        seen.append([parity.full_params(model), _states(optimizer)])
    return seen


def _parts(steps: int, out: int = 4) -> list[Any]:
    return [*map(parity.my_part, parity.regression_batches(models.DIM, out, steps=steps))]


@contextmanager
def _apart() -> Iterator[None]:
    """Shards in CPU memory are somewhere else than the CPU's own."""
    with mock.patch.object(offloaded, "travels", return_value=True):
        yield


def _check(
    run: Callable[[Make], Any], modes: Iterable[str] = MODES, reference: Make = _plain
) -> None:
    """What a run leaves behind with the optimizer of each mode, it leaves with the plain one."""
    expected = run(reference)
    for mode in modes:
        with _apart():
            parity.assert_equal(run(partial(_flat, **MODES[mode])), expected, mode)


RUNS: dict[str, Callable[[], None]] = {}


def like_plain(
    modes: Iterable[str] = MODES, **cases: dict[str, Any]
) -> Callable[[Callable[..., Any]], None]:
    """Makes a run a case of `test_runs_end_as_with_the_plain_optimizer`, or several."""

    def register(run: Callable[..., Any]) -> None:
        for name, arguments in (cases or {"": {}}).items():
            case = f"{run.__name__} {name}".strip()
            RUNS[case] = partial(_check, partial(run, **arguments), modes)

    return register


def _clip(model: nn.Module, _: Any, __: int) -> None:
    assert fsdp2.clip_grad_norm_(model.parameters(), 0.05) > 0.05


# -- where the steps are the same -----------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize(
    ("optimizer_class", "model"),
    [
        *((cls, models.MLP) for cls in ELEMENTWISE),
        (torch.optim.SGD, models.OddMLP),  # rows between which there is padding
    ],
    ids=lambda value: value.__name__,
)
def test_steps_like_the_plain_optimizer(optimizer_class: Any, model: Any) -> None:
    """Foreach kernels treat each element alike, wherever it lies; so do those of one tensor."""
    options = {"lr": 1e-2, "foreach": True}
    if optimizer_class is torch.optim.SGD:
        options["momentum"] = 0.9
    plain, flat = (parity.shard(parity.OURS, models.seeded(model)) for _ in range(2))
    expected = _train(plain, _OverRows(plain, optimizer_class, options))
    parity.assert_equal(_train(flat, FlatOptimizer(flat, optimizer_class, **options)), expected)


class _OverRows:
    """A plain optimizer over this rank's rows as plain tensors: torch's Rprop takes no DTensors."""

    def __init__(self, model: nn.Module, optimizer_class: Any, options: dict[str, Any]) -> None:
        self.params = list(model.parameters())
        self.rows = [nn.Parameter(param._local_tensor.detach()) for param in self.params]
        self.optimizer = optimizer_class(self.rows, **options)
        self.state_dict = self.optimizer.state_dict

    def step(self) -> None:
        for param, own in zip(self.params, self.rows, strict=True):
            own.grad = param.grad._local_tensor
        self.optimizer.step()

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


@ranks(1, 2)
@each_once(
    mixed=[False, True],
    model=[models.MLP, models.OddMLP, models.Repeated, models.Nested],
    reshard=[None, False],
)
def test_any_model(mixed: bool, model: Any, reshard: bool | None) -> None:
    """Uneven and empty shards, units that are called twice, two dtypes."""
    options = {"mixed": mixed, "reshard_after_forward": reshard}

    def run(make: Make) -> Any:
        sharded = parity.shard(parity.OURS, models.seeded(model), **options)
        return _train(sharded, make(sharded))

    _check(run)


@ranks(2)
@each_once(mixed=[True, False], fused=[True, False])
def test_other_kernels(mixed: bool, fused: bool) -> None:
    """Vectors and the rest of a tensor may round differently, and begin elsewhere."""
    kernels = {"foreach": False, "fused": fused}
    plain, flat = (parity.shard(parity.OURS, mlp(), mixed=mixed) for _ in range(2))
    expected = _train(plain, _plain(plain, **kernels))
    parity.assert_close(_train(flat, _flat(flat, **kernels)), expected, parity.FP32)


@ranks(4)
def test_replicas_and_tensor_parallel_shards() -> None:
    """Torch's foreach takes no mixture of meshes."""

    def copies(make: Make) -> Any:
        model = models.seeded(models.OddMLP)
        model = parity.shard(parity.OURS, model, mesh=meshes.hsdp_mesh(2, 2))
        return _train(model, make(model), 2)

    spread = parallelisms.PARALLELISMS["tp"]
    whole = parity.regression_batches(models.DIM, models.DIM, steps=2)

    def parallel(clips: bool, make: Make) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(parallelisms.Rung(), parallelisms.Rung())
        model = spread.shard(fsdp2, model)
        after = _clip if clips else _leave_alone
        return _train(model, make(model), [*map(spread.part, whole)], after=after)

    _check(copies)
    _check(partial(parallel, False), ["backward", "host in backward"], reference=_flat)
    _check(partial(parallel, True), AT_THE_END, reference=_flat)


@ranks(2)
@pytest.mark.parametrize("ignores", [True, False])
def test_units_that_rest_and_parameters_of_no_unit(ignores: bool) -> None:
    """Calls that come to nothing, and what fully_shard left alone: `step` sees to them."""
    actives = [("a", "c"), ("a", "b"), ("b", "c"), ("a", "b", "c"), ("a",)]

    def choose(model: Any, _: object, step: int) -> None:
        model.active = actives[step]

    def run(make: Make) -> Any:
        model = models.seeded(models.Choosy)
        left = next(model.parameters())
        ignored = {left} if ignores else set()
        for unit in (*models.units(model)[:-1], model):
            fsdp2.fully_shard(unit, ignored_params=ignored)
        if ignores:
            left.register_hook(lambda grad: parity.over_ranks(grad))
        return _train(model, make(model), _parts(len(actives), 2), before=choose)

    _check(run, reference=_flat if ignores else _plain)


@like_plain(["flat"])
def parameters_that_no_unit_manages(make: Make) -> Any:
    """They are stepped as they are."""
    model = mlp()
    parity.OURS.fully_shard(model, ignored_params=set(model.head.parameters()))
    optimizer = make(model, foreach=False)  # torch's foreach takes no mixture
    return _train(model, optimizer)


class Partly(nn.Module):
    """Two parameters, of which one is used on one rank, on both or on none."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(models.DIM, models.DIM)
        self.at_times = nn.Linear(models.DIM, models.DIM)
        self.uses = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.always(x))
        return x + self.at_times(x) if self.uses else x


@like_plain()
def gradients_that_other_ranks_have(make: Make) -> Any:
    """They are delivered at the end of backward, behind those that have left by then."""
    used = [(True, True), (True, False), (False, False), (False, True), (True, True)]

    def choose(model: Any, _: Any, step: int) -> None:
        model[0].uses = used[step][dist.get_rank()]

    torch.manual_seed(0)
    model = parity.shard(parity.OURS, nn.Sequential(Partly(), Partly()))
    return _train(model, make(model), _parts(len(used), models.DIM), before=choose)


@like_plain()
def groups_schedules_and_micro_batches(make: Make) -> Any:
    """Options belong to groups, and follow a schedule; a group may be added later."""
    model = parity.shard(parity.OURS, mlp())
    named = dict(model.layers.named_parameters())
    biases = [param for name, param in named.items() if name.endswith("bias")]
    weights = [param for name, param in named.items() if name.endswith("weight")]
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
    return parity.full_params(model), _states(optimizer), rates


Params = Callable[[nn.Module], Any]

WAYS: dict[str, Params] = {
    "generator": lambda model: model.parameters(),
    "named": lambda model: list(model.named_parameters()),
    "group of a generator": lambda model: [{"params": model.parameters(), "lr": 0.5}],
    "group of named": lambda model: [{"params": model.named_parameters(), "lr": 0.5}],
    "group of one": lambda model: [{"params": model.head.weight}],
    "empty group first": lambda model: [{"params": []}, {"params": model.parameters(), "lr": 0.5}],
}


@like_plain(["flat"], **{name: {"way": way} for name, way in WAYS.items()})
def parameters_are_named_in_any_way_that_the_class_takes(make: Make, way: Params) -> Any:
    model = parity.shard(parity.OURS, mlp())
    optimizer = make(model, way(model))
    seen = _train(model, optimizer, 2)
    groups = optimizer.state_dict()["param_groups"]
    return seen, [(group["lr"], group.get("param_names"), group["params"]) for group in groups]


@like_plain(["flat"])
def a_parameter_frozen_now_and_then(make: Make) -> Any:
    """A run is cut where one of its parameters has no gradient, and stays cut: other counts."""

    def freeze(model: Any, _: Any, step: int) -> None:
        model.layers[1].weight.requires_grad_(step not in (1, 3))

    return _train(*made(make), 5, before=freeze)


@like_plain(["flat"])
def gradients_that_do_not_lie_side_by_side(make: Make) -> Any:
    """Set by the user, or added up over two backwards: copied, or found as they are."""
    model, optimizer = made(make)
    for step, batch in enumerate(mlp_batches()):
        for _ in range(2):
            parity.regression_loss(model, parity.my_part(batch)).backward()
        if step == 1:
            for param in model.parameters():
                param.grad = param.grad.clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    return parity.full_params(model), _states(optimizer)


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


@like_plain(AT_THE_END)
def several_reductions_before_a_step_are_added(make: Make) -> Any:
    """Clipped between them, too, as gradients on the device would be."""
    batch = parity.my_part(mlp_batches()[1])

    def more(model: Any, optimizer: Any, step: int) -> None:
        if step == 1:
            _clip(model, optimizer, step)
        for _ in range(step):
            parity.regression_loss(model, batch).backward()

    return _train(*made(make), after=more)


@like_plain(["flat"])
def a_closure_is_evaluated_with_gradients(make: Make) -> Any:
    model, optimizer = made(make)
    batch = parity.my_part(mlp_batches()[0])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = parity.regression_loss(model, batch)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).detach() for _ in range(3)]
    assert losses[2] < losses[0]
    return losses, parity.full_params(model)


# -- norms first, then the step -------------------------------------------------------------------


@like_plain(AT_THE_END, fp32={"mixed": False}, mixed={"mixed": True})
def clipping_by_the_norm_of_all(make: Make, mixed: bool) -> Any:
    norms: list[Tensor] = []

    def clip(model: Any, _: Any, __: int) -> None:
        norms.append(fsdp2.clip_grad_norm_(model.parameters(), 0.05))
        norms.append(fsdp2.clip_grad_norm_(model.parameters(), 1e9, norm_type=torch.inf))

    model = parity.shard(parity.OURS, models.seeded(models.OddMLP), mixed=mixed)
    return _train(model, make(model), after=clip), norms


@like_plain(
    AT_THE_END,
    torchs={"clip": nn.utils.clip_grad_norm_},
    ours={"clip": fsdp2.clip_grad_norm_},
)
def clipping_and_a_scaler(make: Make, clip: Any) -> Any:
    """torch's clipping writes gradients through operators that no version counter sees."""
    model, optimizer = made(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step, batch in enumerate(mlp_batches()):
        loss = parity.regression_loss(model, parity.my_part(batch))
        scaler.scale(loss * (torch.inf if step == 1 else 1)).backward()
        scaler.unscale_(optimizer)
        clip(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return parity.full_params(model), _states(optimizer), scaler.get_scale()


@like_plain(AT_THE_END, optimizers={"zeroes": "optimizer"}, models={"zeroes": "model"})
def a_step_that_is_left_out_for_its_nans(make: Make, zeroes: str) -> Any:
    model, optimizer = made(make)
    skipped = []
    for step, batch in enumerate(mlp_batches()):
        loss = parity.regression_loss(model, parity.my_part(batch))
        (loss * (torch.nan if step == 1 else 1)).backward()
        finite = bool(fsdp2.clip_grad_norm_(model.parameters(), 0.1).isfinite())
        if finite:
            optimizer.step()
        skipped.append(not finite)
        (optimizer if zeroes == "optimizer" else model).zero_grad()
    assert skipped[:2] == [False, True]
    return parity.full_params(model), _states(optimizer)


# -- state dicts ----------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_state_dicts_are_exchanged(mode: str) -> None:
    """Halfway through, another optimizer takes over; as if it had been one."""
    own = partial(_flat, **MODES[mode])
    whole = parity.shard(parity.OURS, mlp())
    expected = _train(whole, _plain(whole), 4)[-1]
    for first, second in ((_plain, own), (own, _plain), (own, own)):
        with _apart():
            model = parity.shard(parity.OURS, mlp())
            optimizer = first(model)
            _train(model, optimizer, _parts(4)[:2])
            saved = copy.deepcopy(optimizer.state_dict())
            del optimizer
            gc.collect()  # one that steps in backward does so until it is gone
            optimizer = second(model)
            optimizer.load_state_dict(saved)
            loaded = [(i, k, _rows(v)) for i, k, v in _entries(saved)]
            parity.assert_equal(_states(optimizer), loaded)
            _train(model, optimizer, _parts(4)[2:])
            parity.assert_equal([parity.full_params(model), _states(optimizer)], expected)


@ranks(2)
@pytest.mark.parametrize("makes", [(_plain, _flat), (_flat, _plain)])
def test_checkpoints_are_exchanged(makes: tuple[Make, Make], tmp_path: Path) -> None:
    """Through torch.distributed.checkpoint, into an optimizer that never stepped."""
    first, second = makes
    (model, writer), (other, reader) = made(first), made(second)
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
def test_state_by_parameter() -> None:
    """Step counts are one tensor each; other tensors may be written to."""
    model, optimizer = made(_flat)
    _train(model, optimizer, 2)
    counts = [state["step"] for state in optimizer.state.values()]
    assert len({id(count) for count in counts}) == len(counts) == 8
    assert all(count.item() == 2 for count in counts)
    weight = model.layers[0].weight
    optimizer.state[weight]["exp_avg"]._local_tensor.fill_(3.0)
    assert (optimizer.state[weight]["exp_avg"]._local_tensor == 3).all()
    assert not (optimizer.state[model.layers[0].bias]["exp_avg"]._local_tensor == 3).any()


# -- when memory moves ----------------------------------------------------------------------------


@like_plain(["flat"], dtype={"move": "dtype"}, assign={"move": "assign"}, no={"move": ""})
def shards_that_get_other_memory(make: Make, move: str) -> Any:
    """State follows the parameters; the runs are cut anew."""
    model, optimizer = made(make)
    seen = _train(model, optimizer, 2)
    if move == "dtype":
        model.to(torch.float64)
        model.to(torch.float32)
    elif move == "assign":
        values = {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(values, assign=True)
        fsdp2.optim.repoint_optimizer(optimizer)
    return seen + _train(model, optimizer, 2)


@like_plain(["flat"])
def shards_that_get_other_memory_behind_the_units_back(make: Make) -> Any:
    """A layer of a unit is converted between backward and step: the unit's buffer is not it."""
    model = mlp()
    parity.OURS.fully_shard(model)
    optimizer = make(model)
    seen = _train(model, optimizer, 1)
    parity.regression_loss(model, parity.my_part(mlp_batches()[0])).backward()
    model.layers[1].to(torch.float64).to(torch.float32)
    optimizer.step()
    optimizer.zero_grad()
    return seen + _train(model, optimizer, 2)


# -- cost -----------------------------------------------------------------------------------------


@ranks(2)
def test_one_tensor_a_unit() -> None:
    """In a step there is a view of each unit's gradients and one kernel; nothing is copied."""
    model, optimizer = made(_flat, foreach=False, fused=True)
    _train(model, optimizer, 1)
    parity.regression_loss(model, parity.my_part(mlp_batches()[0])).backward()
    counts = operators(optimizer.step)
    units = 4  # three layers and the root
    assert counts["aten.as_strided.default"] == units
    assert counts["aten._fused_adamw_.default"] == 1
    kernels = {"aten.as_strided.default", "aten._fused_adamw_.default", "aten._foreach_add_.Scalar"}
    assert {name for name in counts if name.startswith("aten.")} == kernels


@ranks(2)
@pytest.mark.parametrize(
    ("mode", "most"), [("flat", 6), ("backward", 1), ("host", 6), ("host in backward", 3)]
)
def test_gradients_of_few_units_exist_at_a_time(mode: str, most: int) -> None:
    """From the first step on; with copies, of two that are stepped and of the one reduced last."""
    with _apart():
        model = nn.Sequential(*(nn.Linear(models.DIM, models.DIM, bias=False) for _ in range(6)))
        alive: list[Any] = []
        counts: list[int] = []

        def note(param: Tensor) -> None:
            alive.append(weakref.ref(param.grad._local_tensor))
            counts.append(sum(each() is not None for each in alive))

        for block in model:
            fsdp2.fully_shard(block)
            block.weight.register_post_accumulate_grad_hook(note)
        fsdp2.fully_shard(model)
        optimizer = _flat(model, **MODES[mode])
        for _ in range(2):
            model(torch.randn(2, models.DIM)).sum().backward()
            if mode == "backward":
                assert all(param.grad is None for param in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        assert max(counts) <= most
        assert (max(counts) == most) or "host in" in mode  # whose thread may be fast


# -- what a class does in its steps ---------------------------------------------------------------


class _Slowing(torch.optim.Optimizer):
    """Keeps count of its steps in its parameter groups, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["k"])


@ranks(2)
@pytest.mark.parametrize("in_backward", [False, True])
def test_what_a_class_writes_into_its_groups(in_backward: bool) -> None:
    """Once per step; it is there in the next one, where runs are cut anew, and in the state dict.

    What the user writes there stays.
    """

    def run(make: Make) -> Any:
        model = parity.shard(parity.OURS, mlp())
        optimizer = make(model)
        counts = []

        def before(_: Any, __: Any, step: int) -> None:
            counts.append(optimizer.param_groups[0]["k"])
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())

        return _train(model, optimizer, 4, before), counts, optimizer.param_groups[0]["k"]

    options = {"elementwise": True, "lr": 0.1, "step_in_backward": in_backward}
    flat = run(lambda model: FlatOptimizer(model, _Slowing, **options))
    parity.assert_equal(flat, run(lambda model: _Slowing(model.parameters(), 0.1)))
    assert flat[1:] == ([0, 1, 2, 3], 4)


@like_plain(AT_THE_END)
def a_backward_that_raises_is_followed_by_others(make: Make) -> Any:
    """What its units have left behind is dropped with the gradients of the others."""

    class OnceError(Exception):
        pass

    def fail(*_: object) -> None:
        raise OnceError

    model, optimizer = made(make)
    _train(model, optimizer, 1)
    inside = model.layers[0].register_full_backward_hook(fail)
    with pytest.raises(OnceError):
        parity.regression_loss(model, _parts(1)[0]).backward()
    inside.remove()
    optimizer.zero_grad()
    return _train(model, optimizer, 2)


# -- all runs, and what is refused ----------------------------------------------------------------


@ranks(2)
def test_runs_end_as_with_the_plain_optimizer() -> None:
    in_turn(RUNS, lambda check: check())


@ranks(2)
def test_what_needs_all_gradients_is_refused() -> None:
    """And copies, classes that look at whole parameters, and no parameters at all."""
    with pytest.raises(ValueError, match="empty parameter list"):  # as the class does
        FlatOptimizer([], torch.optim.AdamW)
    model, optimizer = made(_flat)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):  # would have neither model nor runs
        with raises("copied-optimizer"):
            duplicate(optimizer)
    with raises("not-elementwise"):
        FlatOptimizer(model, torch.optim.LBFGS)
    in_turn({mode: mode for mode in ("backward", "host in backward")}, _needs_all_gradients)


def _needs_all_gradients(mode: str) -> None:
    batch = _parts(1)[0]
    with _apart():
        model, optimizer = made(_flat, **MODES[mode])
        with raises("stepped-twice-owner"):
            _flat(model, step_in_backward=True)
        with raises("stepped-closure"):
            optimizer.step(lambda: 0.0)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(parity.regression_loss(model, batch)).backward()
        with raises("stepped-in-backward"):
            fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)
        with raises("stepped-again"):
            parity.regression_loss(model, batch).backward()


@ranks(2)
def test_an_optimizer_that_is_gone_steps_nothing() -> None:
    model, optimizer = made(_flat, step_in_backward=True)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    before = parity.full_params(model)
    parity.regression_loss(model, _parts(1)[0]).backward()
    assert all(param.grad is not None for param in model.parameters())
    parity.assert_equal(parity.full_params(model), before)
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    _flat(model, step_in_backward=True)
