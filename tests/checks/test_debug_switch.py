"""`fsdp2.debug`: its switches, its environment variable, and that it costs nothing when off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fsdp2
from fsdp2.checks.environment import ENVIRONMENT, asks_for_ranks
from fsdp2.checks.groups import CHECKS, Checks, DebugSettings
from fsdp2.core.device.channels import StoreBoard
from fsdp2.core.modules.registry import records_below
from fsdp2.core.schedule.group import ParamGroup
from fsdp2.core.schedule.observers import PROFILER, Observed, Observer, observers_of
from fsdp2.core.schedule.unit import put_around
from fsdp2.testing.counting import called
from fsdp2.testing.null_group import init_null_group
from tests.common.errors import raises

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    init_null_group(2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nobody has asked for the settings yet."""
    before = Checks.current()
    Checks.settings = None
    asks_for_ranks.cache_clear()
    yield monkeypatch
    asks_for_ranks.cache_clear()
    Checks.switch(before)


def _model() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fsdp2.fully_shard(layer)
    return fsdp2.fully_shard(model)


def _kinds(model: nn.Module) -> set[type]:
    return {type(group) for record in records_below(model) for group in record.unit.groups}


def _step(model: nn.Module, scale: float = 1.0) -> None:
    (model(torch.ones(2, 8)).sum() * scale).backward()
    model.zero_grad()


def test_off_it_costs_no_call() -> None:
    model = _model()
    for _ in range(2):  # the order is known, buffers are made
        _step(model)
    never = called(lambda: _step(model))
    with fsdp2.debug(check_ranks=True, check_nan=True):
        assert _kinds(model) == {Observed}
    assert _kinds(model) == {ParamGroup}
    assert called(lambda: _step(model)) == never
    assert any(name.startswith("fsdp2.core.schedule.group.") for name in never[0])
    assert not any(name.startswith(("fsdp2.checks.", "fsdp2.core.progress.")) for name in never[0])


def test_settings_are_returned_and_put_back() -> None:
    assert repr(fsdp2.debug()) == (
        "DebugSettings(check_ranks=False, check_nan=False, check_writes=False, timeout=None)"
    )
    with fsdp2.debug(check_nan=True) as inside:
        assert (inside.check_ranks, inside.check_nan, inside.timeout) == (False, True, None)
        with fsdp2.debug(check_nan=False, timeout=5):
            assert repr(fsdp2.debug()).endswith("check_writes=False, timeout=5)")
        assert fsdp2.debug().check_nan
        assert fsdp2.debug().timeout is None
    assert not fsdp2.debug().check_nan


def test_switched_while_a_profiler_runs() -> None:
    """Groups mark ranges then; what they check follows all the same, on and off."""
    model = _model()
    with profile(activities=[ProfilerActivity.CPU]):
        _step(model)
        with fsdp2.debug(check_nan=True), pytest.raises(fsdp2.errors.NonFiniteGradientError):
            _step(model, float("nan"))
        model.reset_iter_state()
        _step(model, float("nan"))
    _step(model)


def test_observers_have_one_order_whichever_came_first() -> None:
    model = _model()
    both = (PROFILER, CHECKS)
    units = [record.unit for record in records_below(model)]
    bare = [unit.groups for unit in units]

    def seen_by() -> list[tuple[Observer, ...]]:
        called = [tuple(observers_of(group)) for unit in units for group in unit.groups]
        assert all(found == called[0] for found in called)
        return called[:1]

    for first, second in (both, both[::-1]):
        put_around(units, first, True)
        assert seen_by() == [(first,)]
        put_around(units, second, True)
        put_around(units, second, True)
        assert seen_by() == [both]
        put_around(units, first, False)
        assert seen_by() == [(second,)]
        put_around(units, first, True)
        assert seen_by() == [both]
        for observer in both:
            put_around(units, observer, False)
        assert [unit.groups for unit in units] == bare


def test_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    layer = nn.Linear(8, 8)
    weight = layer.weight
    with fsdp2.debug(check_ranks=True):
        monkeypatch.setattr(StoreBoard, "write", fail)
        with raises("store-gone") as caught:
            fsdp2.fully_shard(layer)
    assert "before fully_shard of Linear, so" in str(caught.value)
    assert str(caught.value).endswith("Connection reset by peer [store-gone]")
    assert layer.weight is weight


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_time_out_must_be_positive(timeout: float) -> None:
    with raises("debug-timeout"):
        fsdp2.debug(timeout=timeout)


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_the_environment_switches_it_on(unread: pytest.MonkeyPatch, value: str, on: bool) -> None:
    unread.setenv(ENVIRONMENT, value)
    assert Checks.current() == DebugSettings(check_ranks=on)
    unread.setenv(ENVIRONMENT, "0")  # read once
    assert fsdp2.debug().check_ranks is on


def test_another_value_of_the_environment_is_refused(unread: pytest.MonkeyPatch) -> None:
    unread.setenv(ENVIRONMENT, "ranks")
    layer = nn.Linear(8, 8)
    for _ in range(2):
        with raises("debug-environment"):
            fsdp2.fully_shard(layer)
    assert type(layer) is nn.Linear
    unread.delenv(ENVIRONMENT)
    assert not fsdp2.debug().check_ranks
