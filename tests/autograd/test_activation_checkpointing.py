"""Activation checkpoints around units and inside them.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from tests.common import gradients, models, parity
from tests.common.cases import in_turn
from tests.common.combinations import often
from tests.common.workers import ranks

UNITS = 5  # four layers and the root
Call = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


class _Layer(models.Block):
    """Its two parts are called by `call`, which recomputes them if it is told to."""

    is_unit = False  # perhaps a wrapper is

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.dropout = nn.Dropout(0.3)

    def attend(self, x: Tensor) -> Tensor:
        return self.dropout(self.attention(x))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.call(self.attend, self.norm1(x))
        return x + self.call(self.mlp, self.norm2(x))


class _Layers(nn.Module):
    """Units that are recomputed: a part of each, each, in pairs, or in pairs and then each again.

    "below" wraps a layer before it becomes a unit, "above" afterwards.
    """

    def __init__(
        self, where: str | None, reentrant: bool, shard: Callable[[nn.Module], object]
    ) -> None:
        super().__init__()
        self.where, self.reentrant = where, reentrant
        impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        self.layers = nn.ModuleList()
        for _ in range(UNITS - 1):
            layer: nn.Module = _Layer(partial(self.at, "inside"))
            if where == "below":
                layer = checkpoint_wrapper(layer, checkpoint_impl=impl)
            if where == "above":
                shard(layer)
                layer = checkpoint_wrapper(layer, checkpoint_impl=impl)
            layer.is_unit = where != "above"
            self.layers.append(layer)
        self.first = nn.Linear(models.DIM, models.DIM)  # reentrant ones need an input with grad
        self.head = nn.Linear(models.DIM, 4)

    def at(self, where: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.where != where and not (self.where == "nested" and where in ("each", "pairs")):
            return function(x)
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def pair(self, first: int, x: Tensor) -> Tensor:
        for layer in self.layers[first : first + 2]:
            x = self.at("each", layer, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)[None]  # a sequence of rows
        for first in (0, 2):
            x = self.at("pairs", partial(self.pair, first), x)
        return self.head(x[0])


def _train(api: Any, reshard_after_forward: bool | None, where: str | None, reentrant: bool) -> Any:
    """Losses, gradients and, unless several units are recomputed at once, gathers in backward."""
    arguments = {"mesh": parity.world_mesh(), "reshard_after_forward": reshard_after_forward}
    torch.manual_seed(dist.get_rank())  # for dropout
    build = partial(_Layers, where, reentrant, partial(api.fully_shard, **arguments))
    model = parity.shard(api, models.seeded(build), **arguments)
    optimizer = parity.adamw(model.parameters())
    seen = []
    for part in map(parity.my_part, gradients.mlp_batches(steps=2)):
        with parity.CountCollectives() as forward:
            loss = parity.regression_loss(model, part)
        with parity.CountCollectives() as backward:
            loss.backward()
        assert forward.all_gathers == backward.reduce_scatters == UNITS
        alone = where in (None, "inside", "each")
        grads = list(parity.full_grads(model).values())
        seen.append([loss.detach(), grads, backward.all_gathers if alone else None])
        optimizer.step()
        optimizer.zero_grad()
    return seen, list(parity.full_params(model).values())


CASES = {
    f"{where}, {'reentrant' if reentrant else 'not reentrant'}": (where, reentrant)
    for where, reentrant in product(
        ("inside", "each", "pairs", "nested", "below", "above"), (True, False)
    )
}


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", often([None, False, True]))
def test_activation_checkpointing(reshard_after_forward: bool | None) -> None:
    """The same dropout and gradients as without, and no gather more where one unit is recomputed.

    With wrappers, too: `fully_shard(checkpoint_wrapper(m))`, `checkpoint_wrapper(fully_shard(m))`.
    """
    plain, plain_params = _train(parity.OURS, reshard_after_forward, None, False)

    def check(case: tuple[str, bool]) -> None:
        seen, params = parity.same_as_torch(lambda api: _train(api, reshard_after_forward, *case))
        for step, expected in zip(seen, plain, strict=True):
            parity.assert_equal(step[:2], expected[:2], "no checkpoints")
            assert step[2] in (None, expected[2])
        parity.assert_equal(params, plain_params, "no checkpoints")

    in_turn(CASES, check)
