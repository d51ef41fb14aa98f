"""Units that return parameters of their own to whoever calls them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import FSDPModule
from fsdp2.core.modules.registry import require_record
from tests.common import models
from tests.common.workers import ranks
from tests.ties.stories import Shard, as_without_sharding, train

LENT: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda weight: weight,
    "a view": lambda weight: weight.t(),
    "views, nested": lambda weight: ["a", {"b": (weight[:4], weight[4:])}],
}


class Lender(nn.Module):
    def __init__(self, what: str, frozen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(models.DIM, models.DIM) / 4, not frozen)
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight, LENT[self.what](self.weight)


class Borrower(nn.Module):
    """Reads a parameter that a unit returned, after another unit has run."""

    def __init__(self, what: str, frozen: bool) -> None:
        super().__init__()
        self.lender = Lender(what, frozen)
        self.between = nn.Linear(models.DIM, models.DIM)

    def forward(self, x: Tensor) -> Tensor:
        x, lent = self.lender(x)
        weight = torch.cat(lent[1]["b"]) if isinstance(lent, list) else lent
        return self.between(x) @ weight + weight.sum()


@ranks(2)
@pytest.mark.parametrize("what", LENT)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_unit_that_returns_its_parameters(frozen: bool, what: str) -> None:
    """It is freed by backward, not before; torch's FSDP2 frees what the caller still has."""

    def story(model: Any, shard: Shard) -> list[Tensor]:
        shard([model.lender, model.between] if what == "itself" else model.lender, model)
        x = torch.linspace(-1, 1, 4 * models.DIM).view(4, models.DIM).requires_grad_()
        outputs = []
        for _ in range(2):
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    outputs.append(model(x).clone())
            outputs += train(model, x)
            if isinstance(model, FSDPModule):
                units = require_record(model).scheduler.units  # type: ignore[union-attr]  # it has run
                assert not any(unit.is_gathered for unit in units)
        return outputs

    as_without_sharding(partial(Borrower, what, frozen), story)
