"""What is gathered ahead: the lists of users, and the order of the last forward.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import fully_shard
from fsdp2.core.modules.registry import require_record
from tests.common import models, parity, running
from tests.common.combinations import each_once
from tests.common.errors import raises
from tests.common.workers import ranks


@ranks(2)
@each_once(ahead=[1, 2], mixed={"fp32": False, "mixed": True})
def test_explicit_prefetch(ahead: int, mixed: bool) -> None:
    """Whatever is prefetched, the results and the number of collectives stay the same.

    Lists are lists, or slices of the model's own.
    """

    def run(api: Any, prefetch: bool) -> Any:
        model = parity.shard(api, models.seeded(partial(models.MLP, depth=4)), mixed=mixed)
        layers = list(model.layers)
        if prefetch:
            for i, layer in enumerate(layers):
                layer.set_modules_to_forward_prefetch(model.layers[i + 1 : i + 1 + ahead])
                layer.set_modules_to_backward_prefetch(layers[max(0, i - ahead) : i][::-1])
            model.set_modules_to_forward_prefetch(layers[:ahead])
            model.set_modules_to_backward_prefetch(layers[::-1][:ahead])
        counts = []

        def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
            with parity.CountCollectives() as forward:
                value = parity.regression_loss(model, part)
            counts.append(forward.counts)
            return value

        return [parity.train_sharded(model, parity.adamw, loss, running.mlp_batches()), counts]

    ours = parity.same_as_torch(partial(run, prefetch=True), mixed=mixed)
    parity.assert_equal(ours, run(parity.OURS, prefetch=False), "without explicit prefetch")


class _Deep(nn.Module):
    """Five blocks: as they are, recomputed alone or two at a time, or run twice each."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Embedding(13, models.DIM)
        self.blocks = nn.ModuleList(models.Block() for _ in range(5))
        self.head = nn.Linear(models.DIM, 13, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        step = 2 if self.way == "in pairs" else 1
        for start in range(0, len(self.blocks), step):
            part = nn.Sequential(*self.blocks[start : start + step])
            if self.way in ("recomputed", "in pairs"):
                x = checkpoint(part, x, use_reentrant=False)
            else:
                x = part(x)
            if self.way == "twice":
                x = part(x)
        return self.head(x)


@ranks(2)
@each_once(
    window=[1, 2, 3],
    way=["as it is", "recomputed", "in pairs", "twice"],
    reshard_after_forward=[None, False],
    mixed={"fp32": False, "mixed": True},
)
def test_windows(window: int, way: str, reshard_after_forward: bool | None, mixed: bool) -> None:
    """However many units are gathered ahead: torch's bits, and no gather more than with one.

    Micro-batches without sync, evaluation in between, and backward in two parts.
    """
    batches = [parity.my_part(ids) for ids in parity.language_batches(13, steps=6)]

    def run(api: Any, window: int) -> Any:
        model: Any = parity.shard(
            api,
            models.seeded(partial(_Deep, way)),
            mixed=mixed,
            reshard_after_forward=reshard_after_forward,
        )
        if api is parity.OURS:
            model.set_tuning(prefetch_window=window)
        optimizer = parity.adamw(model.parameters())
        seen: list[Any] = []
        counts = []
        for step in range(3):
            first, second = batches[2 * step : 2 * step + 2]
            with parity.CountCollectives() as count:
                with torch.no_grad():
                    seen.append(model(first))
                model.set_requires_gradient_sync(False)
                parity.language_loss(model, first).backward()
                model.set_requires_gradient_sync(True)
                losses = [parity.language_loss(model, second), parity.language_loss(model, first)]
                model.set_is_last_backward(False)
                losses[1].backward()
                model.set_is_last_backward(True)
                losses[0].backward()
            counts.append(count.all_gathers)
            seen += [[loss.detach() for loss in losses], parity.full_grads(model)]
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, parity.full_params(model)], counts

    ours, counts = run(parity.OURS, window)
    parity.assert_like_torch(ours, run(parity.TORCH, window)[0], mixed=mixed)
    default, expected = run(parity.OURS, 1)
    parity.assert_equal(ours, default, "one unit ahead")
    assert counts[-1] <= expected[-1]
    if way != "twice":
        assert counts[-1] == expected[-1]


class _FreesItself(nn.Module):
    """Needs its own parameters no more when its child runs."""

    def __init__(self, frees: bool) -> None:
        super().__init__()
        self.own, self.child = (nn.Linear(models.DIM, models.DIM) for _ in range(2))
        self._frees = frees

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x)
        if self._frees:
            self.reshard()
        return self.child(x)


class _CalledAgain(nn.Module):
    def __init__(self, frees: bool) -> None:
        super().__init__()
        self.again = _FreesItself(frees)
        self.between, self.last = (nn.Linear(models.DIM, models.DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.between(self.again(x))))


@ranks(2)
def test_a_unit_that_frees_itself_and_is_next_again() -> None:
    """Gathered ahead while it runs, it has one place in the window, not two."""
    model, plain = (models.seeded(partial(_CalledAgain, frees)) for frees in (True, False))
    for unit in (model.again.child, model.again, model.between, model.last, model):
        fully_shard(unit)
    model.set_tuning(prefetch_window=3)
    for _ in range(3):
        model.between.unshard()  # so that it takes no place in the window
        for each in (model, plain):
            each.zero_grad()
            each(torch.ones(2, models.DIM)).sum().backward()
        expected = {name: param.grad for name, param in plain.named_parameters()}
        model.between.reshard()
        parity.assert_equal(parity.full_grads(model), expected)


@ranks(2)
def test_prefetch_lists_may_be_generators() -> None:
    model = parity.shard(parity.OURS, running.mlp())
    model.set_modules_to_forward_prefetch(layer for layer in model.layers[:2])
    targets = [require_record(layer).unit for layer in model.layers[:2]]
    assert require_record(model).unit.forward_prefetch == targets
    several = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2))))  # which can be iterated
    with raises("prefetch-type"):
        model.set_modules_to_forward_prefetch(several)
