"""Parameters of one unit on several meshes: experts that differ from rank to rank, dense ones not.

Four ranks, (data, ep) = (2, 2), four experts:

    rank                0      1      2      3
    dense weights       sharded over all four
    experts             0 1    2 3    0 1    2 3      sharded over {0, 2} and over {1, 3}

Each rank's loss is a mean over its own tokens, and the objective is the mean over ranks. The ranks
of an expert receive gradients from tokens of all four ranks, since tokens travel, but its group has
two members: it must divide by four all the same, which `set_gradient_divide_factor` says.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2 import FSDPMeshInfo, ShardPlacementResult
from tests.common import meshes, models, parity
from tests.common.workers import ranks

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo as TorchMeshInfo
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        ShardPlacementResult as TorchPlacementResult,
    )
except ImportError:  # torch 2.11
    TorchMeshInfo = TorchPlacementResult = None

needs_torchs = pytest.mark.skipif(
    TorchPlacementResult is None, reason="this torch has no ShardPlacementResult"
)
EXPERTS = 4


def _mesh() -> Any:
    return meshes.mesh("data", "ep", shape=(2, 2))


class _Travel(torch.autograd.Function):
    """Sends an equal share of rows to each rank of a group; gradients travel back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Travel.apply(grad, ctx.group), None


class Experts(nn.Module):
    """Token i goes to expert i % 4. With a group, this rank has half of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, models.DIM, models.DIM) / models.DIM**0.5)
        self.bias = nn.Parameter(torch.randn(EXPERTS, models.DIM))
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (
            p.to_local() if isinstance(p, DTensor) else p for p in (self.weight, self.bias)
        )
        by_expert = x.view(-1, EXPERTS, models.DIM).transpose(0, 1)
        if self.group is not None:
            received = _Travel.apply(by_expert, self.group)
            by_expert = received.view(2, EXPERTS // 2, -1, models.DIM)
        y = torch.einsum("...eti,eij->...etj", by_expert, weight) + bias[:, None]
        if self.group is not None:
            y = _Travel.apply(y.reshape(EXPERTS, -1, models.DIM), self.group)
        return y.transpose(0, 1).reshape(x.shape)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(models.DIM, models.DIM)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(torch.tanh(self.dense(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(models.DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BUILD = partial(models.seeded, Net)


def _mine(whole: Tensor) -> Tensor:
    """This rank's experts."""
    return whole.chunk(2)[_mesh().get_local_rank("ep")]


def _spread(model: Net, as_dtensors: bool) -> Net:
    """Leaves each rank its experts: as plain tensors, or as DTensors on the ep mesh."""
    for block in model.blocks:
        experts = block.experts
        experts.group = _mesh().get_group("ep")
        for name, param in list(experts.named_parameters()):
            whole = param.detach()
            held = (
                distribute_tensor(whole, _mesh()["ep"], [Shard(0)])
                if as_dtensors
                else _mine(whole).clone()
            )
            setattr(experts, name, nn.Parameter(held))
    return model


def _sharded(
    api: Any,
    *,
    as_dtensors: bool = False,
    dim: int = 0,
    factor: float | None = None,
    foreign: bool | None = None,
    **arguments: Any,
) -> Any:
    """One unit a block, its dense parameters on all ranks, its experts on half of them.

    `foreign` takes torch's own objects for the placement, as torch's FSDP2 does.
    """
    model = _spread(BUILD(), as_dtensors)
    torchs = api is not parity.OURS if foreign is None else foreign
    info = (TorchMeshInfo if torchs else FSDPMeshInfo)(_mesh()["data"], shard_mesh_dim=0)
    result = (TorchPlacementResult if torchs else ShardPlacementResult)(Shard(dim), info)
    experts = {p for block in model.blocks for p in block.experts.parameters()}

    def place(param: nn.Parameter) -> Any:
        return result if param in experts else None

    where = _mesh()._flatten("world") if as_dtensors else parity.world_mesh()
    for block in model.blocks:
        api.fully_shard(block, mesh=where, shard_placement_fn=place, **arguments)
        if factor is not None:
            block.set_gradient_divide_factor(factor)
    api.fully_shard(model, mesh=where, **arguments)
    return model


STEPS = meshes.micro_batches(models.DIM, 4, rows=32)
BATCH = STEPS[0][0]


def _train(api: Any, **arguments: Any) -> list[parity.Step]:
    return meshes.train_micro(_sharded(api, **arguments), STEPS)


def _plain(whole: bool = False) -> list[parity.Step]:
    """The unsharded model's steps, cut down to this rank's experts unless `whole`."""
    steps = meshes.train_plain(BUILD(), STEPS)
    if whole:
        return steps

    def cut(tensors: Any) -> Any:
        return {n: _mine(t) if "experts" in n else t for n, t in tensors.items()}

    return [parity.Step(step.loss, cut(step.grads), cut(step.params)) for step in steps]


# -- training -------------------------------------------------------------------------------------


@ranks(4)
@pytest.mark.parametrize("reshard_after_forward", [True, False, 2])
@pytest.mark.parametrize("dim", [0, 1])
def test_experts_and_dense_parameters_in_one_unit(dim: int, reshard_after_forward: Any) -> None:
    ours = _train(parity.OURS, dim=dim, factor=4.0, reshard_after_forward=reshard_after_forward)
    parity.assert_close(ours, _plain(), parity.FP32, "unsharded")


@ranks(4)
def test_without_the_factor_each_group_divides_by_its_own_size() -> None:
    """What the default does: experts' gradients are twice the objective's."""
    model = _sharded(parity.OURS)
    parity.regression_loss(model, parity.my_part(BATCH)).backward()
    grads = _plain()[0].grads
    expected = {name: grad * 2 if "experts" in name else grad for name, grad in grads.items()}
    parity.assert_close(parity.full_grads(model), expected, parity.FP32, "unsharded")


@needs_torchs
@ranks(4)
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_as_torch(mixed: bool) -> None:
    def scenario(api: Any) -> Any:
        policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = _sharded(api, **({"mp_policy": policy} if mixed else {}))
        parity.regression_loss(model, parity.my_part(BATCH)).backward()
        return meshes.specs(model), parity.full_grads(model)

    meshes.like_torch(scenario, parity.REORDERED_FP32)


@needs_torchs
@ranks(4)
def test_torchs_placement_objects_are_taken() -> None:
    theirs, ours = _sharded(parity.OURS, foreign=True), _sharded(parity.OURS)
    parity.assert_equal(meshes.specs(theirs), meshes.specs(ours), "torch's objects")


@ranks(4)
@pytest.mark.parametrize("dim", [0, 1])
def test_experts_that_are_dtensors_on_the_ep_mesh(dim: int) -> None:
    """As expert parallel styles make them: the sharded parameter then knows all experts."""
    ours = _train(parity.OURS, as_dtensors=True, dim=dim, factor=4.0)
    parity.assert_close(ours, _plain(whole=True), parity.FP32, "unsharded")


@ranks(4)
def test_every_parameter_on_another_mesh() -> None:
    """One group then, over the mesh that the function returned and not the one it was given."""
    layer = models.seeded(partial(nn.Linear, models.DIM, 4))
    info = FSDPMeshInfo(_mesh()["data"], shard_mesh_dim=0)
    parity.OURS.fully_shard(layer, shard_placement_fn=lambda p: ShardPlacementResult(None, info))
    assert layer.weight.device_mesh == _mesh()["data"]
    assert layer.weight.to_local().shape == (2, models.DIM)
    batch = parity.my_part(BATCH, _mesh().get_local_rank("data"), 2)
    with parity.CountCollectives() as count:
        parity.regression_loss(layer, batch).backward()
    assert (count.all_gathers, count.reduce_scatters) == (1, 1)


@ranks(4)
def test_copies_of_dense_parameters_and_shards_of_experts() -> None:
    """A 2-D mesh for the unit, with a 1-D one for the experts, and the other way around."""
    for own, other in ((_mesh(), _mesh()["data"]), (_mesh()["data"], _mesh())):
        model = models.seeded(partial(nn.Linear, models.DIM, 4))
        info = FSDPMeshInfo(other, other.ndim - 1, 0 if other.ndim == 2 else None)
        result = ShardPlacementResult(None, info)
        weight = model.weight
        parity.OURS.fully_shard(
            model,
            mesh=own,
            shard_placement_fn=lambda p, result=result, weight=weight: (
                result if p is weight else None
            ),
        )
        model.set_gradient_divide_factor(2.0)  # every rank of a row sees the same
        row = _mesh().get_local_rank("data")
        parity.regression_loss(model, parity.my_part(BATCH, row, 2)).backward()
        plain = models.seeded(partial(nn.Linear, models.DIM, 4))
        (expected,) = (step.grads for step in meshes.train_plain(plain, STEPS[:1], parts=2))
        # Summed over both ranks of a row where the mesh has copies along it.
        wide = "weight" if other.ndim == 2 else "bias"
        expected[wide] *= 2
        parity.assert_close(parity.full_grads(model), expected, parity.FP32, f"{own}")


# -- methods of a unit with several groups --------------------------------------------------------


@ranks(4)
def test_setters_reach_all_groups() -> None:
    reference = _train(parity.OURS, factor=4.0)
    model = _sharded(parity.OURS, factor=4.0)
    for block in model.blocks:
        block.set_force_sum_reduction_for_comms(True)
        block.set_keep_unsharded_storage(True)
        block.set_reduce_scatter_max_input_buffers(2)
        block.set_separate_reduce_scatter_group()
        block.set_allocate_memory_from_process_group_for_comm(True)
    model.set_reduce_scatter_unused_params(True)
    model.set_reshard_after_forward(False)
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    ours = meshes.train_micro(model, STEPS)
    parity.assert_close(ours, reference, parity.REORDERED_FP32, "with every setter")


@ranks(4)
def test_gradients_absent_from_one_group() -> None:
    """A group without gradients runs no collective; the other is reduced."""
    model = _sharded(parity.OURS, factor=4.0)
    for block in model.blocks:
        for param in block.experts.parameters():
            param.requires_grad_(False)
    loss = parity.regression_loss(model, parity.my_part(BATCH))
    with parity.CountCollectives() as count:
        loss.backward()
    assert count.reduce_scatters == 3
    grads = parity.full_grads(model)
    assert all((grad is None) == ("experts" in name) for name, grad in grads.items())


@ranks(4)
def test_what_is_refused_on_several_groups() -> None:
    model = _sharded(parity.OURS)
    block = model.blocks[0]

    class Gather(parity.OURS.AllGather):
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("never called")

    for method, argument in (
        ("set_custom_all_gather", Gather()),
        ("set_custom_reduce_scatter", Gather()),
        ("set_all_reduce_hook", print),
    ):
        with pytest.raises(ValueError, match=f"{method} cannot be used .* \\(2 groups\\)"):
            getattr(block, method)(argument)
    parity.regression_loss(model, parity.my_part(BATCH)).backward()  # nothing was changed
