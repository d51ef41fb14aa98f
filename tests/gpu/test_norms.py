"""Clipping gradients on the GPU, and gradients that were offloaded from it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp2
from tests.common.workers import ranks


@ranks(2)
@pytest.mark.parametrize("offloaded", ["none", "some", "all"])
def test_clip(offloaded: str) -> None:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    params, wholes = [], []
    for i in range(4):
        generator = torch.Generator().manual_seed(i)
        whole = torch.randn(5, 3, generator=generator)
        param = distribute_tensor(whole.cuda(), mesh, [Shard(0)], src_data_rank=None)
        if offloaded == "all" or (offloaded == "some" and i % 2):
            param = param.cpu()
        params.append(nn.Parameter(param))
        params[-1].grad = param.detach().clone()
        wholes.append(whole)
    norm = fsdp2.clip_grad_norm_(params, 0.5)
    expected = torch.nn.utils.get_total_norm(wholes)
    assert norm.device == params[0].to_local().device
    torch.testing.assert_close(norm.cpu(), expected, rtol=2e-6, atol=0)
    again = fsdp2.optim.get_total_norm([param.grad for param in params])
    torch.testing.assert_close(again.cpu(), torch.tensor(0.5), rtol=1e-5, atol=0)
