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


Way = tuple[bool, bool, str]
"""Whether the optimizer is flat, whether parameters are whole, and what is loaded."""


def _saves(folder: Path) -> dict[bool, dict[str, Tensor]]:
    """By plain and by flat optimizers."""
    saved = {}
    for flat in (False, True):
        model, optimizer = made(flat=flat)
        train(model, optimizer, 1)
        place = folder / str(flat)
        checkpoint.save(place / "steps", model, optimizer, step=2)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=place / "dcp")
        checkpoint.export(place / "exported", model)
        saved[flat] = everything(model, optimizer)
    return saved


def _loads(folder: Path, ways: list[Way]) -> list[dict[str, Tensor]]:
    found = []
    for flat, whole, by in ways:
        model, optimizer = made(5, whole, flat)
        train(model, optimizer, 3)
        place = folder / str(flat)
        if by == "ours":
            checkpoint.load(place / "steps", model, optimizer)
        elif by == "dcp":
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(state, checkpoint_id=place / "dcp")
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        else:
            checkpoint.load_pretrained(model, place / "exported")
        found.append(everything(model, optimizer))
    return found


def test_files(tmp_path: Path) -> None:
    """Saved by two ranks that have them whole; loaded by others, whole, sharded or unsharded."""
    saved = workers.run_on_ranks(2, _saves, tmp_path)[0]
    of_two = ((True, "ours"), (False, "ours"), (True, "dcp"), (True, "exported"))
    for size, loaded in ((2, of_two), (4, of_two[:1]), (1, of_two[:1])):
        ways = [(flat, whole, by) for flat in (False, True) for whole, by in loaded]
        for results in workers.run_on_ranks(size, _loads, tmp_path, ways):
            for way, found in zip(ways, results, strict=True):
                flat, _, by = way
                names = [n for n in sorted(saved[flat]) if by != "exported" or ":" not in n]
                expected = {name: saved[flat][name] for name in names}
                parity.assert_equal({n: found[n] for n in names}, expected, f"{size} ranks, {way}")
    (alone,) = _loads(tmp_path, [(False, False, "ours")])
    parity.assert_equal(alone, saved[False], "one process")


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
