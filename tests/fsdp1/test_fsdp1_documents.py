"""Each piece of code in the documentation of torch's FSDP1, as calls, with what it must leave.

In the order of the documentation. ``FSDP`` is `fsdp2.fsdp1`'s; all else is torch's, as there.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

from fsdp2.fsdp1 import (
    FSDP,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedStateDictConfig,
    StateDictType,
)
from tests.common import parity
from tests.common.models import seeded
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
DIM = 8


class Scaled(nn.Module):
    """Called as the documentation calls its module: by position, and by two names."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(DIM, DIM, device=device), nn.Linear(DIM, DIM, device=device)
        )
        self.head = nn.Linear(DIM, 2, device=device)

    def forward(self, x: Tensor, y: int = 1, z: Tensor | None = None) -> Tensor:
        out: Tensor = self.head(self.inner(x).tanh()) * y
        return out if z is None else out + z


def batch() -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(3))


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: int = 2) -> None:
    """The same batch on each rank: means of equal gradients have the same bits."""
    for _ in range(steps):
        optim.zero_grad()
        model(batch()).square().sum().backward()
        optim.step()


def plain(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(Scaled, seed)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def wrapped(seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    model = FSDP(seeded(Scaled, seed), device_id=CPU)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def assert_trains_on(model: Any, optim: torch.optim.Optimizer) -> None:
    """Two steps, a checkpoint and two more are four steps without sharding."""
    expected, expected_optim = plain()
    train(expected, expected_optim, 4)
    train(model, optim)
    params = [p.detach() for p in expected.parameters()]
    parity.assert_equal(parity.full_all(model.parameters()), params, "behind the checkpoint")


# ---- the class


@ranks(2)
def test_the_first_example() -> None:
    my_module = seeded(Scaled)
    sharded_module = FSDP(my_module, device_id=CPU)
    optim = torch.optim.Adam(sharded_module.parameters(), lr=0.0001)
    x = sharded_module(batch(), y=3, z=torch.Tensor([1]))
    loss = x.sum()
    loss.backward()
    optim.step()
    expected = seeded(Scaled)
    expected_optim = torch.optim.Adam(expected.parameters(), lr=0.0001)
    assert torch.equal(x, expected(batch(), y=3, z=torch.Tensor([1])))
    expected(batch(), y=3, z=torch.Tensor([1])).sum().backward()
    expected_optim.step()
    params = [p.detach() for p in expected.parameters()]
    parity.assert_equal(parity.full_all(sharded_module.parameters()), params)


@ranks(2)
def test_a_policy_of_ones_own() -> None:
    def custom_auto_wrap_policy(
        module: nn.Module,
        recurse: bool,
        nonwrapped_numel: int,
        min_num_params: int = int(1e8),
    ) -> bool:
        return nonwrapped_numel >= min_num_params

    my_auto_wrap_policy = functools.partial(custom_auto_wrap_policy, min_num_params=100)
    model = FSDP(seeded(Scaled), auto_wrap_policy=my_auto_wrap_policy, device_id=CPU)
    outer, inner = FSDP.fsdp_modules(model)  # of 162 and 144 elements; a linear has 72
    assert isinstance(outer.module, Scaled)
    assert isinstance(inner.module, nn.Sequential)
    whole = FSDP(seeded(Scaled), auto_wrap_policy=custom_auto_wrap_policy, device_id=CPU)
    assert len(FSDP.fsdp_modules(whole)) == 1


@ranks(2)
def test_a_module_on_the_meta_device() -> None:
    module = Scaled(device="meta")

    def my_init_fn(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.5)

    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    fsdp_model = FSDP(module, param_init_fn=my_init_fn, auto_wrap_policy=policy, device_id=CPU)
    assert next(fsdp_model.parameters()).device == CPU
    assert len(FSDP.fsdp_modules(fsdp_model)) == 2
    for param in parity.full_all(fsdp_model.parameters()):
        parity.assert_equal(param, torch.full_like(param, 0.5))


# ---- states of models and optimizers


def full_states(model: nn.Module) -> None:
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    )


@ranks(2)
def test_optim_state_dict() -> None:
    """Once from the optimizer, once from a dict of it that was taken before."""
    for original in (False, True):
        model, optim = wrapped()
        train(model, optim)
        full_states(model)
        state_dict = model.state_dict()
        if original:
            original_osd = optim.state_dict()
            optim_state_dict = FSDP.optim_state_dict(model, optim, optim_state_dict=original_osd)
        else:
            optim_state_dict = FSDP.optim_state_dict(model, optim)
        model, optim = wrapped(1)
        full_states(model)
        model.load_state_dict(state_dict)
        optim_state_dict = FSDP.optim_state_dict_to_load(model, optim, optim_state_dict)
        optim.load_state_dict(optim_state_dict)
        assert_trains_on(model, optim)


@ranks(2)
def test_rekeyed_for_a_model_without_wrappers() -> None:
    wrapped_model, wrapped_optim = wrapped()
    train(wrapped_model, wrapped_optim)
    full_osd = FSDP.full_optim_state_dict(wrapped_model, wrapped_optim, rank0_only=False)
    nonwrapped_model, nonwrapped_optim = plain(1)
    rekeyed_osd = FSDP.rekey_optim_state_dict(
        full_osd, OptimStateKeyType.PARAM_ID, nonwrapped_model
    )
    nonwrapped_optim.load_state_dict(rekeyed_osd)
    nonwrapped_model.load_state_dict(wrapped_model.state_dict())
    assert_trains_on(nonwrapped_model, nonwrapped_optim)


@ranks(2)
def test_rekeyed_for_a_model_with_wrappers() -> None:
    nonwrapped_model, nonwrapped_optim = plain()
    train(nonwrapped_model, nonwrapped_optim)
    osd = nonwrapped_optim.state_dict()
    rekeyed_osd = FSDP.rekey_optim_state_dict(osd, OptimStateKeyType.PARAM_NAME, nonwrapped_model)
    wrapped_model, wrapped_optim = wrapped(1)
    sharded_osd = FSDP.shard_full_optim_state_dict(rekeyed_osd, wrapped_model)
    wrapped_optim.load_state_dict(sharded_osd)
    wrapped_model.load_state_dict(nonwrapped_model.state_dict())
    assert_trains_on(wrapped_model, wrapped_optim)


@ranks(2)
def test_scatter_full_optim_state_dict() -> None:
    """Into a model over another group: that of all ranks, made anew."""
    model, optim = wrapped()
    train(model, optim)
    full_osd = FSDP.full_optim_state_dict(model, optim)
    assert bool(full_osd) == (dist.get_rank() == 0)
    state_dict = model.state_dict()
    new_group = dist.new_group([0, 1])
    new_model: Any = FSDP(seeded(Scaled, 1), process_group=new_group, device_id=CPU)
    new_optim = torch.optim.Adam(new_model.parameters(), lr=0.01)
    sharded_osd = FSDP.scatter_full_optim_state_dict(full_osd, new_model, group=new_group)
    new_optim.load_state_dict(sharded_osd)
    new_model.load_state_dict(state_dict)
    assert_trains_on(new_model, new_optim)


@ranks(2)
def test_shard_full_optim_state_dict(tmp_path: Path) -> None:
    """By way of a file."""
    path = tmp_path / f"of_rank_{dist.get_rank()}.pt"
    model, optim = wrapped()
    train(model, optim)
    full_osd = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    torch.save(full_osd, path)
    new_model, new_optim = wrapped(1)
    new_model.load_state_dict(model.state_dict())
    full_osd = torch.load(path)
    sharded_osd = FSDP.shard_full_optim_state_dict(full_osd, new_model)
    new_optim.load_state_dict(sharded_osd)
    assert_trains_on(new_model, new_optim)


@ranks(2)
def test_types_are_set_through_another_wrapper() -> None:
    """A module around; DDP, which stands there in the documentation, takes no DTensors."""
    model: Any = nn.Sequential(wrapped()[0])
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optim)
    FSDP.set_state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        state_dict_config=ShardedStateDictConfig(offload_to_cpu=True),
        optim_state_dict_config=OptimStateDictConfig(offload_to_cpu=True),
    )
    param_state_dict = model.state_dict()
    assert all(isinstance(value, DTensor) for value in param_state_dict.values())
    optim_state_dict = FSDP.optim_state_dict(model, optim)
    moments = [state["exp_avg"] for state in optim_state_dict["state"].values()]
    assert len(moments) == 6
    full_states(model)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        checkpoint = model.state_dict()
    assert list(checkpoint) == list(param_state_dict)
    parity.assert_equal(
        parity.full_all(checkpoint.values()), parity.full_all(param_state_dict.values())
    )
    assert not any(isinstance(value, DTensor) for value in model.state_dict().values())


# ---- settings


@ranks(2)
def test_inner_wrappers_cast_for_themselves() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    seen: list[torch.dtype] = []
    for linear in model:
        linear.register_forward_hook(lambda _, args, out: seen.extend([args[0].dtype, out.dtype]))
    model[1] = FSDP(
        model[1],
        mixed_precision=MixedPrecision(param_dtype=torch.float16, cast_forward_inputs=True),
        device_id=CPU,
    )
    model = FSDP(
        model,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True),
        device_id=CPU,
    )
    model(torch.randn(2, 3)).float().sum().backward()
    assert seen == [torch.bfloat16] * 2 + [torch.float16] * 2
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())


@ranks(2)
def test_a_checkpoint_on_the_first_rank_alone(tmp_path: Path) -> None:
    path = tmp_path / "my_checkpoint.pt"
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    fsdp: Any = FSDP(seeded(Scaled), auto_wrap_policy=policy, device_id=CPU)
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(fsdp, StateDictType.FULL_STATE_DICT, cfg):
        state = fsdp.state_dict()
    assert bool(state) == (dist.get_rank() == 0)
    model = seeded(Scaled, dist.get_rank() + 1)
    if dist.get_rank() == 0:
        torch.save(state, path)
        model.load_state_dict(torch.load(path))
    fsdp = FSDP(model, device_id=CPU, auto_wrap_policy=policy, sync_module_states=True)
    expected = [p.detach() for p in seeded(Scaled).parameters()]
    parity.assert_equal(parity.full_all(fsdp.parameters()), expected)
