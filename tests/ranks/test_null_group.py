"""The null process group: any world size, any runtime, and exact counts of calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp2.testing.blocks import tiny_blocks
from fsdp2.testing.null_group import CallLog, NullGroup, fill_gathered, init_null_group, null_mesh

# from torch 2.13 all_gather_into_tensor has a newer name
pytestmark = [pytest.mark.alone, pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")]

BLOCKS = 3


@pytest.fixture
def log() -> Iterator[CallLog]:
    """The log of every null group that a test makes; no default group is left behind."""
    assert not dist.is_initialized()
    yield CallLog()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [8, 1024])
def test_a_default_group_of_any_size(log: CallLog, world_size: int) -> None:
    """Object collectives give each rank what this one has."""
    group = init_null_group(world_size, observer=log)
    assert dist.group.WORLD is group
    assert (dist.get_rank(), dist.get_world_size()) == (0, world_size)
    assert dist.get_backend() == group.name() == "null"
    dist.barrier()
    assert log.counts() == {"barrier": 1}
    group.observer = None
    mine = {"rank": 0}
    for collect in (
        lambda into: dist.all_gather_object(into, mine),
        lambda into: dist.gather_object(mine, into),
    ):
        gathered: list[object] = [None] * world_size
        collect(gathered)
        assert gathered == [mine] * world_size
    objects = [mine]
    dist.broadcast_object_list(objects)
    assert objects == [mine]
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, list(range(world_size)))
    assert scattered == [0]
    assert log.counts() == {"barrier": 1}  # nobody observes any more


def test_another_rank(log: CallLog) -> None:
    init_null_group(8, rank=5)
    assert dist.get_rank() == 5
    assert null_mesh(8).get_local_rank() == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_no_data_moves(log: CallLog, dtype: torch.dtype) -> None:
    init_null_group(8)
    full, part = torch.zeros(16, dtype=dtype), torch.ones(2, dtype=dtype)
    dist.all_gather_into_tensor(full, part)
    assert full.eq(0).all()
    dist.reduce_scatter_tensor(part, full)
    dist.all_reduce(part)
    assert part.eq(1).all()
    work = dist.all_gather_into_tensor(full, part, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()


@pytest.mark.parametrize("own", [0, 2])
def test_what_is_gathered_can_be_filled_with_what_this_rank_has(log: CallLog, own: int) -> None:
    """Also where that lies in its own place already, as rank 0's does in fsdp2."""
    group = init_null_group(4, observer=fill_gathered)
    part, full = torch.tensor([1.0, 2.0]), torch.full((8,), torch.nan)
    in_place = torch.full((8,), torch.nan)
    piece = in_place.view(4, 2)[own].copy_(part)
    group.all_gather_single_coalesced([full, in_place], [part, piece])
    assert full.tolist() == in_place.tolist() == [1.0, 2.0] * 4
    bf16, nothing = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(0)
    group.all_gather_single(bf16, part.bfloat16())
    group.all_gather_single(nothing, nothing)
    assert bf16.tolist() == [1.0, 2.0] * 4


def test_coalesced_collectives_are_one_call(log: CallLog) -> None:
    group = init_null_group(8, observer=log)
    parts = [torch.ones(2), torch.ones(4)]
    fulls = [torch.zeros(16), torch.zeros(32)]
    with dist._coalescing_manager(group):
        for full, part in zip(fulls, parts, strict=True):
            dist.all_gather_into_tensor(full, part)
    assert log.counts() == {"all_gather_single_coalesced": 1}
    (call,) = log
    assert (call.tensors, call.nbytes) == (4, 4 * (2 + 4 + 16 + 32))


def test_both_generations_of_method_names(log: CallLog) -> None:
    group = init_null_group(8, observer=log)
    one, many = torch.ones(8), [torch.ones(8)]
    names = {
        "all_gather_single": (group._allgather_base, one),
        "reduce_scatter_single": (group._reduce_scatter_base, one),
        "all_gather_single_coalesced": (group.allgather_into_tensor_coalesced, many),
        "reduce_scatter_single_coalesced": (group.reduce_scatter_tensor_coalesced, many),
    }
    for name, (older, tensors) in names.items():
        older(tensors, tensors)
        getattr(group, name)(tensors, tensors)
    assert log.counts() == dict.fromkeys(names, 2)


@pytest.mark.parametrize("world_size", [8, 16384])
def test_a_mesh_of_the_default_group(log: CallLog, world_size: int) -> None:
    mesh = null_mesh(world_size)
    assert mesh.size() == world_size
    assert mesh.get_group() is dist.group.WORLD
    full = torch.arange(2.0 * world_size)
    tensor = distribute_tensor(full, mesh, [Shard(0)])
    assert torch.equal(tensor.to_local(), full[:2])
    assert tensor.full_tensor().shape == full.shape


def test_groups_of_two_dims_have_the_same_observer(log: CallLog) -> None:
    mesh = null_mesh((4, 256), mesh_dim_names=("replicate", "shard"), observer=log)
    group = mesh.get_group("shard")
    assert isinstance(group, NullGroup)
    assert (mesh.get_group("replicate").size(), group.size()) == (4, 256)
    dist.all_reduce(torch.ones(1), group=group)
    assert log.counts() == {"allreduce": 1}


def test_another_default_group_is_refused(log: CallLog) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match="'gloo'"):
        null_mesh(1)


@pytest.mark.parametrize("shape", [(8,), (16384,), (2, 4)], ids=str)
def test_torchs_fsdp2_on_it(log: CallLog, shape: tuple[int, ...]) -> None:
    """It gathers each block in forward and in backward, and reduces it once; between replicas, too.

    The root has no parameters.
    """
    model = tiny_blocks(BLOCKS, params_per_block=2, dim=16)
    model.reset_parameters()
    names = ("replicate", "shard")[-len(shape) :]
    mesh = null_mesh(shape, mesh_dim_names=names, observer=log)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    counts = {"all_gather_single": 2 * BLOCKS, "reduce_scatter_single": BLOCKS}
    if len(shape) == 2:
        counts["allreduce"] = BLOCKS
    for _ in range(2):
        log.clear()
        output = model(torch.randn(4, 16))
        block = 2 * max(16, shape[-1]) * 16 * 4  # bytes of two fp32 parameters, padded
        assert [call.nbytes for call in log] == [block + block // shape[-1]] * BLOCKS
        output.sum().backward()
        assert log.counts() == counts
        assert all(param.grad is not None for param in model.parameters())
        model.zero_grad(set_to_none=True)
