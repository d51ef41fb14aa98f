"""What each of many ranks holds, one rank at a time in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
from fsdp2.testing.null_group import null_mesh, null_world

pytestmark = pytest.mark.alone

SHAPES = [(1,), (3,), (7, 2), (8, 8), (1000, 3), (30, 16), (4, 5, 6), (2, 0)]


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
        (report,) = fsdp2.report(model).groups
        locals_ = [p.to_local() for p in model.parameters() if p.to_local().numel()]
        start = min(local.data_ptr() for local in locals_)
        end = max(local.data_ptr() + local.nbytes for local in locals_)
        assert end - start <= report.shard_bytes
        assert all(local.untyped_storage().nbytes() == local.nbytes for local in locals_)


# ---- zero_grad


class _Shared(nn.Module):
    """A module in two places, a tied parameter, one that is None and one that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.absent: nn.Module | None = None
        self.own = nn.Parameter(torch.ones(8))
        self.alone = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.again(self.first(x))) * self.own * self.alone


class _Hides(_Shared):
    """Its own idea of what its parameters are."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (param for param in super().parameters(recurse) if param is not self.own)


@pytest.mark.parametrize("kind", [_Shared, _Hides])
def test_zero_grad_drops_what_torchs_does(kind: type[nn.Module]) -> None:
    with null_world(2):
        model = kind()
        fsdp2.fully_shard(model, mesh=null_mesh(2), ignored_params={model.alone})
        model(torch.ones(2, 8)).sum().backward()
        model.reshard()
        params = dict(model.named_parameters())
        assert all(param.grad is not None for param in params.values())
        model.zero_grad()
        kept = {name for name, param in params.items() if param.grad is not None}
        assert kept == ({"own"} if kind is _Hides else set())
