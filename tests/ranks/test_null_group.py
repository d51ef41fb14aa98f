"""The null process group: any world size, any runtime, and exact counts of calls."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp2.testing.blocks import tiny_blocks
from fsdp2.testing.null_group import CallLog, NullGroup, fill_gathered, init_null_group, null_mesh

# from torch 2.13 all_gather_into_tensor has a newer name
pytestmark = [pytest.mark.alone, pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")]

WORLD_SIZES = (8, 1024, 16384)
BLOCKS = 3


@pytest.fixture
def log():
    """The log of every null group that a test makes; no default group is left behind."""
    assert not dist.is_initialized()
    yield CallLog()
    if dist.is_initialized():
        dist.destroy_process_group()


def make_model() -> nn.Module:
    model = tiny_blocks(BLOCKS, params_per_block=2, dim=16)
    model.reset_parameters()
    return model


def train_step(model: nn.Module) -> None:
    model(torch.randn(4, 16)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    model.zero_grad(set_to_none=True)


def shard(model: nn.Module, mesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# A model of three blocks and a root without parameters gathers each block in forward and again in
# backward, and reduces it once. torch's FSDP2 keeps nothing gathered but the root's own parameters.
FSDP2_STEP = {"all_gather_single": 2 * BLOCKS, "reduce_scatter_single": BLOCKS}


class TestGroup:
    @pytest.mark.parametrize("world_size", WORLD_SIZES)
    def test_is_the_default_group_of_any_size(self, log, world_size):
        group = init_null_group(world_size, observer=log)
        assert dist.group.WORLD is group
        assert (dist.get_rank(), dist.get_world_size()) == (0, world_size)
        assert dist.get_backend() == group.name() == "null"
        dist.barrier()
        assert log.counts() == {"barrier": 1}

    def test_can_be_another_rank(self, log):
        init_null_group(8, rank=5)
        assert dist.get_rank() == 5
        assert null_mesh(8).get_local_rank() == 5

    @pytest.mark.parametrize("world_size", WORLD_SIZES)
    def test_object_collectives_give_each_rank_its_own(self, log, world_size):
        init_null_group(world_size)
        mine = {"rank": 0}
        gathered = [None] * world_size
        dist.all_gather_object(gathered, mine)
        assert gathered == [mine] * world_size
        gathered = [None] * world_size
        dist.gather_object(mine, gathered)
        assert gathered == [mine] * world_size
        objects = [mine]
        dist.broadcast_object_list(objects)
        assert objects == [mine]
        scattered = [None]
        dist.scatter_object_list(scattered, list(range(world_size)))
        assert scattered == [0]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
    def test_no_data_moves(self, log, dtype):
        init_null_group(8)
        full, part = torch.zeros(16, dtype=dtype), torch.ones(2, dtype=dtype)
        dist.all_gather_into_tensor(full, part)
        assert full.eq(0).all()
        dist.reduce_scatter_tensor(part, full)
        dist.all_reduce(part)
        assert part.eq(1).all()
        work = dist.all_gather_into_tensor(full, part, async_op=True)
        work.wait()
        assert work.is_completed()

    @pytest.mark.parametrize("own", [0, 2])
    def test_what_is_gathered_can_be_filled_with_what_this_rank_has(self, log, own):
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

    def test_coalesced_collectives_are_one_call(self, log):
        group = init_null_group(8, observer=log)
        parts = [torch.ones(2), torch.ones(4)]
        fulls = [torch.zeros(16), torch.zeros(32)]
        with dist._coalescing_manager(group):
            for full, part in zip(fulls, parts, strict=True):
                dist.all_gather_into_tensor(full, part)
        assert log.counts() == {"all_gather_single_coalesced": 1}
        (call,) = log
        assert (call.tensors, call.nbytes) == (4, 4 * (2 + 4 + 16 + 32))

    def test_both_generations_of_method_names(self, log):
        group = init_null_group(8, observer=log)
        one, many = torch.ones(8), [torch.ones(8)]
        group._allgather_base(one, one)
        group.all_gather_single(one, one)
        group._reduce_scatter_base(one, one)
        group.reduce_scatter_single(one, one)
        group.allgather_into_tensor_coalesced(many, many)
        group.all_gather_single_coalesced(many, many)
        group.reduce_scatter_tensor_coalesced(many, many)
        group.reduce_scatter_single_coalesced(many, many)
        assert log.counts() == {
            "all_gather_single": 2,
            "reduce_scatter_single": 2,
            "all_gather_single_coalesced": 2,
            "reduce_scatter_single_coalesced": 2,
        }

    def test_observing_can_stop(self, log):
        group = init_null_group(8, observer=log)
        dist.barrier()
        group.observer = None
        dist.barrier()
        assert log.counts() == {"barrier": 1}


class TestMesh:
    @pytest.mark.parametrize("world_size", WORLD_SIZES)
    def test_one_dim_is_the_default_group(self, log, world_size):
        mesh = null_mesh(world_size)
        assert mesh.size() == world_size
        assert mesh.get_group() is dist.group.WORLD

    def test_two_dims_have_null_groups_with_the_same_observer(self, log):
        mesh = null_mesh((4, 256), mesh_dim_names=("replicate", "shard"), observer=log)
        group = mesh.get_group("shard")
        assert isinstance(group, NullGroup)
        assert (mesh.get_group("replicate").size(), group.size()) == (4, 256)
        dist.all_reduce(torch.ones(1), group=group)
        assert log.counts() == {"allreduce": 1}

    @pytest.mark.parametrize("world_size", WORLD_SIZES)
    def test_distribute_tensor(self, log, world_size):
        full = torch.arange(2.0 * world_size)
        tensor = distribute_tensor(full, null_mesh(world_size), [Shard(0)])
        assert torch.equal(tensor.to_local(), full[:2])
        assert tensor.full_tensor().shape == full.shape

    def test_refuses_another_default_group(self, log):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with pytest.raises(ValueError, match="'gloo'"):
            null_mesh(1)


class TestTraining:
    @pytest.mark.parametrize("world_size", WORLD_SIZES)
    def test_fsdp2_collectives_per_step(self, log, world_size):
        model = shard(make_model(), null_mesh(world_size, observer=log))
        for _ in range(3):
            log.clear()
            train_step(model)
            assert log.counts() == FSDP2_STEP

    def test_fsdp2_bytes(self, log):
        shard(make_model(), null_mesh(8, observer=log))(torch.randn(4, 16))
        parameters = 2 * 16 * 16 * 4  # bytes of a block's two fp32 parameters
        assert [call.nbytes for call in log] == [parameters + parameters // 8] * BLOCKS

    def test_hsdp_adds_one_all_reduce_a_group(self, log):
        model = shard(make_model(), null_mesh((2, 4), mesh_dim_names=("r", "s"), observer=log))
        train_step(model)
        assert log.counts() == {**FSDP2_STEP, "allreduce": BLOCKS}
