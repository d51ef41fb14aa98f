"""What an exception leaves, and what a deleted model leaves: nothing, without the collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import ProfilerActivity, profile

import fsdp2
from fsdp2.core.device.buffers import FlatBuffer, TransientBuffer
from fsdp2.core.modules.registry import records_below, require_record
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.testing.null_group import null_world
from tests.common import tensors
from tests.common.errors import raises
from tests.common.observing import observe

pytestmark = pytest.mark.alone


class BoomError(Exception):
    """What the tests below throw."""


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with null_world(2):
        yield


@pytest.fixture
def _no_collector() -> Iterator[None]:
    _trained()  # what torch imports at first use keeps the frames that used it in cycles
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _scheduler(model: nn.Module) -> Scheduler:
    scheduler = require_record(model).scheduler
    assert scheduler is not None
    return scheduler


def _blocks(number: int = 3) -> Any:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(number)])


def _sharded(model: Any = None, **arguments: Any) -> Any:
    model = _blocks() if model is None else model
    if "mesh" not in arguments:
        arguments["mesh"] = init_device_mesh("cpu", (2,))
    for block in model:
        fsdp2.fully_shard(block, **arguments)
    return fsdp2.fully_shard(model, **arguments)


def _x() -> Tensor:
    return torch.ones(2, 8, requires_grad=True)


def _train(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(_x()).sum().backward()
        optimizer.step()


def _boom(*_: Any) -> None:
    raise BoomError


# -- a deleted model ------------------------------------------------------------------------------


def _trained(**arguments: Any) -> Any:
    model = _sharded(**arguments)
    _train(model)
    return model


def _prefetching() -> Any:
    model = _sharded()
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[1].set_modules_to_backward_prefetch([model[0]])
    _train(model)
    return model


def _list() -> Any:
    model = _blocks()
    mesh = init_device_mesh("cpu", (2,))
    fsdp2.fully_shard([model[0], model[1]], mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    _train(model)
    return model


def _ignoring() -> Any:
    model = _blocks()
    fsdp2.fully_shard(model, ignored_params={model[0][0].weight})
    _train(model)
    return model


def _placed() -> Any:
    model = _blocks()
    first = model[0][0].weight

    def choose(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param is first or param is model[0][0].bias else None

    return _sharded(model, shard_placement_fn=lambda p: None if p.ndim == 1 else choose(p))


def _profiled() -> Any:
    model = _sharded()
    with profile(activities=[ProfilerActivity.CPU]):
        _train(model)
    return model


def _failed(where: str) -> Any:
    model = _list() if where == "list" else _trained()
    if where == "backward":
        model[1].register_full_backward_hook(_boom)
    else:
        model[1].register_forward_hook(_boom)
    with pytest.raises(BoomError) as caught:
        model(_x()).sum().backward()
    del caught
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "never run": _sharded,
    "trained": _trained,
    "mixed": lambda: _trained(mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "prefetch": _prefetching,
    "a list": _list,
    "placed by a function that knows the model": _placed,
    "while a profiler ran": _profiled,
    "ignored parameters": _ignoring,
    "extended parameters": lambda: _trained(
        model=tensors.extend(_blocks(), tensors.Bf16Weight), mesh=init_device_mesh("cpu", (1,))
    ),
    "after an exception in forward": lambda: _failed("forward"),
    "after an exception in backward": lambda: _failed("backward"),
    "after an exception in a list": lambda: _failed("list"),
}


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_a_deleted_model_is_gone(build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules, hooks, units, groups, parameters and both kinds of memory; none waits in a cycle."""
    storages: list[Any] = []

    def watch(kind: type) -> None:
        made = kind.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            storages.append(weakref.ref(self._raw))

        monkeypatch.setattr(kind, "__init__", init)

    watch(FlatBuffer)
    watch(TransientBuffer)
    model = build()
    left: dict[str, Any] = {"model": weakref.ref(model)}
    for record in records_below(model):
        name = record.unit.name
        left[f"hooks of {name}"] = weakref.ref(record)
        left[f"unit {name}"] = weakref.ref(record.unit)
        for group in record.unit.own_groups:
            left[f"group {group.name}"] = weakref.ref(group)
            for param in group.params:
                left[f"{param.name}"] = weakref.ref(param)
                left[f"{param.name}, sharded"] = weakref.ref(param.sharded)
    assert len(left) > 6
    assert storages
    del model, record, group, param
    assert [name for name, reference in left.items() if reference() is not None] == []
    assert [reference() for reference in storages if reference() is not None] == []


@pytest.mark.usefixtures("_no_collector")
def test_whole_parameters_are_gone_though_shard_placement_fn_knows_them() -> None:
    """As where experts are told apart by a set of their parameters."""
    model = _blocks()
    whole = [weakref.ref(param) for param in model[0].parameters()]

    def shard(experts: set[nn.Parameter]) -> None:
        _sharded(model, shard_placement_fn=lambda param: Shard(0) if param in experts else None)

    shard(set(model[0].parameters()))
    assert [reference() for reference in whole] == [None] * len(whole)


@pytest.mark.usefixtures("_no_collector")
def test_a_model_deleted_between_forward_and_backward_still_trains_its_parameters() -> None:
    model = _trained()
    params = list(model.parameters())
    for param in params:
        param.grad = None
    loss = model(_x()).sum()
    del model
    loss.backward()
    assert all(param.grad is not None for param in params)


def test_hooks_do_not_pile_up_on_a_parameter_that_a_unit_returns() -> None:
    class Prompt(nn.Module):
        def __init__(self, param: nn.Parameter) -> None:
            super().__init__()
            self.prompt, self.ignored = nn.Parameter(torch.ones(4, 8)), param

        def forward(self) -> tuple[Tensor, Tensor]:
            return self.prompt, self.ignored

    ignored = nn.Parameter(torch.ones(8))
    model: Any = fsdp2.fully_shard(Prompt(ignored), ignored_params={ignored})
    found = []
    for _ in range(3):
        prompt, other = model()
        (prompt.sum() + other.sum()).backward()
        found.append([len(tensor._backward_hooks) for tensor in (prompt, other)])
    assert found[0] == found[-1]


# -- after an exception ---------------------------------------------------------------------------


def test_a_part_that_was_called_alone_and_raised() -> None:
    """The forward of the whole model afterwards is not inside the part's."""
    model = _trained()
    hook = model[1][0].register_forward_hook(_boom)
    with pytest.raises(BoomError):
        model[1](_x())
    hook.remove()
    scheduler = _scheduler(model)
    before = scheduler.resets
    model(_x()).sum().backward()
    assert scheduler.resets == before + 1
    assert scheduler.iteration.forward_root is None
    assert not any(unit.is_gathered for unit in scheduler.units)


def test_a_list_starts_anew_after_an_exception() -> None:
    """Of [a, b] a had run. Where b comes first the next time, it is not the last."""
    model = _list()
    unit = require_record(model[0]).unit
    hook = model[1].register_forward_pre_hook(_boom)
    with pytest.raises(BoomError):
        model(_x())
    hook.remove()
    gathered: list[bool] = []
    model[1].register_forward_hook(lambda *_: gathered.append(unit.is_gathered))
    model[0], model[1] = model[1], model[0]
    model(_x())
    assert gathered == [True]
    assert not unit.is_gathered


def test_an_optimizer_step_that_raises_outdates_gathered_parameters() -> None:
    """It may have changed some of them."""
    model = _trained(reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    model[0].unshard()
    (group,) = require_record(model[0]).unit.own_groups
    assert group.is_unsharded

    def closure() -> float:
        raise BoomError

    with pytest.raises(BoomError):
        optimizer.step(closure)
    gathers: list[str] = []
    observe([require_record(model[0]).unit], lambda operation, _: gathers.append(operation))
    model(_x())
    assert gathers[:2] == ["reshard", "all_gather"]


def test_finalize_that_raises_is_known_to_have_been_interrupted() -> None:
    model = _trained()
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model(_x()).sum().backward()
    model.set_requires_gradient_sync(True)
    hook = model[1][0].weight.register_post_accumulate_grad_hook(_boom)
    with pytest.raises(BoomError):
        model.finalize_backward()
    hook.remove()
    before = _scheduler(model).resets
    model(_x())
    assert _scheduler(model).resets == before + 1


def test_an_interrupted_move_into_a_new_flat_shard_is_done_again() -> None:
    """Parameters that had moved are not in the shard that the group still gathers."""
    model = _trained()
    (group,) = require_record(model[1]).unit.own_groups
    weight, bias = group.params
    with torch.no_grad():
        weight.sharded._local_tensor = torch.full_like(weight.sharded._local_tensor, 7.0)
    adopt = type(bias).adopt

    def interrupted(self: Any, *args: Any) -> None:
        if self is bias:
            raise KeyboardInterrupt
        adopt(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(bias), "adopt", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(_x())
    model(_x())
    assert all(param.is_in_place for param in group.params)
    start = group.shard.piece(torch.float32, 0, (4, 8))  # type: ignore[union-attr]  # adopted
    assert start.data_ptr() == weight.sharded._local_tensor.data_ptr()
    assert start.eq(7.0).all()


def test_a_load_that_raises_half_way_is_followed_as_far_as_it_came() -> None:
    model = _trained()
    (group,) = require_record(model[1]).unit.own_groups
    state = model.state_dict()
    fits, plain = torch.full_like(state["1.0.weight"], 7.0), torch.ones(8)
    with pytest.raises(fsdp2.errors.ShardingStateError, match=r"1\.0\.bias.*was replaced"):
        model[1].load_state_dict({"0.weight": fits, "0.bias": plain}, assign=True)
    model[1].unshard()
    assert group.shard.piece(torch.float32, 0, (4, 8)).eq(7.0).all()  # type: ignore[union-attr]
    model[1].reshard()
    assert model[1][0].weight.to_local().eq(7.0).all()
    assert isinstance(model[1][0].bias, DTensor)


@pytest.mark.parametrize("again", ["reset", "forward"])
def test_a_backward_after_one_that_raised_is_not_half_done(again: str) -> None:
    """It would end before it reduced anything."""
    model = _trained()
    model.zero_grad()
    intact = model(_x()).sum()
    handle = model[1].register_full_backward_hook(_boom)
    failing = model(_x()).sum()
    handle.remove()
    with pytest.raises(BoomError):
        failing.backward()
    with raises("backward-after-a-failed-one"):
        intact.backward()
    if again == "reset":
        model.reset_iter_state()
    model.zero_grad()
    model(_x()).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
