"""States and weights into models and optimizers that are not those that were saved, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import checkpoint
from tests.checkpoint.shared import assert_same
from tests.common.errors import raises

pytestmark = pytest.mark.alone


class Net(nn.Module):
    """Two matrices, which may be one, and a layer between."""

    def __init__(self, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        if tied:
            self.last.weight = self.first.weight
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).tanh())


def made(
    seed: int = 0, kind: Any = torch.optim.AdamW, lr: float = 0.1, **options: Any
) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net(**options)
    return model, kind(model.parameters(), lr=lr)


def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    model(x.to(next(model.parameters()).dtype)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def states(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    """By parameter and key, of whichever optimizer has it."""
    return {
        f"{name}.{key}": value
        for optimizer in optimizers
        for name, param in model.named_parameters()
        for key, value in optimizer.state.get(param, {}).items()
    }


def left_of(folder: Path, *into: Any, **options: Any) -> checkpoint.Differences:
    """The differences: a strict load refuses them, and another one loads the rest."""
    with raises("ckpt-differs"):
        checkpoint.load(folder, *into, **options)
    return checkpoint.load(folder, *into, strict=False, **options).left


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Net, torch.optim.Optimizer]:
    model, optimizer = made()
    train(model, optimizer)
    checkpoint.save(tmp_path / "run", model, optimizer, step=1)
    return tmp_path / "run", model, optimizer


Saved = tuple[Path, Net, torch.optim.Optimizer]


# ---- groups


def _groups(model: Net, *names: str) -> list[dict[str, Any]]:
    params = dict(model.named_parameters())
    return [{"params": [params[each] for each in listed.split()]} for listed in names]


ALL = ("first.weight", "middle.weight middle.bias", "last.weight")


@pytest.mark.parametrize(
    "names", [ALL, ALL[::-1], (" ".join(ALL[::-1]),), ("last.weight", "middle.bias " + ALL[0])]
)
def test_groups_that_are_cut_or_in_another_order(saved: Saved, names: tuple[str, ...]) -> None:
    """Each parameter has its own state; what the optimizer has not is reported."""
    folder, model, optimizer = saved
    optimizer.param_groups[0]["lr"] = 0.3
    checkpoint.save(folder, model, optimizer, step=2)
    other, _ = made(seed=1)
    fresh = torch.optim.AdamW(_groups(other, *names), lr=0.1)
    whole = sum(len(each.split()) for each in names) == 4
    left = checkpoint.load(folder, other, fresh, strict=whole).left
    assert left.unexpected == ([] if whole else ["optimizer.state.middle.weight"])
    expected = states(model, optimizer)
    if not whole:
        expected = {n: v for n, v in expected.items() if not n.startswith("middle.weight")}
    assert_same(states(other, fresh), expected)
    assert [group["lr"] for group in fresh.param_groups] == [0.3] * len(names)


def test_options_of_merged_groups(tmp_path: Path) -> None:
    """Those that are alike are loaded; the others are reported, and stay."""
    model, _ = made()
    optimizer = torch.optim.AdamW(_groups(model, *ALL), lr=0.5)
    optimizer.param_groups[1]["weight_decay"] = 0.9
    train(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    other, merged = made(seed=1)
    left = left_of(tmp_path, other, merged)
    assert left == checkpoint.Differences(conflicting=["optimizer.param_groups.0.weight_decay"])
    assert merged.param_groups[0]["lr"] == 0.5
    assert merged.param_groups[0]["weight_decay"] == 0.01
    assert_same(states(other, merged), states(model, optimizer))


def test_options_of_a_cut_group_stay_apart(saved: Saved) -> None:
    """Who gives a part another option has it behind the load, too, and is told."""
    folder, model, optimizer = saved
    other, _ = made(seed=1)
    cut = torch.optim.AdamW(_groups(other, ALL[0], " ".join(ALL[1:])), lr=0.2)
    cut.param_groups[1]["weight_decay"] = 0.0
    left = left_of(folder, other, cut)
    assert left.conflicting == [f"optimizer.param_groups.{at}.weight_decay" for at in (0, 1)]
    assert [group["weight_decay"] for group in cut.param_groups] == [0.01, 0.0]
    assert [group["lr"] for group in cut.param_groups] == [0.1, 0.1]
    assert_same(states(other, cut), states(model, optimizer))


@pytest.mark.parametrize("frozen_first", [True, False])
def test_frozen_and_unfrozen(tmp_path: Path, frozen_first: bool) -> None:
    """The common part is loaded, and the rest is as it was."""
    model, whole = made()
    train(model, whole)
    part = torch.optim.AdamW(_groups(model, ALL[1]), lr=0.1)
    train(model, part)
    before = states(model, whole)
    source, target = (part, whole) if frozen_first else (whole, part)
    checkpoint.save(tmp_path, model, source, step=1)
    expected = {n: v for n, v in states(model, source).items() if n.startswith("middle")}
    left = left_of(tmp_path, model, target)
    names = ["optimizer.state.first.weight", "optimizer.state.last.weight"]
    assert (left.missing if frozen_first else left.unexpected) == names
    if frozen_first:
        expected |= {n: v for n, v in before.items() if not n.startswith("middle")}
    assert_same(states(model, target), expected)


def test_another_optimizer_gets_no_foreign_state(saved: Saved) -> None:
    """What AdamW keeps is nothing to SGD: reported, and left out; its own momentum stays."""
    folder, model, _ = saved
    for trained in (False, True):
        other, sgd = made(seed=1, kind=torch.optim.SGD)
        sgd.param_groups[0]["momentum"] = 0.9
        if trained:
            train(other, sgd)
        before = states(other, sgd)
        left = left_of(folder, other, sgd)
        assert "optimizer.state.first.weight.exp_avg" in left.unexpected
        assert "optimizer.param_groups.0.momentum" in left.missing
        assert_same(states(other, sgd), before)
        assert torch.equal(other.first.weight, model.first.weight)


def test_a_related_optimizer_takes_the_state(saved: Saved) -> None:
    folder, model, optimizer = saved
    other, adam = made(seed=1, kind=torch.optim.Adam)
    assert not checkpoint.load(folder, other, adam).left
    assert_same(states(other, adam), states(model, optimizer))


# ---- ties


def test_an_untied_step_into_a_tied_model(saved: Saved) -> None:
    """One of two values would be dropped: it is refused, or reported."""
    folder, model, optimizer = saved
    tied, fresh = made(seed=1, tied=True)
    before = tied.first.weight.detach().clone()
    with raises("ckpt-differs") as caught:
        checkpoint.load(folder, tied)
    assert "with several values for one ['model.last.weight']" in str(caught.value)
    assert torch.equal(tied.first.weight, before)
    left = checkpoint.load(folder, tied, fresh, strict=False).left
    assert left.conflicting == ["model.last.weight"]
    assert left.unexpected == ["optimizer.state.last.weight"]
    assert torch.equal(tied.first.weight, model.first.weight)
    expected = {n: v for n, v in states(model, optimizer).items() if not n.startswith("last")}
    assert_same(states(tied, fresh), expected)


def test_an_untied_step_of_equal_values_is_a_tied_one(tmp_path: Path) -> None:
    model, _ = made()
    model.last.weight.data.copy_(model.first.weight)
    checkpoint.save(tmp_path, model, step=1)
    tied, _ = made(seed=1, tied=True)
    assert not checkpoint.load(tmp_path, tied).left
    assert torch.equal(tied.first.weight, model.first.weight)


def test_a_tied_step_into_an_untied_model(tmp_path: Path) -> None:
    model, optimizer = made(tied=True)
    train(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    other, fresh = made(seed=1)
    left = left_of(tmp_path, other, fresh)
    assert left == checkpoint.Differences(missing=["optimizer.state.last.weight"])
    assert torch.equal(other.last.weight, model.first.weight)
    assert_same(states(other, fresh), states(model, optimizer))


def test_a_parameter_of_another_shape_keeps_having_no_state(saved: Saved) -> None:
    other, _ = made(seed=1)
    other.last = nn.Linear(4, 6, bias=False)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    left = checkpoint.load(saved[0], other, fresh, strict=False).left
    reshaped = ["model.last.weight", "optimizer.state.last.weight"]
    assert left == checkpoint.Differences(reshaped=reshaped)
    assert other.last.weight not in fresh.state
    assert fresh.state[other.first.weight]
    train(other, fresh)  # which makes it


def test_a_tied_step_whose_state_has_the_other_name(tmp_path: Path) -> None:
    model, optimizer = made(tied=True)
    train(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    other, _ = made(seed=1)
    other.first, other.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    del other.first
    other.first = nn.Linear(4, 4, bias=False)  # behind all others: "last.weight" is its first name
    other.first.weight = other.last.weight
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    assert not checkpoint.load(tmp_path, other, fresh).left
    assert torch.equal(
        fresh.state[other.last.weight]["exp_avg"], optimizer.state[model.first.weight]["exp_avg"]
    )


# ---- options of `save` and `load`


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("trained", [False, True])
def test_cast(saved: Saved, to: torch.dtype, trained: bool) -> None:
    """As ``.to()`` would; the states of the parameter's dtype, too; a count stays what it is."""
    folder, model, optimizer = saved
    other, fresh = made(seed=1, dtype=to)
    if trained:
        train(other, fresh)
    with raises("ckpt-differs"):
        checkpoint.load(folder, other, fresh)
    assert not checkpoint.load(folder, other, fresh, cast=True).left
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value.to(to))
    for name, value in states(model, optimizer).items():
        found = states(other, fresh)[name]
        assert torch.equal(found, value if name.endswith("step") else value.to(to)), name
    back, plain = made(seed=2)
    checkpoint.save(folder, other, fresh, step=2)
    assert not checkpoint.load(folder, back, plain, cast=True).left
    assert torch.equal(back.first.weight, other.first.weight.float())


def test_trainable_parameters_only(tmp_path: Path) -> None:
    """A step holds what was trained; frozen ones are as they were, and no difference."""
    model, _ = made()
    model.first.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=1, trainable=True)
    other, _ = made(seed=1)
    before = other.first.weight.detach().clone()
    with raises("ckpt-differs"):
        checkpoint.load(tmp_path, other)
    other.first.requires_grad_(False)
    fresh = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.1)
    assert not checkpoint.load(tmp_path, other, fresh).left
    assert torch.equal(other.first.weight, before)
    assert torch.equal(other.last.weight, model.last.weight)
    assert_same(states(other, fresh), states(model, optimizer))


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    actor, critic = made()[0], made(seed=1)[0]
    one = torch.optim.AdamW(_groups(actor, *ALL[:2]), lr=0.1)
    two = torch.optim.SGD([actor.last.weight, *critic.parameters()], lr=0.2, momentum=0.9)
    train(nn.Sequential(actor, critic), one, two)
    both = {"actor": actor, "critic": critic}
    checkpoint.save(tmp_path, both, [one, two], step=1)
    others = {"actor": made(seed=2)[0], "critic": made(seed=3)[0]}
    first = torch.optim.AdamW(_groups(others["actor"], *ALL[:2]), lr=0.3)
    rest = [others["actor"].last.weight, *others["critic"].parameters()]
    second = torch.optim.SGD(rest, lr=0.4, momentum=0.9)
    assert not checkpoint.load(tmp_path, others, [first, second]).left
    assert first.param_groups[0]["lr"] == 0.1
    assert second.param_groups[0]["lr"] == 0.2
    for name in both:
        assert_same(dict(others[name].state_dict()), dict(both[name].state_dict()))
        assert_same(states(others[name], first, second), states(both[name], one, two))
    checkpoint.async_save(tmp_path, both, [one, two], step=2).result()
    with raises("ckpt-differs"):
        checkpoint.load(tmp_path, {"actor": others["actor"]})
    checkpoint.load(tmp_path, others["actor"], names=lambda name: f"actor.{name}", strict=False)


def test_names(saved: Saved) -> None:
    """Of the model's parameters, and of the optimizer's."""
    folder, model, optimizer = saved
    wrapped = nn.ModuleDict({"net": made(seed=1)[0], "new": nn.Linear(2, 2)})
    fresh = torch.optim.AdamW(wrapped["net"].parameters(), lr=0.2)
    names = lambda name: name[4:] if name.startswith("net.") else None  # noqa: E731
    assert not checkpoint.load(folder, wrapped, fresh, names=names).left
    assert_same(dict(wrapped["net"].state_dict()), dict(model.state_dict()))
    assert_same(states(wrapped["net"], fresh), states(model, optimizer))


def test_states_beside_the_model(saved: Saved) -> None:
    """Averages of weights, in place."""
    folder, model, _ = saved
    ema = {name: value.detach() / 2 for name, value in model.named_parameters()}
    checkpoint.save(folder, model, step=2, states={"ema": ema})
    other = {name: torch.zeros_like(value) for name, value in ema.items()}
    kept = dict(other)
    assert not checkpoint.load(folder, model, states={"ema": other}).left
    assert all(other[name] is value for name, value in kept.items())
    assert_same(other, ema)
    del other["last.weight"]
    other["new"] = torch.zeros(1)
    left = left_of(folder, model, states={"ema": other})
    assert left == checkpoint.Differences(["states.ema.new"], ["states.ema.last.weight"])
    assert not checkpoint.load(folder, model).left


def test_wrong_arguments(tmp_path: Path) -> None:
    model, optimizer = made()
    for wrong in ([model], {"a.b": model}, {"a": 1}, None):
        with raises("ckpt-models"):
            checkpoint.save(tmp_path, wrong, step=1)
        with raises("ckpt-models"):
            checkpoint.load(tmp_path, wrong)
    for given in ("adam", [optimizer, model]):
        with raises("ckpt-optimizers"):
            checkpoint.save(tmp_path, model, given, step=1)
        with raises("ckpt-optimizers"):
            checkpoint.load(tmp_path, model, given)
    tensor = torch.ones(2)
    for states in (tensor, {"x": tensor}, {"x": {"y": 1}}, {1: {"y": tensor}}, "ema", [model]):
        with raises("ckpt-states"):
            checkpoint.save(tmp_path, model, step=1, states=states)
        with raises("ckpt-states"):
            checkpoint.load(tmp_path, model, states=states)
    with raises("ckpt-two-optimizers"):
        checkpoint.save(tmp_path, model, [optimizer, optimizer], step=1)
    with raises("ckpt-metric"):
        checkpoint.save(tmp_path, model, step=1, metric="best")
    with raises("ckpt-step"):
        checkpoint.load(tmp_path, model, step="1")
    assert checkpoint.steps(tmp_path) == []
