"""Parameters that stay whole: in files, flat optimizers, derivatives and steps that raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdp2
from fsdp2 import checkpoint
from tests.checkpoint.shared import everything, train
from tests.common import models, parity, workers
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks

SMALL = 2 * models.DIM


def made(seed: int = 0, whole: bool = True, flat: bool = False, **options: Any) -> tuple[Any, Any]:
    """Sharded where there are ranks."""
    model: nn.Module = models.seeded(models.Nested, seed)
    if dist.is_initialized():
        placed = fsdp2.whole_below(SMALL) if whole else None
        parity.shard(parity.OURS, model, shard_placement_fn=placed)
    if flat:
        return model, fsdp2.optim.FlatOptimizer(model, torch.optim.AdamW, lr=0.1, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)


def _saves(folder: Path, flat: bool) -> dict[str, Tensor]:
    model, optimizer = made(flat=flat)
    train(model, optimizer, 1)
    checkpoint.save(folder / "steps", model, optimizer, step=2)
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder / "dcp")
    checkpoint.export(folder / "exported", model)
    return everything(model, optimizer)


def _loads(folder: Path, whole: bool, flat: bool, by: str) -> dict[str, Tensor]:
    model, optimizer = made(5, whole, flat)
    train(model, optimizer, 3)
    if by == "ours":
        checkpoint.load(folder / "steps", model, optimizer)
    elif by == "dcp":
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder / "dcp")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    else:
        checkpoint.load_pretrained(model, folder / "exported")
    return everything(model, optimizer)


@pytest.mark.parametrize("flat", [False, True])
def test_files(tmp_path: Path, flat: bool) -> None:
    """Saved by two ranks that have them whole; loaded by others, whole, sharded or unsharded."""
    saved = workers.run_on_ranks(2, _saves, tmp_path, flat)[0]
    weights = [name for name in saved if ":" not in name]
    for size, whole, by in (
        *((2, True, "ours"), (2, False, "ours"), (2, True, "dcp"), (2, True, "exported")),
        *((4, True, "ours"), (1, True, "ours")),
    ):
        for found in workers.run_on_ranks(size, _loads, tmp_path, whole, flat, by):
            names = weights if by == "exported" else sorted(saved)
            parity.assert_equal({n: found[n] for n in names}, {n: saved[n] for n in names}, by)
    found = _loads(tmp_path, False, False, "ours")
    parity.assert_equal(found, saved, "one process")


@ranks(2)
def test_flat_optimizer() -> None:
    """Also stepped in backward: whole parameters at its end."""
    seen = []
    for options in ({}, {"flat": True}, {"flat": True, "step_in_backward": True}):
        model, optimizer = made(**options)
        train(model, optimizer, 1)
        seen.append(everything(model, optimizer))
    plain, flat, early = seen
    parity.assert_close(flat, plain, parity.REORDERED_FP32, "plain optimizer")
    parity.assert_equal(early, flat, "in backward")


def _penalised(whole: bool) -> Any:
    """The norm of the input's gradient is a part of the loss."""
    model, optimizer = made(whole=whole)
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(7)
    found = []
    for _ in range(2):
        x = torch.randn(2, 4, models.DIM, generator=generator)[rank].requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (y.sum() + slope.square().sum()).backward()
        found.append(parity.full_grads(model))
        optimizer.step()
        optimizer.zero_grad()
    return found


@ranks(2)
def test_derivatives_of_derivatives() -> None:
    parity.assert_equal(_penalised(True), _penalised(False), "sharded")


class BrokenError(Exception):
    """Raised in a backward."""


@ranks(2)
def test_a_backward_that_raises() -> None:
    """Nothing of its gradients is left, and the next iteration is as without it."""

    def scenario(breaks: bool) -> dict[str, Tensor | None]:
        model, _ = made()
        x = torch.ones(4, models.DIM)
        if breaks:
            first = next(iter(models.units(model)))

            def hook(*_: Any) -> None:
                raise BrokenError

            handle = first.register_full_backward_hook(hook)
            with pytest.raises(BrokenError):
                model(x.clone().requires_grad_()).sum().backward()
            handle.remove()
        model(x).square().sum().backward()
        return parity.full_grads(model)

    parity.assert_equal(scenario(True), scenario(False), "without it")


@ranks(2)
def test_checks_of_ranks() -> None:
    """What `fsdp2.debug` compares agrees; weights that differ on ranks are noticed."""
    with fsdp2.debug(check_ranks=True, check_nan=True, check_writes=True):
        model, optimizer = made()
        train(model, optimizer, 1)
        torch.manual_seed(dist.get_rank())
        other = models.seeded(models.Nested)
        with torch.no_grad():
            next(p for p in other.parameters() if p.numel() < SMALL).normal_()
        with pytest.raises(fsdp2.errors.RankMismatchError):
            parity.shard(parity.OURS, other, shard_placement_fn=fsdp2.whole_below(SMALL))
