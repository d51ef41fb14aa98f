"""What the code and figures of "Understand FSDP2" compute, computed here: docs/streams.md.

The schedule itself, who waits for whom, is in benchmarks/tests/test_streams.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp2
from tests.common.parity import assert_equal
from tests.common.workers import ranks

pytestmark = pytest.mark.ranks


class Place(NamedTuple):
    """Of a tensor when a collective was started with it."""

    begin: int
    nbytes: int
    numel: int

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        return cls(tensor.data_ptr(), tensor.nbytes, tensor.numel())

    def __contains__(self, other: object) -> bool:
        return isinstance(other, Place) and 0 <= other.begin - self.begin < self.nbytes


class Launches(TorchDispatchMode):
    """The collectives that are started: a name, and all tensors, outputs before inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[Place]]] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            places = [Place.of(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.seen.append((func.name().removeprefix("c10d::").strip("_"), places))
        return func(*args, **(kwargs or {}))

    def of(self, word: str) -> list[list[Place]]:
        """The tensors of each whose name begins with a word."""
        return [places for name, places in self.seen if name.startswith(word)]


class Numbers(nn.Module):
    """One parameter, 0 to 399, and a gradient that a rank chooses for each element."""

    def __init__(self, count: int = 400) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.arange(float(count)))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.numbers * gradient).sum()


@ranks(4)
def test_all_gather() -> None:
    """Of 400 numbers each rank holds 100 in a row, and behind the gather all of them."""
    rank = dist.get_rank()
    unit: Any = fsdp2.fully_shard(Numbers())
    mine = torch.arange(100.0 * rank, 100.0 * (rank + 1))
    assert_equal(unit.numbers.to_local().detach(), mine)
    unit.unshard()
    assert not isinstance(unit.numbers, DTensor)
    assert_equal(unit.numbers.detach(), torch.arange(400.0))
    unit.reshard()
    assert_equal(unit.numbers.to_local().detach(), mine)


@ranks(4)
def test_copy_in_is_a_view_of_the_gathers_output() -> None:
    """Where dtypes differ: the shard is cast into its own place. Else nothing is copied."""
    rank = dist.get_rank()
    for policy, copied in (
        (fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16), True),
        (fsdp2.MixedPrecisionPolicy(), False),
    ):
        unit: Any = fsdp2.fully_shard(Numbers(512), mp_policy=policy)  # whole places: no padding
        shard = Place.of(unit.numbers.to_local())
        with Launches() as launches:
            unit.unshard()
        ((output, *_, entry),) = launches.of("all")
        assert (output.numel, entry.numel) == (512, 128)
        assert (entry in output) == copied
        assert (entry in shard) != copied
        if copied:
            assert entry.begin == output.begin + 128 * rank * 2
        assert Place.of(unit.numbers) == output  # one parameter alone: nothing is copied out


@ranks(4)
def test_freed_parameters_keep_their_shapes() -> None:
    unit: Any = fsdp2.fully_shard(Numbers())
    unit.unshard()
    whole = unit.numbers
    assert whole.untyped_storage().nbytes() >= 1600
    unit.reshard()
    assert whole.untyped_storage().nbytes() == 0
    assert whole.shape == (400,)
    unit.unshard()
    assert unit.numbers is whole


@ranks(4)
def test_reduce_scatter() -> None:
    """Rank r has gradients [r0 | r1 | r2 | r3]; rank i ends with the mean of column i."""
    rank = dist.get_rank()
    unit: Any = fsdp2.fully_shard(Numbers())
    values = torch.tensor([[10.0 * r + i for i in range(4)] for r in range(4)])
    with Launches() as launches:
        unit(values[rank].repeat_interleave(100)).backward()
    assert len(launches.of("reduce_scatter")) == 1
    grad = unit.numbers.grad.to_local()
    assert_equal(grad, values[:, rank].mean().expand(100))


@ranks(4)
def test_gradients_are_views_of_one_output() -> None:
    """Two parameters of a unit; their shards' gradients lie behind each other."""
    unit: Any = nn.Linear(8, 8)
    fsdp2.fully_shard(unit)
    unit(torch.ones(2, 8)).sum().backward()
    grads = [param.grad.to_local() for param in unit.parameters()]
    (storage,) = {grad.untyped_storage().data_ptr() for grad in grads}
    assert [grad.data_ptr() - storage for grad in grads] == [0, 2 * 8 * 4]


@ranks(4)
def test_replicas_sum_what_shards_have_reduced() -> None:
    """HSDP: a reduce-scatter, then an all-reduce of its output; the mean of all four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    unit: Any = fsdp2.fully_shard(Numbers(), mesh=mesh)
    with Launches() as launches:
        unit(torch.full((400,), float(dist.get_rank()))).backward()
    names = [name.split("_")[0] for name, _ in launches.seen]
    assert names[-2:] == ["reduce", "allreduce"]
    scattered, reduced = launches.of("reduce_scatter")[0][0], launches.of("allreduce")[-1][0]
    assert scattered == reduced
    assert_equal(unit.numbers.grad.to_local(), torch.full((200,), 1.5))
