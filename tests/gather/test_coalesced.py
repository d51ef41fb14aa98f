"""The zero-copy path with real data: coalesced gathers into slots, reductions out of gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.core.modules.registry import record_of
from tests.common import models, parity
from tests.common.looped import coalescing
from tests.common.workers import ranks

DIM = 32  # rows of 16 bytes on 4 ranks, in bf16 too
MIXED = [pytest.param(False, id="fp32"), pytest.param(True, id="mixed")]


class EvenAndOdd(nn.Module):
    """Blocks whose parameters are even and aligned, uneven but aligned, and neither."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(models.DIM, DIM), nn.Linear(DIM, 30), nn.Linear(30, DIM), nn.Linear(DIM, 1)]
        )
        for layer in self.layers[:-1]:
            layer.is_unit = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


def _train(api: object, mixed: bool, small: int = 0, **arguments: object) -> list[parity.Step]:
    model = models.seeded(EvenAndOdd)
    with coalescing(small):
        parity.shard(api, model, mixed=mixed, **arguments)
    if api is parity.OURS:
        kinds = {kind for r in fsdp2.report(model).groups for kind in r.transport.split("+")}
        assert kinds == {"coalesced", "packed"}
    batches = parity.regression_batches(models.DIM, 1)
    return parity.train_sharded(
        model, partial(torch.optim.AdamW, lr=1e-2), parity.regression_loss, batches
    )


@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("small", [0, 300])
@ranks(2, extended=(4,))
def test_trains_like_torch(small: int, mixed: bool) -> None:
    """A rank sums its rows in another ring position here: on 4 ranks the order may differ."""
    ours, torchs = _train(parity.OURS, mixed, small), _train(parity.TORCH, mixed)
    if dist.get_world_size() == 2:
        parity.assert_equal(ours, torchs)
    else:
        parity.assert_close(ours, torchs, parity.REORDERED_FP32)


@ranks(2)
def test_gradients_are_reduced_where_autograd_left_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No copy of an even parameter's gradient is made: the collective reads autograd's tensors."""
    layer = nn.Linear(DIM, DIM)
    with coalescing():
        fsdp2.fully_shard(layer)
    group = record_of(layer).unit.own_groups[0]
    seen: list[int] = []
    bind = group.reducers.bind_reduce_scatter_many

    def spy(kind):
        original = bind(kind)

        def scatter(outputs, inputs):
            seen.extend(tensor.data_ptr() for tensor in inputs[:-1])  # and who had a gradient
            return original(outputs, inputs)

        return scatter

    monkeypatch.setattr(group.reducers, "bind_reduce_scatter_many", spy)
    layer(torch.randn(4, DIM)).sum()  # binds
    left: list[int] = []
    for param in group.params:
        param.unsharded.register_post_accumulate_grad_hook(lambda p: left.append(p.grad.data_ptr()))
    layer(torch.randn(4, DIM)).sum().backward()
    assert sorted(seen) == sorted(left)
    assert len(seen) == 2
