"""Ten training steps: ours against torch's FSDP2 and against one unsharded process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.common import combinations, models, parity
from tests.common.workers import ranks

VOCAB = 13

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adamw_foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
}

# name -> (model, loss, batches)
PROBLEMS: dict[str, tuple[Callable[[], nn.Module], parity.Loss, Callable[[], list[Any]]]] = {
    "transformer": (
        partial(models.Transformer, vocab=VOCAB),
        parity.language_loss,
        partial(parity.language_batches, VOCAB),
    ),
    "tied": (
        partial(models.Transformer, vocab=VOCAB, blocks=1, tied=True),
        parity.language_loss,
        partial(parity.language_batches, VOCAB),
    ),
    "nested": (
        models.Nested,
        parity.regression_loss,
        partial(parity.regression_batches, models.DIM, 3),
    ),
    "even": (
        partial(models.MLP, out=8),
        parity.regression_loss,
        partial(parity.regression_batches, models.DIM, 8),
    ),
    "odd": (
        models.OddMLP,
        parity.regression_loss,
        partial(parity.regression_batches, models.DIM, 1),
    ),
}


def _check(problem: str, optimizer: str, **arguments: Any) -> None:
    """Both comparisons that tests/common/parity.py explains: by slices, and with whole batches."""
    build, loss, batches = PROBLEMS[problem]
    steps = parity.check_training(
        partial(models.seeded, build),
        batches(),
        loss=loss,
        make_optimizer=OPTIMIZERS[optimizer],
        elementwise=optimizer != "adamw_fused",
        **arguments,
    )
    assert len(steps) == 10


@ranks(2)
@combinations.each_once(
    optimizer=[*OPTIMIZERS],
    mixed={"mixed": True, "fp32": False},  # by default others are fp32
    reshard_after_forward=[None, True, False],
)
def test_transformer(optimizer: str, mixed: bool, reshard_after_forward: bool | None) -> None:
    _check("transformer", optimizer, mixed=mixed, reshard_after_forward=reshard_after_forward)


@pytest.mark.extended
@ranks(4)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_transformer_on_four_ranks(mixed: bool) -> None:
    _check("transformer", "adamw_foreach", mixed=mixed)


@ranks(2, extended=(4,))
@combinations.each_once(problem=["nested", "odd", "tied"], mixed={"fp32": False, "mixed": True})
def test_other_models(problem: str, mixed: bool) -> None:
    _check(problem, "adamw_foreach", mixed=mixed)


@ranks(4)
@pytest.mark.parametrize(
    "mixed", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["fp32", "mixed"]
)
@pytest.mark.parametrize("optimizer", combinations.often(list(OPTIMIZERS)))
def test_same_bits_as_torch_on_four_ranks(optimizer: str, mixed: bool) -> None:
    """Where every rank's share of a message is whole gloo blocks, sums have one order in both."""
    build, loss, batches = PROBLEMS["even"]
    ours, torchs = (
        parity.train_sharded(
            parity.shard(api, models.seeded(build), mixed=mixed),
            OPTIMIZERS[optimizer],
            loss,
            batches(),
        )
        for api in (parity.OURS, parity.TORCH)
    )
    parity.assert_equal(ours, torchs, "torch")
