"""Compiled blocks on a GPU: inductor's kernels, and CUDA graphs over parameters that stay put."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.core.modules.registry import record_of
from tests.common import compiling, parity
from tests.common.models import seeded
from tests.common.workers import ranks

STEPS = 6

# Matmuls of width 8 in fp32, by cuBLAS in either case; norms and gelu fused by inductor: a few
# roundings, fed back through six steps of SGD.
TOLERANCE = parity.Tolerance(rtol=1e-4, atol=1e-4)


def _train(mode: str | None, keep: bool = False) -> tuple[list[Any], set[int]]:
    """Gradients of every step; where the first block's kept weight was in those after the first."""
    model: Any = seeded(compiling.Stack).cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for block in model.blocks:
        if mode is not None:
            block.compile(mode=mode, fullgraph=True)
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    model.set_keep_unsharded_storage(keep)
    addresses: set[int] = set()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = []
    for step in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        torch.manual_seed(step)
        x, target = (
            torch.randn(4, compiling.DIM, device="cuda"),
            torch.randn(4, compiling.OUT, device="cuda"),
        )
        output = model(x)
        if keep and step:
            addresses.add(_gathered(model.blocks[0]).data_ptr())
        (output - target).square().mean().backward()
        done.append(parity.full_grads(model))
        optimizer.step()
        optimizer.zero_grad()
    return done, addresses


def _gathered(block: Any) -> torch.Tensor:
    """The gathered form of ``up.weight``, read from outside: a compiled hook could not."""
    record = record_of(block)
    assert record is not None
    (group,) = record.unit.own_groups
    (param,) = [param for param in group.params if param.name.endswith("up.weight")]
    assert param.unsharded is not None
    return param.unsharded


@ranks(2, timeout=300)
def test_inductor_matches_eager() -> None:
    with compiling.fresh_dynamo():
        compiled, _ = _train("default")
    parity.assert_close(compiled, _train(None)[0], TOLERANCE, "eager")


@ranks(2, timeout=300)
@pytest.mark.extended
def test_cuda_graphs_replay_where_memory_is_kept() -> None:
    """With `set_keep_unsharded_storage(True)` a graph's parameters are where it was recorded."""
    with compiling.fresh_dynamo():
        compiled, addresses = _train("reduce-overhead", keep=True)
    assert len(addresses) == 1
    parity.assert_close(compiled, _train(None)[0], TOLERANCE, "eager")
