"""State of `Muon`: torch's own in state dicts, whichever ranks had it before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import fsdp2
from tests.common import meshes, models, parity
from tests.common.workers import ranks
from tests.optim import test_muon

ASIDE = ["embed.weight"]


def build() -> Any:
    return models.seeded(test_muon.Weights)


def ours(mesh: Any = None) -> tuple[Any, fsdp2.optim.Muon]:
    model = test_muon.sharded(build(), mesh)
    return model, fsdp2.optim.Muon(model, elementwise=ASIDE, elementwise_options=test_muon.HEAD)


def steps(model: nn.Module, optimizers: list[Any], numbers: range) -> dict[str, Any]:
    """Take them, and return all parameters."""
    for number in numbers:
        test_muon.give(model, test_muon.gradients(model, number))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return parity.full_params(model)


def unbroken() -> dict[str, Any]:
    model, optimizer = ours()
    return steps(model, [optimizer], range(4))


@ranks(2)
def test_state_is_torchs() -> None:
    """Momentum is a DTensor, sharded as its parameter, and groups have torch's options alone."""
    model, optimizer = ours()
    steps(model, [optimizer], range(1))
    whole = build()
    theirs = test_muon.torchs(whole, ASIDE)
    steps(whole, theirs, range(1))
    param = model.units[0][0]
    momentum = optimizer.state[param]["momentum_buffer"]
    assert isinstance(momentum, DTensor)
    assert momentum.placements == param.placements
    found = [group.keys() for group in optimizer.param_groups]
    assert found == [each.param_groups[0].keys() for each in theirs]
    expected = dict(whole.named_parameters())
    for name, each in model.named_parameters():
        own = next(opt.state[expected[name]] for opt in theirs if expected[name] in opt.state)
        assert optimizer.state[each].keys() == own.keys(), name
        for key, value in own.items():
            parity.assert_equal(parity.full(optimizer.state[each][key]), value, f"{name} {key}")


@ranks(2)
def test_exchange_with_torchs() -> None:
    """Both ways, as whole tensors: either goes on where the other was."""
    expected = unbroken()
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = ours()
    steps(model, [optimizer], range(2))
    kept = get_optimizer_state_dict(model, optimizer, options=options)
    params = parity.full_params(model)

    whole = build()
    whole.load_state_dict(params)
    theirs = test_muon.torchs(whole, ASIDE)
    set_optimizer_state_dict(whole, theirs, kept, options=options)
    again = copy.deepcopy(get_optimizer_state_dict(whole, theirs, options=options))
    parity.assert_equal(steps(whole, theirs, range(2, 4)), expected)

    for name, param in model.named_parameters():
        box = test_muon.spread_of(name, param._spec, param._local_tensor.shape).own
        with torch.no_grad():
            param._local_tensor.copy_(box.of(params[name]))
    fresh = fsdp2.optim.Muon(model, elementwise=ASIDE, elementwise_options=test_muon.HEAD)
    set_optimizer_state_dict(model, fresh, again, options=options)
    parity.assert_equal(steps(model, [fresh], range(2, 4)), expected)


@ranks(4)
@pytest.mark.parametrize("by", ["dcp", "fsdp2"])
def test_other_meshes(by: str, tmp_path: Path) -> None:
    """Four shards are loaded as two of each of two copies, and go on."""
    expected = unbroken()
    model, optimizer = ours()
    steps(model, [optimizer], range(2))
    other, fresh = ours(meshes.hsdp_mesh(2, 2))
    carry(by, tmp_path, (model, optimizer), (other, fresh))
    parity.assert_equal(steps(other, [fresh], range(2, 4)), expected)


def carry(by: str, folder: Path, saved: Any, loaded: Any) -> None:
    """Save a model and an optimizer, and load them into others."""
    if by == "fsdp2":
        fsdp2.checkpoint.save(folder, *saved, step=1)
        fsdp2.checkpoint.load(folder, *loaded)
        return
    dcp.save(
        dict(zip(("model", "optim"), get_state_dict(*saved), strict=True)), checkpoint_id=folder
    )
    state = dict(zip(("model", "optim"), get_state_dict(*loaded), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(*loaded, model_state_dict=state["model"], optim_state_dict=state["optim"])
