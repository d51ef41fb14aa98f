"""How many gathered units are alive on the device, by the allocator's own count."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from tests.common.workers import ranks

DIM, LAYERS = 2048, 8
UNIT = DIM * DIM * 4  # bytes of one gathered layer


def _model() -> nn.Module:
    model = nn.Sequential(*[nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)]).cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model:
        fsdp2.fully_shard(layer, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    return model


@ranks(2)
def test_at_most_two_units_in_forward() -> None:
    """A unit that is still packed counts as one; while it is copied out, the one before is free."""
    model = _model()
    x = torch.randn(2, DIM, device="cuda")
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x)
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 2 * UNIT + 2**20, f"{peak / UNIT:.2f} units"
    assert torch.cuda.memory_allocated() - before < 2**20


@ranks(2)
def test_nothing_gathered_at_the_loss_nor_after_backward() -> None:
    model = _model()
    x = torch.randn(2, DIM, device="cuda")
    model(x).sum().backward()
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = model(x).sum()
    assert torch.cuda.memory_allocated() - before < UNIT // 4  # activations only
    loss.backward()
    model.zero_grad()
    assert torch.cuda.memory_allocated() - before < UNIT // 4
