"""What people train with: loss scaling, autocast, dropout, random initialization."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.common import gradients, models, parity
from tests.common.workers import ranks

# -- loss scaling ---------------------------------------------------------------------------------


def _scaled_steps(model: nn.Module, parts: list[list[Any]], overflow_at: int, who: int) -> Any:
    """Trains with a GradScaler; in one step one rank's loss is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    results = []
    for step, of_ranks in enumerate(parts):
        for rank, batch in of_ranks:
            loss = parity.regression_loss(model, batch)
            if step == overflow_at and rank == who:
                loss = loss * torch.inf
            scaler.scale(loss / len(of_ranks)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        results.append([scaler.get_scale(), parity.full_params(model)])
    return results


@ranks(2, extended=(4,))
@pytest.mark.parametrize("who", [0, 1])
def test_grad_scaler(who: int) -> None:
    """A gradient that overflows on one rank skips the step, and halves the scale, on all."""
    batches = parity.regression_batches(models.DIM, 4, steps=5)
    rank, size = dist.get_rank(), dist.get_world_size()

    def run(api: Any) -> Any:
        model = parity.shard(api, gradients.mlp(), reshard_after_forward=True)
        return _scaled_steps(model, [[(rank, parity.my_part(b))] for b in batches], 2, who)

    ours = parity.same_as_torch(run)
    assert [scale for scale, _ in ours] == [16.0, 32.0, 16.0, 16.0, 32.0]
    parity.assert_equal(ours[2][1], ours[1][1], "the step that is skipped")
    parts = [[(r, parity.my_part(b, r)) for r in range(size)] for b in batches]
    plain = _scaled_steps(gradients.mlp(), parts, 2, who)
    parity.assert_close(ours, plain, parity.FP32, "unsharded")


# -- autocast -------------------------------------------------------------------------------------


def _autocast_loss(model: nn.Module, part: Any, loss: Any = parity.regression_loss) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, part)


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_autocast(reshard_after_forward: bool | None) -> None:
    """Layers compute in bf16, parameters and gradients are fp32; casts that autocast keeps for a
    context are not used in the next one."""

    def run(api: Any) -> Any:
        model = parity.shard(api, gradients.mlp(), reshard_after_forward=reshard_after_forward)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            dtype = model(gradients.part(0)[0]).dtype
        assert dtype == torch.bfloat16
        for unit in (*models.units(model), model):
            unit.reshard()  # the optimizer is to hold shards
        return parity.train_sharded(model, parity.adamw, _autocast_loss, gradients.mlp_batches())

    ours = parity.same_as_torch(run)
    plain = parity.train_unsharded(
        gradients.mlp(), parity.adamw, _autocast_loss, gradients.mlp_batches(), slices=True
    )
    parity.assert_equal(ours, plain, "unsharded")
    assert {grad.dtype for step in ours for grad in step.grads.values()} == {torch.float32}


@ranks(2)
def test_autocast_around_microbatches() -> None:
    """One context around two forwards and backwards: the second finds cached casts.

    torch's FSDP2 loses gradients there (2.13); the unsharded model is the judge.
    """

    def compute(model: nn.Module, parts: list[Any]) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            for of_rank in parts:
                parity.regression_loss(model, of_rank).backward()
        return parity.full_grads(model)

    model = parity.shard(parity.OURS, gradients.mlp(), reshard_after_forward=True)
    model.set_requires_gradient_sync(False)
    with torch.autocast("cpu", torch.bfloat16):
        parity.regression_loss(model, gradients.part(0)).backward()
        model.set_requires_gradient_sync(True)
        parity.regression_loss(model, gradients.part(1)).backward()
    ours = parity.full_grads(model)
    total = None
    for rank in range(2):
        grads = compute(gradients.mlp(), [gradients.part(0, rank), gradients.part(1, rank)])
        total = grads if total is None else {n: total[n] + g for n, g in grads.items()}
    assert total is not None
    parity.assert_equal(ours, {name: grad / 2 for name, grad in total.items()}, "unsharded")


# -- random numbers -------------------------------------------------------------------------------


class _Dropping(nn.Module):
    """Dropout in every unit and in the root; `recompute` checkpoints the units."""

    def __init__(self, recompute: bool, preserve: bool = True) -> None:
        super().__init__()
        self.recompute, self.preserve = recompute, preserve
        make = partial(nn.Sequential, nn.Dropout(0.5))
        self.layers = nn.ModuleList(
            make(nn.Linear(models.DIM, models.DIM), nn.Dropout(0.2)) for _ in range(3)
        )
        for layer in self.layers:
            layer.is_unit = True
        self.first = nn.Linear(models.DIM, models.DIM)
        self.head = nn.Linear(models.DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(self.first(x), 0.1, self.training)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=self.preserve)
            else:
                x = layer(x)
        return self.head(x)


@ranks(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_dropout(recompute: bool) -> None:
    """The same masks as without sharding, from each rank's own generator, recomputed or not."""

    def run(api: Any) -> Any:
        model = parity.shard(
            api, models.seeded(partial(_Dropping, recompute)), reshard_after_forward=True
        )
        torch.manual_seed(100 + dist.get_rank())
        return [
            parity.train_sharded(
                model, parity.adamw, parity.regression_loss, gradients.mlp_batches()
            ),
            torch.rand(1),
        ]

    ours, after = parity.same_as_torch(run)
    states: dict[int, Tensor] = {}
    for rank in range(2):
        torch.manual_seed(100 + rank)
        states[rank] = torch.get_rng_state()
    turn = iter(range(100))

    def loss(model: nn.Module, part: Any) -> Tensor:
        rank = next(turn) % 2  # train_unsharded runs the ranks' slices in turn
        torch.set_rng_state(states[rank])
        value = parity.regression_loss(model, part)
        states[rank] = torch.get_rng_state()
        return value

    model = models.seeded(partial(_Dropping, False))
    plain = parity.train_unsharded(model, parity.adamw, loss, gradients.mlp_batches(), slices=True)
    parity.assert_equal(ours, plain, "unsharded")
    torch.set_rng_state(states[dist.get_rank()])
    parity.assert_equal(after, torch.rand(1), "the generator's state afterwards")


@ranks(2, extended=(4,))
def test_random_initialisation_of_dtensors() -> None:
    """From one seed the same values as torch's FSDP2; no collective that could go wrong."""

    def run(api: Any) -> Any:
        model = parity.shard(api, models.seeded(models.OddMLP))
        torch.manual_seed(3)
        with torch.no_grad():
            for param in model.parameters():
                nn.init.normal_(param) if param.ndim > 1 else nn.init.uniform_(param)
        return parity.full_params(model)

    first, second = parity.same_as_torch(run), run(parity.OURS)
    parity.assert_equal(first, second, "the same seed again")
