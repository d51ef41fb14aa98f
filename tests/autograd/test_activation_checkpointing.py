"""Activation checkpoints around units and inside them.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.common import models, parity
from tests.common.combinations import each_once
from tests.common.running import (
    fsdp_modules,
)
from tests.common.workers import ranks


class _Checkpointed(nn.Module):
    """Two blocks; `where` recomputes nothing (None), whole units ("outside"), or a unit's parts."""

    def __init__(self, where: str | None, reentrant: bool) -> None:
        super().__init__()
        self.where, self.reentrant = where, reentrant
        self.embed = nn.Embedding(13, models.DIM)
        self.blocks = nn.ModuleList(_PartlyCheckpointed(self) for _ in range(2))
        self.head = nn.Linear(models.DIM, 13, bias=False)

    def maybe(self, where: str, function: Any, x: Tensor) -> Tensor:
        if self.where == where:
            return checkpoint(function, x, use_reentrant=self.reentrant)
        return function(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = self.maybe("outside", block, x)
        return self.head(x)


class _PartlyCheckpointed(models.Block):
    def __init__(self, model: _Checkpointed) -> None:
        super().__init__()
        self.maybe = model.maybe  # a bound method, so that the model is not registered as a child

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.maybe("inside", self.attention, self.norm1(x))
        return x + self.maybe("inside", self.mlp, self.norm2(x))


@ranks(2)
@each_once(
    where=["outside", "inside"],
    reentrant={"reentrant": True, "nonreentrant": False},
    reshard_after_forward=[True, False],
)
def test_activation_checkpointing(where: str, reentrant: bool, reshard_after_forward: bool) -> None:
    """The same gradients as without, and no gather more than without."""

    def run(api: Any, where: str | None) -> Any:
        build = partial(_Checkpointed, where, reentrant)
        model = parity.shard(api, models.seeded(build), reshard_after_forward=reshard_after_forward)
        results = []
        for ids in map(parity.my_part, parity.language_batches(13, steps=2)):
            with parity.CountCollectives() as forward:
                loss = model(ids).float().square().mean()
            with parity.CountCollectives() as backward:
                loss.backward()
            assert forward.all_gathers == len(fsdp_modules(model))
            assert backward.reduce_scatters == len(fsdp_modules(model))
            results.append([loss.detach(), parity.full_grads(model), backward.all_gathers])
            model.zero_grad()
        return results

    with_checkpoints = parity.same_as_torch(partial(run, where=where))
    parity.assert_equal(with_checkpoints, run(parity.OURS, None), "without recomputation")
