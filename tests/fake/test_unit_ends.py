"""When a unit's parameters come and go where its forward or backward is out of the ordinary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.null_group import null_world
from fsdp2 import fully_shard
from fsdp2.core.hooks import hooks_of
from fsdp2.core.scheduler import Scheduler
from fsdp2.core.unit import Unit


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with null_world(2):
        yield


def _unit(module: nn.Module) -> Unit:
    hooks = hooks_of(module)
    assert hooks is not None
    return hooks.unit


def _scheduler(module: nn.Module) -> Scheduler:
    hooks = hooks_of(module)
    assert hooks is not None
    assert hooks.scheduler is not None
    return hooks.scheduler


def _sharded(model: nn.Sequential) -> Any:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


class Passes(nn.Module):
    """Returns its input, or a view of it, and reads its parameter beside that."""

    def __init__(self, passes: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.passes = nn.Parameter(torch.ones(4)), passes

    def forward(self, x: Tensor) -> Tensor:
        self.read = (x * self.scale).detach()
        return self.passes(x)


PASSES: dict[str, Callable[[Tensor], Tensor]] = {
    "input": lambda x: x,
    "view": lambda x: x[:, :],
}


@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES.keys())
def test_a_unit_that_returns_its_input_is_left_when_its_gradient_is_there(
    passes: Callable[[Tensor], Tensor],
) -> None:
    """It is entered first, and not entered again by the gradient of what it returned a view of."""
    model = _sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Passes(passes), nn.Tanh()))
    unit = _unit(model[2])
    model[1].set_modules_to_backward_prefetch([model[0]])
    seen: list[bool] = []

    def look(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda _: seen.append(unit.is_gathered))

    model[0].register_forward_hook(look)
    for _ in range(2):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert seen == [False, False]


def test_flags_outlive_a_unit_that_is_added() -> None:
    model = _sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model.set_is_last_backward(False)
    before = _scheduler(model)
    model.append(fully_shard(nn.Linear(4, 4)))
    model(torch.ones(2, 4))
    assert _scheduler(model) is not before
    assert not _scheduler(model).is_last_backward


def test_forwards_without_a_backward_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once: each might be the first of several whose losses are summed."""
    monkeypatch.setattr(Scheduler, "FORWARDS_REMEMBERED", 3)
    model = _sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    lengths = []
    for _ in range(12):
        model(torch.ones(2, 4))
        lengths.append(len(_unit(model[0]).visits))
    assert max(lengths) <= 3 + 2
    assert lengths[2] == 3
    model(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_kept_memory_stays_where_another_way_to_gather_is_chosen() -> None:
    model = fully_shard(nn.Linear(4, 4), reshard_after_forward=True)
    model.set_keep_unsharded_storage(True)
    model(torch.ones(2, 4))
    (group,) = _unit(model).groups
    gathered = group.params[0].unsharded
    assert gathered is not None
    group.reroute = True  # as `set_custom_all_gather` does
    group.bind()
    assert group.params[0].unsharded is gathered
    assert gathered.untyped_storage().nbytes() > 0


class FirstOf(nn.Module):
    """Runs one of its two parts; the other may be gathered ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


@pytest.mark.parametrize("claims", [False, True])
def test_what_a_user_gathers_is_no_guess_any_more(claims: bool) -> None:
    """It was gathered on an explicit list for nothing, and stays only if it was asked for."""
    model: Any = FirstOf()
    for part in (model.first, model.second):
        fully_shard(part)
    fully_shard(model)
    model.first.set_modules_to_forward_prefetch([model.second])
    handles = []

    def claim(*_: Any) -> None:
        if claims:
            handles.append(model.second.unshard(async_op=True))

    model.first.register_forward_hook(claim)
    model(torch.ones(2, 4))
    assert _unit(model.second).is_gathered is claims
