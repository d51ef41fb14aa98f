"""Offloaded shards and gradients, forced on the CPU, where every copy is there to be seen."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from benchmarks.null_group import null_world
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp2.core.hooks import hooks_of

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU mesh the policy changes nothing otherwise."""
    monkeypatch.setattr("fsdp2.core.assembly._effective_offload", lambda offload, device: offload)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])


def _shard(model: nn.Module, policy: MixedPrecisionPolicy) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    offload = CPUOffloadPolicy(pin_memory=False)
    for block in model:
        fsdp2.fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return fsdp2.fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)


@pytest.mark.parametrize(
    "policy",
    [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, F32), MixedPrecisionPolicy(BF16, BF16)],
)
def test_training_on_one_rank_is_as_without_offload(policy: MixedPrecisionPolicy) -> None:
    """Gathered parameters are views of the mirror, or casts of it, never of the shards."""
    with null_world(1):
        plain, model = _model(), _model()
        offloaded = _shard(model, policy)
        mesh = init_device_mesh("cpu", (1,))
        for block in plain:
            fsdp2.fully_shard(block, mesh=mesh, mp_policy=policy)
        fsdp2.fully_shard(plain, mesh=mesh, mp_policy=policy)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, offloaded)]
        for step in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            for m, optimizer in zip((plain, offloaded), optimizers, strict=True):
                if step == 2:
                    with torch.no_grad():
                        m(x)
                for _ in range(2):  # adds to the gradient that is there
                    m(x).square().sum().backward()
                optimizer.step()
            for ours, theirs in zip(offloaded.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
                assert torch.equal(ours.to_local(), theirs.to_local())
            for optimizer in optimizers:
                optimizer.zero_grad()


def test_gathered_parameters_are_not_the_shards() -> None:
    with null_world(1):
        model = _shard(_model(), MixedPrecisionPolicy())
        model.unshard()
        block = model[0]
        block.unshard()
        group = hooks_of(block).unit.groups[0]
        weight, shard = block[0].weight, group.params[0].sharded
        assert isinstance(shard, DTensor)
        assert torch.equal(weight, shard.to_local())
        assert weight.data_ptr() != shard.to_local().data_ptr()
        assert group._mirror.allocated
        block.reshard()
        assert not group._mirror.allocated


def test_loaded_state_is_what_the_next_forward_computes_with() -> None:
    with null_world(1):
        model = _shard(_model(), MixedPrecisionPolicy())
        x = torch.randn(2, 8)
        model(x)
        state = copy.copy(model.state_dict())
        for name, value in state.items():
            state[name] = torch.zeros_like(value)
        model.load_state_dict(state)
        assert model(x).eq(0).all()
