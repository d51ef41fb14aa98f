"""Two gloo ranks on one GPU, with real streams: ours against torch's FSDP2 and no sharding."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.common import parity
from tests.common.looped import coalescing
from tests.common.workers import ranks

DIM = 256
STEPS = 6


class Block(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Linear(16, DIM)
        self.blocks = nn.ModuleList(Block(checkpoints) for _ in range(5))
        self.outlet = nn.Linear(DIM, 3)  # uneven on two ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def _build(api: Any, mixed: bool, checkpoints: bool, **arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Model(checkpoints).cuda()
    if api is None:
        return model
    arguments["mesh"] = init_device_mesh("cuda", (dist.get_world_size(),))
    if mixed:
        arguments["mp_policy"] = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        api.fully_shard(block, **arguments)
    api.fully_shard(model, **arguments)
    return model


def _train(model: nn.Module, whole_batch: bool, accumulate: int = 1) -> list[list[Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = []
    for step in range(STEPS):
        for micro in range(accumulate):
            generator = torch.Generator().manual_seed(step * 10 + micro)
            x = torch.randn(8 * size, 16, generator=generator).cuda()
            if not whole_batch:
                x = x[rank * 8 : (rank + 1) * 8]
            if accumulate > 1 and not whole_batch:
                model.set_requires_gradient_sync(micro == accumulate - 1)
            (model(x).float().square().mean() / accumulate).backward()
        record = parity.full_all(p.grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(record + parity.full_all(model.parameters()))
    torch.cuda.synchronize()
    return seen


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("coalesced", [False, True])
@ranks(2)
def test_same_bits_as_torch(mixed: bool, reshard: bool | None, coalesced: bool) -> None:
    """Two ranks sum two numbers, so that both paths and torch's give the same bits."""
    with coalescing() if coalesced else nullcontext():
        ours = _build(fsdp2, mixed, False, reshard_after_forward=reshard)
    theirs = _build(parity.TORCH, mixed, False, reshard_after_forward=reshard)
    parity.assert_equal(_train(ours, False), _train(theirs, False), "torch")


@pytest.mark.parametrize("coalesced", [False, True])
@ranks(2)
def test_checkpointing_and_accumulation(coalesced: bool) -> None:
    with coalescing() if coalesced else nullcontext():
        ours = _build(fsdp2, True, True)
    theirs = _build(parity.TORCH, True, True)
    parity.assert_equal(*(_train(model, False, accumulate=3) for model in (ours, theirs)))


@ranks(2)
def test_unsharded_parity() -> None:
    """fp32 sums in another order: a few roundings of 2**-24, fed through six steps of AdamW."""
    ours = _train(_build(fsdp2, False, False), False)
    whole = _train(_build(None, False, False), True)
    parity.assert_close(ours, whole, parity.Tolerance(rtol=1e-3, atol=2e-5), "unsharded")
