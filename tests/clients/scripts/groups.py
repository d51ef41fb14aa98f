"""What the scripts about torchft share: replica groups of two ranks, sharded within each."""

import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchft import Manager, ProcessGroupGloo

RANKS = 2  # of each group
HOST = "localhost"


def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 8))


def sharded(seed, shard=fully_shard):
    model = make(seed)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    for module in (model[0], model[2], model):
        shard(module, mesh=mesh)
    return model


def store():
    """Where the ranks of a group find each other."""
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def join(rank, port, **options):
    """Join the process group of a replica group's ranks."""
    found = dist.TCPStore(HOST, port)
    dist.init_process_group("gloo", store=found, rank=rank, world_size=RANKS, **options)


def manage(group, port, lighthouse, states, seconds, **options):
    """The manager of this rank; ``states`` are what a group is sent that joins."""
    return Manager(
        pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=seconds)),
        state_dict=states.state_dict,
        load_state_dict=states.load_state_dict,
        replica_id=f"group_{group}",
        store_addr=HOST,
        store_port=port,
        rank=dist.get_rank(),
        world_size=RANKS,
        lighthouse_addr=lighthouse,
        hostname=HOST,
        **options,
    )
