"""Ten training steps: ours against torch's FSDP2 and against one unsharded process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
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


def _train(api: Any, problem: str, optimizer: str, **arguments: Any) -> list[parity.Step]:
    build, loss, batches = PROBLEMS[problem]
    model = parity.shard(api, models.seeded(build), **arguments)
    return parity.train_sharded(model, OPTIMIZERS[optimizer], loss, batches())


def _train_unsharded(problem: str, optimizer: str, **arguments: Any) -> list[parity.Step]:
    build, loss, batches = PROBLEMS[problem]
    return parity.train_unsharded(
        models.seeded(build), OPTIMIZERS[optimizer], loss, batches(), **arguments
    )


def _check_against_unsharded(
    ours: list[parity.Step], problem: str, optimizer: str, *, mixed: bool
) -> None:
    """Both comparisons that tests/common/parity.py explains: by slices, and with whole batches."""
    slices = _train_unsharded(problem, optimizer, slices=True, mixed=mixed)
    if dist.get_world_size() == 2 and optimizer != "adamw_fused":
        parity.assert_equal(ours, slices, "unsharded, by slices")
    else:
        tolerance = parity.REORDERED_MIXED if mixed else parity.REORDERED_FP32
        parity.assert_close(ours, slices, tolerance, "unsharded, by slices")
    if not mixed:
        parity.assert_close(ours, _train_unsharded(problem, optimizer), parity.FP32, "unsharded")


def _transformer_cases() -> list[Any]:
    """By default, what combines with one optimizer need not combine with each."""
    default = {
        ("sgd", False, None),
        ("adamw_foreach", False, None),
        ("adamw_foreach", True, None),
        ("adamw_foreach", False, True),
        ("adamw_foreach", True, False),
        ("adamw_fused", True, None),
    }
    return [
        pytest.param(
            *(optimizer, mixed, reshard),
            marks=[] if (optimizer, mixed, reshard) in default else [pytest.mark.exhaustive],
            id=f"{optimizer}-{'mixed' if mixed else 'fp32'}-{reshard}",
        )
        for optimizer in OPTIMIZERS
        for mixed in (False, True)
        for reshard in (None, True, False)
    ]


@pytest.mark.extended
@ranks(4)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_transformer_on_four_ranks(mixed: bool) -> None:
    _check_transformer("adamw_foreach", mixed, None)


@ranks(2, extended=(4,))
@pytest.mark.parametrize(("optimizer", "mixed", "reshard_after_forward"), _transformer_cases())
def test_transformer(optimizer: str, mixed: bool, reshard_after_forward: bool | None) -> None:
    _check_transformer(optimizer, mixed, reshard_after_forward)


def _check_transformer(optimizer: str, mixed: bool, reshard_after_forward: bool | None) -> None:
    arguments = {"mixed": mixed, "reshard_after_forward": reshard_after_forward}
    ours = _train(parity.OURS, "transformer", optimizer, **arguments)
    assert len(ours) == 10
    parity.assert_like_torch(
        ours, _train(parity.TORCH, "transformer", optimizer, **arguments), mixed=mixed
    )
    _check_against_unsharded(ours, "transformer", optimizer, mixed=mixed)


@ranks(2, extended=(4,))
@combinations.each_once(problem=["nested", "odd", "tied"], mixed={"fp32": False, "mixed": True})
def test_other_models(problem: str, mixed: bool) -> None:
    ours = _train(parity.OURS, problem, "adamw_foreach", mixed=mixed)
    parity.assert_like_torch(
        ours, _train(parity.TORCH, problem, "adamw_foreach", mixed=mixed), mixed=mixed
    )
    _check_against_unsharded(ours, problem, "adamw_foreach", mixed=mixed)


@ranks(4)
@pytest.mark.parametrize(
    "mixed", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["fp32", "mixed"]
)
@pytest.mark.parametrize("optimizer", combinations.often(list(OPTIMIZERS)))
def test_same_bits_as_torch_on_four_ranks(optimizer: str, mixed: bool) -> None:
    """Where every rank's share of a message is whole gloo blocks, sums have one order in both."""
    ours = _train(parity.OURS, "even", optimizer, mixed=mixed)
    parity.assert_equal(ours, _train(parity.TORCH, "even", optimizer, mixed=mixed), "torch")
