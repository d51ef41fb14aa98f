"""Dtypes of inputs, outputs, parameters and gradients in mixed precision.

Where torch's FSDP2 can do it too, both must give the same bits; else the unsharded model judges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.common import models, parity
from tests.common.workers import ranks


@dataclass
class _Batch:
    x: Tensor
    extras: list[dict[str, Tensor]]


class _Recorder(nn.Module):
    """Notes the dtypes of everything it gets and of its own parameters."""

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.DIM, models.DIM)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, batch: _Batch, *, mask: Tensor, double: Tensor) -> dict[str, Any]:
        extras = batch.extras[0]
        self.seen = {
            "x": batch.x.dtype,
            "extra": extras["float"].dtype,
            "int": extras["int"].dtype,
            "mask": mask.dtype,
            "double": double.dtype,
            "weight": self.linear.weight.dtype,
        }
        x = self.linear(batch.x.to(self.linear.weight.dtype))
        return {"x": x, "more": (x.sum(), extras["int"])}


@ranks(2)
@pytest.mark.parametrize("cast_forward_inputs", [True, False])
@pytest.mark.parametrize("output_dtype", [None, torch.float32, torch.float64])
def test_mixed_precision_casts(cast_forward_inputs: bool, output_dtype: torch.dtype | None) -> None:
    """Floating-point inputs are cast wherever they are, fp64 included; ints and bools never are."""

    def run(api: Any) -> Any:
        model = models.seeded(_Recorder)
        policy = api.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            output_dtype=output_dtype,
            cast_forward_inputs=cast_forward_inputs,
        )
        api.fully_shard(model, mesh=parity.world_mesh(), mp_policy=policy)
        x = torch.ones(2, models.DIM, requires_grad=True)
        extras = [{"float": torch.ones(2), "int": torch.ones(2, dtype=torch.int64)}]
        output = model(
            _Batch(x, extras),
            mask=torch.ones(2, dtype=torch.bool),
            double=torch.ones(2, dtype=torch.float64),
        )
        output["x"].float().sum().backward()
        dtypes = [output["x"].dtype, output["more"][0].dtype, output["more"][1].dtype]
        grads = parity.full_grads(model)
        assert all(grad.dtype == torch.float32 for grad in grads.values())
        return [model.seen, dtypes, x.grad, grads]

    seen, dtypes, _, _ = parity.same_as_torch(run)
    floats = torch.bfloat16 if cast_forward_inputs else torch.float32
    doubles = torch.bfloat16 if cast_forward_inputs else torch.float64
    assert seen == {
        "x": floats,
        "extra": floats,
        "int": torch.int64,
        "mask": torch.bool,
        "double": doubles,
        "weight": torch.bfloat16,
    }
    out = output_dtype or torch.bfloat16
    assert dtypes == [out, out, torch.int64]
