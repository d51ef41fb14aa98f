"""When a unit's parameters come and go where its forward or backward is out of the ordinary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import fully_shard
from fsdp2.core.modules.registry import record_of, require_record
from fsdp2.core.schedule.group import ROUTE
from fsdp2.core.schedule.scheduler import Scheduler
from fsdp2.core.schedule.unit import Phase, Unit, watching
from fsdp2.testing.null_group import null_world
from fsdp2.testing.simulation import check_move

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with null_world(2), watching(check_move):
        yield


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Units by name, as backward enters ("name") and leaves them ("leaves name")."""
    order: list[str] = []
    enter, leave = Scheduler.enter_backward, Scheduler.exit_backward

    def enters(self: Scheduler, unit: Unit, recomputed_for: int | None = None) -> None:
        if unit.phase is not Phase.BACKWARD:
            order.append(unit.name)
        enter(self, unit, recomputed_for)

    def leaves(self: Scheduler, unit: Unit, _: object = None) -> None:
        if unit.phase is Phase.BACKWARD:
            order.append(f"leaves {unit.name}")
        leave(self, unit)

    monkeypatch.setattr(Scheduler, "enter_backward", enters)
    monkeypatch.setattr(Scheduler, "exit_backward", leaves)
    return order


def _unit(module: nn.Module) -> Unit:
    return require_record(module).unit


def _scheduler(module: nn.Module) -> Scheduler:
    scheduler = require_record(module).scheduler
    assert scheduler is not None
    return scheduler


def _has_gradients(model: nn.Module) -> bool:
    return all(param.grad is not None for param in model.parameters())


def _two_layers() -> Any:
    return fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))))


def test_a_unit_without_parameters_leaves_its_inputs_alone() -> None:
    """There is nothing to free: no node stands in front of it, and it may change them in place."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.seen = fully_shard(nn.Linear(4, 4)), [torch.ones(1)]

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.seen = [x, y]
            return self.inner(x.mul_(2.0) + y)

    model: Any = fully_shard(Adds())
    leaf = torch.ones(2, 4, requires_grad=True)
    given = [leaf * 1.0, leaf * 2.0]
    model(*given).sum().backward()
    assert all(seen is one for seen, one in zip(model.seen, given, strict=True))
    assert leaf.grad is not None


def test_forwards_without_a_backward_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once: each might be the first of several whose losses are summed."""
    monkeypatch.setattr(Scheduler, "FORWARDS_REMEMBERED", 3)
    model = _two_layers()
    lengths = []
    for _ in range(12):
        model(torch.ones(2, 4))
        lengths.append(len(_unit(model[0]).visits))
    assert max(lengths) <= 3 + 2
    assert lengths[2] == 3
    model(torch.ones(2, 4)).sum().backward()
    assert _has_gradients(model)


def test_kept_memory_stays_where_another_way_to_gather_is_chosen() -> None:
    model = fully_shard(nn.Linear(4, 4), reshard_after_forward=True)
    model.set_keep_unsharded_storage(True)
    model(torch.ones(2, 4))
    (group,) = _unit(model).own_groups
    gathered = group.params[0].unsharded
    assert gathered is not None
    group.stale = ROUTE  # as `set_custom_all_gather` does
    group.bind()
    assert group.params[0].unsharded is gathered
    assert gathered.untyped_storage().nbytes() > 0


class FirstOf(nn.Module):
    """Runs one of its two parts, or both; the other may be gathered ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))
        self.both = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if self.both else x


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("claims", [False, True])
def test_what_a_user_gathers_is_no_guess_any_more(claims: bool, explicit: bool) -> None:
    """It was gathered for nothing, by the order before or on a list; it stays only on request."""
    model: Any = fully_shard(FirstOf())
    if explicit:
        model.first.set_modules_to_forward_prefetch([model.second])
    else:
        model.both = True
        model(torch.ones(2, 4))  # teaches the order
        model.both = False
    handles = []

    def claim(*_: Any) -> None:
        assert _unit(model.second).is_gathered
        if claims:
            handles.append(model.second.unshard(async_op=True))

    model.first.register_forward_hook(claim)
    with torch.set_grad_enabled(explicit):
        model(torch.ones(2, 4))
    assert _unit(model.second).is_gathered is claims


def test_a_list_that_ran_in_part_is_inside_the_root() -> None:
    """Where no unit may be missed, its end must not be taken for the end of the root around it."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.parts = nn.ModuleList([nn.Identity(), nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Any:
            return self.parts[0](nn.functional.layer_norm(x, (4,), self.scale))

    model: Any = Partly()
    fully_shard([*model.parts], reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    model.set_reduce_scatter_unused_params(True)
    model(torch.randn(2, 4)).sum().backward()
    assert _has_gradients(model)


def test_a_reset_forgets_how_far_a_backward_came() -> None:
    """A derivative inside the next forward has nothing to catch up with."""

    class Derives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Any:
            (slope,) = torch.autograd.grad(self.parts[0](x).sum(), x)
            return self.parts[1](x + slope)

    model: Any = Derives()
    fully_shard([*model.parts])
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    x = torch.randn(2, 4, requires_grad=True)
    output = model(x)

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    output.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    model.reset_iter_state()
    model(x).sum().backward()
    assert _has_gradients(model)


def test_a_derivative_inside_a_forward_skips_no_unit(backward: list[str]) -> None:
    """Units that ran before it have their backward to come."""

    class Derives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (fully_shard(nn.Linear(4, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> Any:
            y = self.first(x) * 1.0
            (slope,) = torch.autograd.grad(self.second(y).sum(), y)
            return y + slope

    model: Any = fully_shard(Derives())
    model.set_reduce_scatter_unused_params(True)
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert [name for name in backward if "leaves" not in name] == ["second", "", "first"]


def test_absent_gradients_that_count_from_a_backward_on() -> None:
    """What a forward has to note for that, this one did not."""
    model = _two_layers()
    loss = checkpoint(model, torch.randn(2, 4), use_reentrant=False).sum()
    model.set_reduce_scatter_unused_params(True)
    loss.backward()
    assert _has_gradients(model)


# ---- where backward leaves a unit


class Sees(nn.Module):
    """A unit that keeps its input, and returns what ``returns`` makes of it and its weight."""

    def __init__(self, returns: Any = torch.mul) -> None:
        super().__init__()
        self.weight, self.returns = nn.Parameter(torch.ones(4)), returns
        self.seen = torch.ones(1)

    def forward(self, x: Tensor) -> Any:
        self.seen = x
        return self.returns(x, self.weight)


class Chain(nn.Module):
    """The second unit is called with what the first returns, which may be used before or after."""

    def __init__(self, side: str, order: list[str], returns: Any) -> None:
        super().__init__()
        self.first, self.second = fully_shard(Sees()), fully_shard(Sees(returns))
        self.side, self.order, self.between = side, order, torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        self.between = between = self.first(x)
        used = [self._on_the_side(between)] if self.side == "before" else []
        output = self.second(between)
        if self.side in ("after", "alone"):
            used.append(self._on_the_side(between))
        if self.side != "alone":
            used.append(output)
        return torch.cat(used).sum()

    def _on_the_side(self, between: Tensor) -> Tensor:
        used: Any = between.sin()
        used.grad_fn.register_hook(lambda *_: self.order.append("side"))
        return used


def _chain(side: str, order: list[str], returns: Any = torch.mul) -> Chain:
    model = fully_shard(Chain(side, order, returns))
    model(torch.ones(2, 4)).backward()
    order.remove("")  # the root
    return model


@pytest.mark.parametrize(
    ("side", "order"),
    [
        ("none", ["second", "leaves second", "first"]),
        # What uses the tensor later has its gradient earlier.
        ("after", ["side", "second", "leaves second", "first"]),
        ("alone", ["side", "first"]),
        ("before", ["second", "leaves second", "side", "first"]),
    ],
)
def test_an_input_ends_the_unit_itself_unless_it_has_older_uses(
    side: str, order: list[str], backward: list[str]
) -> None:
    """For those a node is made, so that they do not hold the unit up."""
    model = _chain(side, backward)
    assert (model.second.seen is model.between) is (side != "before")
    assert backward == order


@pytest.mark.parametrize(
    "returns",
    [
        lambda x, _: x,
        lambda x, _: x[:1],
        lambda x, w: x.mul_(2.0) * w,
        lambda x, w: x.mul_(w),
        lambda x, w: x[:1].mul_(w),
        lambda x, w: (x[:1].mul_(w), x)[1],
    ],
    ids=["it", "a view", "changed", "it, changed", "a view, changed", "it, with a changed view"],
)
def test_units_that_change_or_return_their_input(backward: list[str], returns: Any) -> None:
    _chain("none", backward, returns)
    assert backward == ["second", "leaves second", "first"]


def test_the_newest_of_several_inputs_ends_the_unit(backward: list[str]) -> None:
    """A decoder's block, called with the encoder's output each time."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = fully_shard(Sees())
            self.blocks = nn.ModuleList(fully_shard(Both()) for _ in range(2))

        def forward(self, x: Tensor) -> Any:
            memory = self.encoder(x)
            x = memory.sin()
            for block in self.blocks:
                x = block(x, memory=memory)
            return x

    class Both(Sees):
        def forward(self, x: Tensor, memory: Tensor) -> Any:
            self.seen = memory
            return (x + memory) * self.weight

    model: Any = fully_shard(Decoder())
    model(torch.ones(2, 4)).sum().backward()
    assert model.blocks[0].seen is model.blocks[1].seen, "nothing stands in front of it"
    names = [f"blocks.{i}" for i in (1, 0)]
    ends = [entry for name in names for entry in (name, f"leaves {name}")]
    assert backward == ["", *ends, "encoder"]


def test_units_in_a_unit_that_are_called_with_its_input(backward: list[str]) -> None:
    """What comes later in forward is first in backward: of hooks on one tensor, too."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fully_shard(Sees())
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    model: Any = fully_shard(nn.Sequential(fully_shard(Sees()), fully_shard(Around())))
    model(torch.ones(2, 4)).sum().backward()
    around, inner = "1", "1.inner"
    assert backward == ["", around, inner, f"leaves {inner}", f"leaves {around}", "0"]


# ---- who ends a unit, and who is counted as running it


def test_a_graph_of_before_a_unit_was_added_is_left_by_the_new_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors hold what autograd calls with their gradient; it follows the unit's scheduler."""
    left: list[Scheduler] = []
    leave = Scheduler.exit_backward

    def leaves(self: Scheduler, unit: Unit, _: object = None) -> None:
        left.append(self)
        leave(self, unit)

    monkeypatch.setattr(Scheduler, "exit_backward", leaves)
    model = _two_layers()
    loss = model(torch.ones(2, 4, requires_grad=True)).sum()
    before = _scheduler(model)
    model.set_is_last_backward(False)
    model.append(fully_shard(nn.Linear(4, 4)))
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert _scheduler(model) is not before
    assert not _scheduler(model).is_last_backward, "flags outlive a unit that is added"
    model.set_is_last_backward(True)
    loss.backward()
    assert left
    assert {*left} == {_scheduler(model)}
    assert _has_gradients(model[:2])
    assert not any(_unit(layer).is_gathered for layer in (*model, model))


def test_a_users_function_of_any_name_is_no_call_of_the_unit() -> None:
    """Calls of methods are told from others by their code."""

    class Fails(nn.Linear):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise KeyError("once")
            return super().forward(x)

        def also(self, x: Tensor) -> Tensor:
            return self(x)

    model: Any = fully_shard(Fails(4, 4))
    fsdp2.register_fsdp_forward_method(model, "also")

    def run_between_hooks(record: Any) -> Tensor:
        with pytest.raises(KeyError):
            model(torch.ones(2, 4))
        model.fails = False
        return model(torch.ones(2, 4))  # type: ignore[no-any-return]  # a module's output

    run_between_hooks(record_of(model))
    assert _scheduler(model).resets == 1
    assert model.also.__func__.__code__.co_name == run_between_hooks.__name__
    assert model.also(torch.ones(2, 4)).shape == (2, 4)
    assert _scheduler(model).resets == 1
