"""Units that return parameters of their own to whoever calls them.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from fsdp2.core.modules.registry import require_record
from tests.common import models, parity
from tests.common.workers import ranks

LENT: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda weight: weight,
    "a view": lambda weight: weight.t(),
    "views, nested": lambda weight: ["a", {"b": (weight[:4], weight[4:])}],
}


class Lender(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(models.DIM, models.DIM) / 4)
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight, LENT[self.what](self.weight)


class Borrower(nn.Module):
    """Reads a parameter that a unit returned, after another unit has run."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.lender, self.between = Lender(what), nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        x, lent = self.lender(x)
        weight = torch.cat(lent[1]["b"]) if isinstance(lent, list) else lent
        return self.between(x) @ weight + weight.sum()


@ranks(2)
@pytest.mark.parametrize("what", LENT)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_unit_that_returns_its_parameters(frozen: bool, what: str) -> None:
    """It is freed by backward, not before; torch's FSDP2 frees what the caller still has."""
    plain, model = models.seeded(partial(Borrower, what)), models.seeded(partial(Borrower, what))
    for module in (plain, model):
        module.lender.requires_grad_(not frozen)
    fully_shard([model.lender, model.between] if what == "itself" else model.lender)
    fully_shard(model)
    x = torch.randn(4, models.DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(2):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                parity.assert_close(model(x), plain(x), parity.FP32)
        for module in (plain, model):
            module.zero_grad()
            module(x).sum().backward()
        expected = {name: param.grad for name, param in plain.named_parameters()}
        parity.assert_close(parity.full_grads(model), expected, parity.FP32)
        assert not any(unit.is_gathered for unit in require_record(model).scheduler.units)  # type: ignore[union-attr]  # it has run
