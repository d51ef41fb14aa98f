"""Other methods that run as forward does.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.common import models, parity, running
from tests.common.workers import ranks


class _Coder(nn.Module):
    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, models.DIM)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Tanh of a linear map."""
        return torch.tanh(self.linear(x)) * scale

    def decode(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.linear(x)}

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("call encode and decode")


class _CodersModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coders = nn.ModuleList(_Coder() for _ in range(2))
        self.head = nn.Linear(models.DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        for coder in self.coders:
            x = coder.decode(coder.encode(x, scale=0.5))["out"]
        return self.head(x)


@ranks(2)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_register_fsdp_forward_method(mixed: bool) -> None:
    def run(api: Any) -> Any:
        model = parity.shard(
            api, models.seeded(_CodersModel), mixed=mixed, reshard_after_forward=True
        )
        for coder in model.coders:
            api.register_fsdp_forward_method(coder, "encode")
            api.register_fsdp_forward_method(coder, "decode")
        assert model.coders[0].encode.__doc__ == "Tanh of a linear map."
        steps = parity.train_sharded(
            model, parity.adamw, parity.regression_loss, running.mlp_batches()
        )
        assert all(running.is_sharded(coder.linear) for coder in model.coders)
        return steps

    ours = parity.same_as_torch(run)
    plain = parity.train_unsharded(
        models.seeded(_CodersModel),
        parity.adamw,
        parity.regression_loss,
        running.mlp_batches(),
        slices=True,
        mixed=mixed,
    )
    parity.assert_equal(ours, plain, "unsharded")
