"""Lists of modules that are one unit.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.common import models, parity, running
from tests.common.meshes import TORCH_VERSION
from tests.common.workers import ranks


class _Grouped(nn.Module):
    """`norm` and `head` are one group; `skip` leaves the head to whoever calls the model."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        self.skip = skip
        self.first = nn.Linear(models.DIM, models.DIM)
        self.norm = nn.LayerNorm(models.DIM)
        self.middle = nn.Linear(models.DIM, models.DIM)
        self.head = nn.Linear(models.DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.norm(torch.tanh(self.first(x)))))
        return x if self.skip else self.head(x)


def _shard_grouped(api: Any, model: Any, **arguments: Any) -> Any:
    mesh = parity.world_mesh()
    returned = api.fully_shard([model.norm, model.head], mesh=mesh, **arguments)
    assert returned == [model.norm, model.head]
    api.fully_shard(model.middle, mesh=mesh, **arguments)
    return api.fully_shard(model, mesh=mesh)


@ranks(2, extended=(4,))
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_list_of_modules_is_one_group(reshard_after_forward: bool) -> None:
    def run(api: Any) -> Any:
        model = _shard_grouped(
            api, models.seeded(_Grouped), reshard_after_forward=reshard_after_forward
        )
        with parity.CountCollectives() as counted:
            parity.regression_loss(model, parity.my_part(running.one_batch())).backward()
        model.zero_grad()
        return [
            parity.train_sharded(
                model, parity.adamw, parity.regression_loss, running.mlp_batches()
            ),
            counted.counts,
        ]

    steps, counts = parity.same_as_torch(run)
    # Three groups: the root, [norm, head], middle. In backward, resharded ones are gathered again.
    assert counts["reduce_scatter"] == 3
    assert counts["all_gather"] == (5 if reshard_after_forward else 3)
    unsharded = parity.train_unsharded(
        models.seeded(_Grouped), parity.adamw, parity.regression_loss, running.mlp_batches()
    )
    parity.assert_close(steps, unsharded, parity.FP32, "unsharded")


@ranks(2)
def test_list_member_that_never_runs() -> None:
    """The root's forward completes the group: it is resharded, and what ran is trained.

    torch's, before 2.13, leaves it gathered.
    """

    def run(api: Any) -> Any:
        model = _shard_grouped(api, models.seeded(partial(_Grouped, skip=True)))
        results = []
        for x, _ in running.mlp_batches():
            output = model(parity.my_part(x))
            assert running.is_sharded(model.norm)
            assert running.is_sharded(model.head)
            output.square().mean().backward()
            results.append(parity.full_grads(model))
            model.zero_grad()
        return results

    ours = parity.same_as_torch(run) if TORCH_VERSION >= (2, 13) else run(parity.OURS)
    for (x, _), grads in zip(running.mlp_batches(), ours, strict=True):
        plain = models.seeded(partial(_Grouped, skip=True))
        plain(x).square().mean().backward()
        parity.assert_close(grads, parity.full_grads(plain), parity.FP32, "unsharded")
        assert grads["head.weight"] is None


@ranks(2)
def test_list_member_that_runs_after_the_root() -> None:
    """The model ends before the head; the head then runs on chunks of its output (chunked loss)."""

    def loss(model: Any, part: tuple[Tensor, Tensor]) -> Tensor:
        hidden = model(part[0])
        chunks = zip(hidden.chunk(2), part[1].chunk(2), strict=True)
        return torch.stack([(model.head(h) - y).square().mean() for h, y in chunks]).mean()

    def run(api: Any) -> Any:
        model = _shard_grouped(api, models.seeded(partial(_Grouped, skip=True)))
        return parity.train_sharded(model, parity.adamw, loss, running.mlp_batches())

    ours = parity.same_as_torch(run)
    plain = parity.train_unsharded(
        models.seeded(partial(_Grouped, skip=True)), parity.adamw, loss, running.mlp_batches()
    )
    parity.assert_close(ours, plain, parity.FP32, "unsharded")
