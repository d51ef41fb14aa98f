"""What each of many ranks holds, one rank at a time in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
from benchmarks.null_group import CallLog, init_null_group, null_mesh, null_world

SHAPES = [(1,), (3,), (7, 2), (8, 8), (1000, 3), (30, 16), (4, 5, 6), (2, 0)]


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Holder(nn.Module):
    """One parameter a shape, every element different."""

    def __init__(self) -> None:
        super().__init__()
        start = 0
        for number, shape in enumerate(SHAPES):
            numel = torch.Size(shape).numel()
            values = torch.arange(start, start + numel, dtype=torch.float32).view(shape)
            self.register_parameter(f"p{number}", nn.Parameter(values))
            start += numel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(p.sum() for p in self.parameters())


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("world_size", "rank"), [(2, 1), (3, 2), (4, 3), (64, 5), (1024, 1023)])
def test_each_rank_holds_what_dtensor_says(world_size: int, rank: int, dim: int) -> None:
    """`distribute_tensor` is the reference for which rows a rank holds, uneven shapes included."""
    with null_world(world_size, rank):
        mesh = init_device_mesh("cpu", (world_size,))
        plain, model = Holder(), Holder()

        def place(param: nn.Parameter) -> Shard | None:
            return Shard(dim) if param.ndim > dim else None

        fsdp2.fully_shard(model, mesh=mesh, shard_placement_fn=place)
        for name, param in model.named_parameters():
            whole = dict(plain.named_parameters())[name]
            placement = place(whole) or Shard(0)
            expected = distribute_tensor(
                whole.detach(), mesh, [placement], src_data_rank=None
            ).to_local()
            assert isinstance(param, DTensor)
            assert param.shape == whole.shape
            assert param.placements == (placement,)
            assert torch.equal(param.to_local(), expected)
            assert param.to_local().is_contiguous()


@pytest.mark.parametrize("world_size", [2, 8, 1024])
def test_one_flat_shard_backs_all_parameters(world_size: int) -> None:
    with null_world(world_size):
        model = fsdp2.fully_shard(Holder(), mesh=null_mesh(world_size))
        (report,) = fsdp2.group_reports(model)
        locals_ = [p.to_local() for p in model.parameters() if p.to_local().numel()]
        start = min(local.data_ptr() for local in locals_)
        end = max(local.data_ptr() + local.nbytes for local in locals_)
        assert end - start <= report.shard_bytes
        assert all(local.untyped_storage().nbytes() == local.nbytes for local in locals_)


def test_a_gather_and_a_reduction_are_one_call_each() -> None:
    """Even, aligned parameters on a backend that coalesces: the zero-copy path."""
    log = CallLog()
    init_null_group(8, observer=log)
    mesh = null_mesh(8)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for layer in model:
        fsdp2.fully_shard(layer, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    assert {r.transport for r in fsdp2.group_reports(model)} == {"coalesced"}
    log.clear()
    model(torch.randn(4, 32, requires_grad=True)).sum().backward()
    # Two layers, gathered in forward and in backward; each reduced once.
    assert log.counts() == {
        "all_gather_single_coalesced": 4,
        "reduce_scatter_single_coalesced": 2,
    }


def test_gathered_parameters_match_when_the_group_moves_data() -> None:
    """A group that gives every rank this rank's rows: the gathered rows repeat them."""

    def repeat(name: str, tensors: list[torch.Tensor]) -> None:
        outputs, inputs = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        for output, input_ in zip(outputs, inputs, strict=True):
            output.view(4, -1).copy_(input_.flatten())

    init_null_group(4, observer=repeat)
    model = fsdp2.fully_shard(nn.Linear(16, 16), mesh=null_mesh(4))
    rows = model.weight.to_local().clone()
    model.unshard()
    assert torch.equal(model.weight, rows.repeat(4, 1))
    model.reshard()
    assert isinstance(model.weight, DTensor)
