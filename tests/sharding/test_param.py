"""One parameter in its two forms, on a mesh of one rank that pretends to be any rank of four."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.core.modules.registry import require_record
from fsdp2.core.progress import Counts
from fsdp2.errors import ShardingStateError

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Noting(nn.Linear):
    """Defines ``__setattr__``, and counts parameters that are set."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self.__dict__["times"] = self.__dict__.get("times", 0) + 1
        super().__setattr__(name, value)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_units_own_stores_are_no_registrations(mesh: DeviceMesh, reshard: bool) -> None:
    """Or each forward of the root would look at all parameters again."""
    model: Any = nn.Sequential(Noting(3, 3), Noting(3, 3))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    model(torch.ones(1, 3)).sum().backward()
    count, times = Counts.registrations, model[0].times
    model(torch.ones(1, 3)).sum().backward()
    assert Counts.registrations == count
    assert model[0].times > times, "asked all the same"
    model[0].weight = nn.Parameter(torch.ones(3, 3))
    assert Counts.registrations == count + 1
    with pytest.raises(ShardingStateError, match=r"'0.weight' was replaced by a Parameter"):
        model(torch.ones(1, 3))


# ---- gradients


@pytest.mark.parametrize("sync", [(True,), (True, True), (False, True)], ids=str)
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)])
def test_one_ranks_gradients_have_no_graph(
    mesh: DeviceMesh, sync: tuple[bool, ...], last: bool, policy: MixedPrecisionPolicy | None
) -> None:
    """They are autograd's own tensors, or sums of their casts, but not its history."""
    linear = fully_shard(nn.Linear(3, 7, bias=False), mesh=mesh, mp_policy=policy)
    (param,) = require_record(linear).unit.own_groups[0].params
    for number, value in enumerate(sync):
        linear.set_requires_gradient_sync(value)
        create_graph = last or number < len(sync) - 1
        linear(torch.ones(1, 3)).sin().sum().backward(create_graph=create_graph)
        summed = param.accumulated
        assert summed is None or summed.grad_fn is None, "nobody can reach its graph"
    linear.reshard()  # a graph that was recorded last holds the gathered form
    grad = linear.weight.grad
    assert isinstance(grad, DTensor)
    assert not grad._local_tensor.requires_grad
    plain = linear.weight.full_tensor().detach()
    expected = len(sync) * plain.sum(1, keepdim=True).cos().expand(7, 3)
    assert torch.allclose(grad.to_local(), expected, rtol=1e-5 if policy is None else 2**-5)


@pytest.mark.parametrize(
    ("compute", "reduce"),
    [
        (None, None),
        (None, torch.float32),
        (None, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_one_rank_accumulates_in_the_reduce_dtype_or_that_of_the_shard(
    mesh: DeviceMesh, compute: torch.dtype | None, reduce: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(compute, reduce)
    linear = fully_shard(nn.Linear(3, 7, bias=False), mesh=mesh, mp_policy=policy)
    for value, sync in ((1.0, False), (1 / 1024, False), (1 / 1024, True)):
        linear.set_requires_gradient_sync(sync)
        linear(torch.full((1, 3), value)).sum().backward()
    grad = linear.weight.grad
    assert isinstance(grad, DTensor)
    assert grad.dtype is torch.float32
    assert grad.to_local().eq(1 + 2 / 1024).all()  # in bf16 the sum would stay 1


def test_hooks_run_once_the_sum_is_there(mesh: DeviceMesh) -> None:
    linear = fully_shard(nn.Linear(3, 7, bias=False), mesh=mesh)
    seen: list[float] = []
    linear.weight.register_post_accumulate_grad_hook(
        lambda param: seen.append(param.grad.to_local()[0, 0].item())
    )
    rows = []
    for _ in range(3):
        linear(torch.ones(1, 3)).sum().backward()
        linear.reshard()
        rows.append(linear.weight.grad.to_local().data_ptr())
    assert seen == [1.0, 2.0, 3.0]
    assert len({*rows}) == 1, "added in place"
