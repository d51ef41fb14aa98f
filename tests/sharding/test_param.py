"""One parameter in its two forms, on a mesh of one rank that pretends to be any rank of four."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.core.device.buffers import FlatBuffer
from fsdp2.core.layout.layout import Cut, Slot
from fsdp2.core.layout.mesh import MeshAxes
from fsdp2.core.params.gradients import Gradients
from fsdp2.core.params.param import ModuleEntry, PlannedParam, ShardedParam
from fsdp2.core.progress import Counts
from fsdp2.errors import ShardingStateError
from fsdp2.sharding.meshes import resolve_axes

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def axis(mesh: DeviceMesh) -> MeshAxes:
    return resolve_axes(mesh)


def _linear(rows: int = 7) -> nn.Linear:
    linear = nn.Linear(3, rows, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(rows * 3.0).view(rows, 3))
    return linear


def _adopted(
    module: nn.Module,
    axis: MeshAxes,
    slots: list[ModuleEntry] | None = None,
    dim: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[ShardedParam, FlatBuffer, Slot]:
    """A managed ``module.weight`` whose rows are in a flat buffer."""
    axis = replace(axis, rank=rank, size=world_size)
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    param = ShardedParam(
        PlannedParam("block.weight", weight, slots or [(module, "weight")], axis, Cut(dim), None)
    )
    shape = tuple(weight.shape)
    slot = Slot(0, shape, Cut(dim), world_size, 0, 0)
    buffer = FlatBuffer(slot.shard_numel * 4, CPU)
    param.adopt(slot, buffer.view(weight.dtype, 0, slot.local_shape(rank)))
    return param, buffer, slot


# ---- the sharded form


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


def test_unusable_on_meta_until_it_has_memory(axis: MeshAxes) -> None:
    with torch.device("meta"):
        linear = nn.Linear(3, 7, bias=False)
    weight = linear.weight
    assert isinstance(weight, nn.Parameter)
    param = ShardedParam(
        PlannedParam("block.weight", weight, [(linear, "weight")], axis, Cut(0), None)
    )
    assert param.is_meta
    slot = Slot(0, (7, 3), Cut(0), 1, 0, 0)
    param.adopt(slot, FlatBuffer(84, torch.device("meta")).view(torch.float32, 0, (7, 3)))
    with pytest.raises(ShardingStateError, match=r"'block.weight' is still on the meta device; "):
        param.check_usable(CPU)
    linear.to_empty(device="cpu")
    param.follow_registered()
    assert not param.is_meta
    param.check_usable(CPU)


# ---- gradients


def _with_unsharded(axis: MeshAxes, dtype: torch.dtype = torch.float32) -> ShardedParam:
    param, _, _ = _adopted(_linear(), axis)
    param.materialize(torch.zeros(7, 3, dtype=dtype))
    return param


def _leave(param: ShardedParam, value: float) -> None:
    """What autograd does: make ``.grad``, or add to it."""
    unsharded = param.unsharded
    assert unsharded is not None
    grad = torch.full_like(unsharded, value)
    unsharded.grad = grad if unsharded.grad is None else unsharded.grad + grad


def test_low_precision_gradients_are_summed_in_the_reduce_dtype(axis: MeshAxes) -> None:
    param = _with_unsharded(axis, torch.bfloat16)
    for _ in range(3):
        _leave(param, 1.0)
        param.accumulate(torch.float32)
        _leave(param, 1 / 256)  # 1 + 1/256 is not a bf16 number
        param.accumulate(torch.float32)
        assert param.unsharded is not None
        assert param.unsharded.grad is None
    _leave(param, 1 / 256)
    (grad,) = Gradients([param]).take(False)
    assert grad is not None
    assert grad.dtype is torch.float32
    assert grad.eq(3 + 4 / 256).all()
    assert param.accumulated is None


def test_sums_over_backwards_record_no_graph(axis: MeshAxes) -> None:
    """Gradients of a backward with ``create_graph=True`` have one, which nobody can reach there."""
    param = _with_unsharded(axis, torch.bfloat16)
    assert param.unsharded is not None
    for _ in range(2):
        param.unsharded.sin().sum().backward(create_graph=True)
        param.accumulate(torch.float32)
        assert param.accumulated is not None
        assert param.accumulated.grad_fn is None
    (grad,) = Gradients([param]).take(True)
    assert grad is not None
    assert grad.eq(2).all()


@pytest.mark.parametrize("sync", [(True,), (True, True), (False, True)], ids=str)
@pytest.mark.parametrize("last", [True, False])
def test_one_ranks_gradients_have_no_graph(
    mesh: DeviceMesh, sync: tuple[bool, ...], last: bool
) -> None:
    """They are autograd's own tensors, but not its history: as on several ranks."""
    linear = fully_shard(nn.Linear(3, 7, bias=False), mesh=mesh)
    for number, value in enumerate(sync):
        linear.set_requires_gradient_sync(value)
        create_graph = last or number < len(sync) - 1
        linear(torch.ones(1, 3)).sin().sum().backward(create_graph=create_graph)
    linear.reshard()  # a graph that was recorded last holds the gathered form
    grad = linear.weight.grad
    assert isinstance(grad, DTensor)
    assert not grad._local_tensor.requires_grad
    plain = linear.weight.full_tensor().detach()
    assert torch.allclose(
        grad.to_local(), len(sync) * plain.sum(1, keepdim=True).cos().expand(7, 3)
    )


def test_delivered_rows_become_grad_and_later_ones_are_added_by_the_caller(
    axis: MeshAxes,
) -> None:
    param = _with_unsharded(axis)
    seen: list[Any] = []
    param.sharded.register_post_accumulate_grad_hook(seen.append)
    rows = torch.ones(7, 3)
    assert Gradients([param]).deliver([rows], [True]) == []
    grad = param.sharded.grad
    assert isinstance(grad, DTensor)
    assert grad.placements == (Shard(0),)
    assert grad._local_tensor is rows
    assert len(seen) == 1
    more = torch.ones(7, 3)
    ((waiting, there, addend),) = Gradients([param]).deliver([more], [True])
    assert waiting is param
    assert there is rows
    assert addend is more
    assert len(seen) == 1  # the caller adds first, then runs the hooks
    param.run_hooks()
    assert [id(seen_param) for seen_param in seen] == [id(param.sharded)] * 2


@pytest.mark.parametrize("reduce", [None, torch.float32, torch.bfloat16])
def test_one_rank_accumulates_in_the_dtype_of_the_shard(
    mesh: DeviceMesh, reduce: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=reduce)
    linear = fully_shard(nn.Linear(3, 7, bias=False), mesh=mesh, mp_policy=policy)
    for value, sync in ((1.0, False), (1 / 256, False), (1 / 256, True)):
        linear.set_requires_gradient_sync(sync)
        linear(torch.full((1, 3), value)).sum().backward()
    grad = linear.weight.grad
    assert isinstance(grad, DTensor)
    assert grad.dtype is torch.float32
    assert grad.to_local().eq(1 + 2 / 256).all()  # in bf16 the sum would stay 1
