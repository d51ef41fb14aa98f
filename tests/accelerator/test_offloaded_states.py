"""`FlatOptimizer(offload=True)` on the stand-in: the same bits, states on the host, no race."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.core.device.streams import DeviceStreams
from fsdp2.core.layout.mesh import local_of
from fsdp2.optim.offloaded import HostSection, Staging
from fsdp2.testing.stand_in import device, group
from tests.accelerator import test_lanes as lanes
from tests.common import parity, workers

STEPS = 3


def _optimizer(model: nn.Module, **options: Any) -> fsdp2.optim.FlatOptimizer:
    return fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, lr=1e-2, foreach=False, **options)


def _seen(model: nn.Module, optimizer: fsdp2.optim.FlatOptimizer) -> list[torch.Tensor]:
    """Parameters and states, on the host."""
    states = [state[key] for state in optimizer.state.values() for key in sorted(state)]
    found = [*model.parameters(), *states]
    return [local_of(tensor).detach().cpu().clone() for tensor in found]


def _step(model: nn.Module, optimizer: Any, mesh: Any, step: int, clips: bool = True) -> None:
    model(lanes._batch(step, mesh)).float().square().mean().backward()
    if clips:
        fsdp2.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


MODES: dict[str, dict[str, Any]] = {
    "whole": {"offload": True},
    "steps": {"offload": True, "step_in_backward": True},
}


@pytest.mark.parametrize("case", ["usual", "mixed", "pinned", "kept gradients", "whole"])
@pytest.mark.parametrize("mode", MODES)
@workers.ranks(2)
def test_the_same_bits_and_no_race(case: str, mode: str) -> None:
    """Clipped, but where units are stepped; ``pinned`` has its shards on the CPU already."""
    _check(mode, case, (2,))


@pytest.mark.parametrize("mode", MODES)
@workers.ranks(1)
def test_on_one_rank(mode: str) -> None:
    """Hooks run on COMPUTE, and gradients are autograd's own."""
    _check(mode, "mixed", (1,))


@pytest.mark.parametrize("mode", MODES)
@workers.ranks(4)
def test_replicas(mode: str) -> None:
    """Hooks run behind all-reduces, on their lane."""
    _check(mode, "usual", (2, 2))


def _check(mode: str, case: str, shape: tuple[int, ...]) -> None:
    early = mode == "steps"
    mesh = lanes._mesh(device.NAME, group.COALESCING, shape)
    seen = []
    for options in ({}, MODES[mode]):
        model = lanes._build(mesh, case)
        optimizer = _optimizer(model, **options)
        device.races()
        seen.append([])
        for step in range(STEPS):
            _step(model, optimizer, mesh, step, clips=not early)
            seen[-1].append(_seen(model, optimizer))
        lanes._assert_ordered()
        if options:
            kept = [
                local_of(value) for state in optimizer.state.values() for value in state.values()
            ]
            assert {tensor.device.type for tensor in kept} == {"cpu"}
    parity.assert_equal(seen[1], seen[0])


@workers.ranks(2)
def test_units_leave_while_others_are_stepped() -> None:
    """In the order of backward, each before the last is stepped; memory for three serves all."""
    mesh = lanes._mesh(device.NAME, group.COALESCING, (2,))
    model = lanes._build(mesh, "usual")
    optimizer = _optimizer(model, offload=True)
    _step(model, optimizer, mesh, 0)
    order: list[tuple[str, int]] = []
    taken: list[object] = []
    sections = [each for each in optimizer._sections if isinstance(each, HostSection)]

    def noting(name: str) -> Callable[..., None]:
        original = getattr(HostSection, name)

        def noted(section: HostSection, *args: Any) -> None:
            order.append((name, sections.index(section)))
            original(section, *args)

        return noted

    def take(staging: Staging, nbytes: int, original: Any = Staging.take) -> object:
        taken.append(original(staging, nbytes))
        return taken[-1]

    patched = [mock.patch.object(HostSection, name, noting(name)) for name in ("leave", "step")]
    with patched[0], patched[1], mock.patch.object(Staging, "take", take):
        _step(model, optimizer, mesh, 1)
    count = len(sections)
    expected = [("leave", count - 1)]
    for number in reversed(range(count)):
        expected += [("leave", number - 1)] if number else []
        expected += [("step", number)]
    assert order == expected
    assert count == 5
    assert len(set(map(id, taken))) == 3


@pytest.mark.parametrize("back", [False, True])
@workers.ranks(2)
def test_state_goes_to_an_optimizer_on_the_device_and_back(back: bool) -> None:
    mesh = lanes._mesh(device.NAME, group.COALESCING, (2,))
    options: list[dict[str, Any]] = [{}, {"offload": True}]
    if back:
        options.reverse()
    whole = lanes._build(mesh, "usual")
    expected = _optimizer(whole)
    for step in range(STEPS):
        _step(whole, expected, mesh, step)
    model = lanes._build(mesh, "usual")
    optimizer = _optimizer(model, **options[0])
    for step in range(STEPS):
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = _optimizer(model, **options[1])
            optimizer.load_state_dict(saved)
        _step(model, optimizer, mesh, step)
    parity.assert_equal(_seen(model, optimizer), _seen(whole, expected))


@pytest.mark.parametrize(
    ("mode", "label"),
    [
        ("whole", "copies out after compute"),
        ("whole", "compute after copies back"),
        ("steps", "copies out after compute"),
        ("steps", "compute after copies back"),
        ("steps", "host after copies out"),
    ],
)
@workers.ranks(2)
def test_a_wait_that_is_missing_is_noticed(mode: str, label: str) -> None:
    mesh = lanes._mesh(device.NAME, group.COALESCING, (2,))
    model = lanes._build(mesh, "usual")
    optimizer = _optimizer(model, **MODES[mode])

    def unless(name: str) -> Callable[..., None]:
        original = getattr(DeviceStreams, name)

        def call(streams: DeviceStreams, *args: Any) -> None:
            if args[-1] != label:
                original(streams, *args)

        return call

    device.races()
    with ExitStack() as patched:
        for name in ("wait", "synchronize"):
            patched.enter_context(mock.patch.object(DeviceStreams, name, unless(name)))
        for step in range(2):
            _step(model, optimizer, mesh, step, clips=False)
    assert device.races()
    _step(model, optimizer, mesh, 2, clips=False)
    lanes._assert_ordered()
