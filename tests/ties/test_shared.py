"""Parameters that several modules share, in one unit; `test_ties.py` has those across units."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard
from tests.common import models, parity
from tests.common.combinations import each_once
from tests.common.workers import ranks

VOCABS = (13, 3, 16)  # uneven on 2 and 4 ranks; fewer rows than 4 ranks; even


def tied(vocab: int = 13) -> Any:
    return models.seeded(partial(models.Transformer, blocks=1, vocab=vocab, tied=True))


def untied(vocab: int = 13) -> Any:
    return models.seeded(partial(models.Transformer, blocks=1, vocab=vocab))


def _shard_pair(api: Any, model: Any, **arguments: Any) -> Any:
    mesh = parity.world_mesh()
    for block in models.units(model):
        api.fully_shard(block, mesh=mesh, **arguments)
    api.fully_shard([model.embed, model.head], mesh=mesh, **arguments)
    return api.fully_shard(model, mesh=mesh)


# -- one unit -------------------------------------------------------------------------------------


@ranks(2, extended=(4,))
@each_once(vocab=VOCABS, reshard_after_forward=[True, False])
def test_embedding_and_head_in_one_unit(vocab: int, reshard_after_forward: bool) -> None:
    """One parameter, gathered once and reduced once, with the gradients of both uses."""

    def train(api: Any) -> Any:
        model = _shard_pair(api, tied(vocab), reshard_after_forward=reshard_after_forward)
        return parity.train_sharded(model, parity.adamw, parity.language_loss, batches)

    batches = parity.language_batches(vocab, steps=3)
    ours = parity.same_as_torch(train)
    plain = parity.train_unsharded(tied(vocab), parity.adamw, parity.language_loss, batches)
    parity.assert_close(ours, plain, parity.FP32, "unsharded")


@ranks(2)
@pytest.mark.parametrize("where", ["pair", "root"])
def test_one_parameter_everywhere(where: str) -> None:
    """Sharded, gathered, after `.to()`, after loading: both modules register one object."""
    model = tied()
    _shard_pair(parity.OURS, model) if where == "pair" else parity.shard(parity.OURS, model)

    def check(kind: type) -> None:
        assert model.embed.weight is model.head.weight
        assert isinstance(model.embed.weight, DTensor) is (kind is DTensor)

    check(DTensor)
    inside: list[bool] = []
    model.norm.register_forward_hook(
        lambda *_: inside.append(model.embed.weight is model.head.weight)
    )
    ids = torch.zeros(1, 3, dtype=torch.int64)
    for change in (
        lambda: None,
        lambda: model.to(torch.float64).to(torch.float32),
        lambda: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}),
        lambda: model.load_state_dict(
            {k: v.clone() for k, v in model.state_dict().items()}, assign=True
        ),
    ):
        change()
        model(ids).sum().backward()
        for unit in (model, model.embed):
            if hasattr(unit, "reshard"):
                unit.reshard()
        check(DTensor)
        assert isinstance(model.embed.weight.grad, DTensor)
        model.zero_grad()
    assert inside == [True] * 4


@ranks(2)
def test_tied_three_times_and_across_depths() -> None:
    """A weight that a unit, a module below it and the module below that one use."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(models.DIM, models.DIM) / 3)
            self.inner = nn.Sequential(
                nn.Linear(models.DIM, models.DIM), nn.Sequential(nn.Linear(models.DIM, models.DIM))
            )
            self.inner[0].weight = self.weight
            self.inner[1][0].weight = self.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.tanh(x @ self.weight))

    model = models.seeded(Three)
    fully_shard(model, mesh=parity.world_mesh(), reshard_after_forward=True)
    plain = models.seeded(Three)
    x = torch.randn(2, models.DIM)
    for trained in (model, plain):
        trained(x).square().sum().backward()
    parity.assert_equal(
        parity.full(model.weight.grad), plain.weight.grad, "the sum over three uses"
    )
    assert len(list(model.parameters())) == len(list(plain.parameters())) == 3


# -- what looks like it ---------------------------------------------------------------------------


class Halves(nn.Module):
    """Two linears, to be made two units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.DIM, models.DIM, bias=False)
        self.second = nn.Linear(models.DIM, models.DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def _shard(*modules: nn.Module) -> None:
    for module in modules:
        fully_shard(module, mesh=parity.world_mesh())


def _share_storage_in_one_unit(model: Any) -> None:
    model.second.weight.data = model.first.weight.data
    _shard(model)


def _same_memory(model: Any) -> None:
    model.second.weight = nn.Parameter(model.first.weight)
    _shard(model)


def _overlap(model: Any) -> None:
    rows = torch.randn(models.DIM + 1, models.DIM)
    model.first.weight = nn.Parameter(rows[:-1])
    model.second.weight = nn.Parameter(rows[1:])
    _shard(model)


@ranks(2)
@pytest.mark.parametrize("tie", [_share_storage_in_one_unit, _same_memory, _overlap])
def test_parameters_that_share_memory_are_refused(tie: Callable[[Any], None]) -> None:
    """Two parameters over the same memory would go apart in silence: each gets its own rows.

    Within one call only: the memory of parameters that other calls sharded is gone.
    """
    match = r"'second\.weight' shares memory with parameter 'first\.weight'"
    with pytest.raises(ValueError, match=match):
        tie(Halves())
