"""State dicts taken and loaded in the middle of training.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

import fsdp2
from tests.common import models, parity, running
from tests.common.workers import ranks


class Asks(nn.Module):
    """Calls ``ask`` in its forward, or in its backward, of ``rows``' gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.ask: Callable[[], None] = lambda: None
        self.in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_backward:
            self.ask()
        elif x.requires_grad:

            def arrived(_: Tensor) -> None:
                self.ask()

            x.register_hook(arrived)
        return x


class Asking(nn.Module):
    """Two units, of which the second asks while it computes; the root owns the head."""

    def __init__(self, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(models.DIM, models.DIM)
        self.second = nn.Sequential(
            nn.Linear(models.DIM, models.DIM), Asks(), nn.Linear(models.DIM, models.DIM)
        )
        self.head = nn.Linear(models.DIM, 4)
        if tied:
            self.second[2].weight = self.first.weight
        if frozen:
            self.second[0].requires_grad_(False)
        self.first.is_unit = self.second.is_unit = True

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


CASES: dict[str, tuple[dict[str, bool], dict[str, Any]]] = {
    "plain": ({}, {}),
    "kept": ({}, {"reshard_after_forward": False}),
    "mixed": ({}, {"mixed": True}),
    "frozen": ({"frozen": True}, {}),
    "tied": ({"tied": True}, {}),
    "offloaded": ({}, {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=False)}),
}


def _in_a_thread(call: Callable[[], None]) -> None:
    """While this one waits, in the middle of what it does."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert raised == []


def _check_taking(case: str, by_thread: bool, in_backward: bool, **more: Any) -> None:
    """State dicts that are taken in the middle have the shards, and change no bit of training."""
    kinds, arguments = CASES[case]
    ends = []
    for takes in (False, True):
        model: Any = parity.shard(
            parity.OURS, models.seeded(lambda: Asking(**kinds)), **arguments, **more
        )
        expected = dict(model.named_parameters(remove_duplicate=False))
        taken: list[dict[str, Tensor]] = []

        def take(model: Any = model, taken: Any = taken) -> None:
            registered = [id(p) for m in model.modules() for p in m._parameters.values()]
            taken.append(model.state_dict())
            taken.append(model.state_dict(keep_vars=True))
            assert registered == [id(p) for m in model.modules() for p in m._parameters.values()]

        asks = model.second[1]
        asks.in_backward = in_backward
        if takes:
            asks.ask = (lambda: _in_a_thread(take)) if by_thread else take
        ends.append(
            parity.train_sharded(model, parity.adamw, parity.regression_loss, running.mlp_batches())
        )
        assert len(taken) == (2 * len(ends[0]) if takes else 0)
        for state, kept in zip(taken[::2], taken[1::2], strict=True):
            assert list(state) == list(kept) == list(expected)
            for name, param in expected.items():
                assert kept[name] is param
                value: Any = state[name]
                assert isinstance(value, DTensor)
                assert not value.requires_grad
                assert value._spec == param._spec
                assert value._local_tensor.data_ptr() == param._local_tensor.data_ptr()
    parity.assert_equal(ends[1], ends[0], "with state dicts taken")


@pytest.mark.parametrize(
    ("case", "by_thread", "in_backward"),
    [
        *(("plain", by_thread, late) for by_thread in (False, True) for late in (False, True)),
        ("kept", True, False),
        ("mixed", False, True),
        ("frozen", True, False),
        ("tied", True, False),
        ("tied", False, True),
        ("offloaded", True, False),
    ],
)
@ranks(2)
def test_a_state_dict_in_the_middle(case: str, by_thread: bool, in_backward: bool) -> None:
    _check_taking(case, by_thread, in_backward)


@ranks(4)
def test_a_state_dict_in_the_middle_with_smaller_groups() -> None:
    """One unit waits for its backward over the smaller group's rows, which stay."""
    _check_taking("plain", True, False, reshard_after_forward=2)


class Renames(nn.Linear):
    """Writes its own state dict: a whole copy, under another name besides."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "bias"] = torch.zeros(3)


@ranks(2)
def test_what_modules_write_themselves_stays() -> None:
    """In the middle of a forward, too; and hooks that rename see the shards."""
    model: Any = Asking()
    model.second[2] = Renames(models.DIM, models.DIM)

    def rename(_: Any, state: Any, prefix: str, __: object) -> None:
        state[prefix + "renamed"] = state.pop(prefix + "weight")

    model.second[0].register_state_dict_post_hook(rename)
    model = parity.shard(parity.OURS, model)
    taken: list[dict[str, Tensor]] = []
    model.second[1].ask = lambda: taken.append(model.state_dict())
    parity.regression_loss(model, parity.my_part(running.one_batch())).backward()
    taken.append(model.state_dict())
    for state in taken:
        assert torch.equal(state["second.2.bias"], torch.zeros(3))
        assert all(isinstance(state[name], DTensor) for name in state if name != "second.2.bias")
        assert "second.0.renamed" in state
        assert isinstance(state["second.2.weight"], DTensor)


@ranks(2)
@pytest.mark.parametrize("trained", [False, True])
def test_state_dicts_in_inference_mode(trained: bool, tmp_path: Path) -> None:
    """They hold what they hold elsewhere, and are no inference tensors: training goes on."""
    model = parity.shard(parity.OURS, running.mlp())
    optimizer = parity.adamw(model.parameters())
    if trained:
        parity.regression_loss(model, parity.my_part(running.one_batch())).backward()
        optimizer.step()
    expected = {name: parity.full(value) for name, value in model.state_dict().items()}
    with torch.inference_mode():
        parity.regression_loss(model, parity.my_part(running.one_batch()))
        for take in (lambda: model.state_dict(), lambda: get_model_state_dict(model)):
            state = take()
            assert torch.is_inference_mode_enabled()
            assert all(isinstance(value, DTensor) for value in state.values())
            assert not any(value.to_local().is_inference() for value in state.values())
        fsdp2.checkpoint.save(tmp_path, model, optimizer, step=1)
        assert not fsdp2.checkpoint.load(tmp_path, model, optimizer).left
        assert torch.is_inference_mode_enabled()
    parity.assert_equal({name: parity.full(value) for name, value in state.items()}, expected)
    parity.regression_loss(model, parity.my_part(running.one_batch())).backward()
    optimizer.step()
