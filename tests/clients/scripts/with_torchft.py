"""torchft: two replica groups of two ranks, which the script starts. Argument: a case.

`fully_shard` shards within a group. torchft's managed process group averages across the groups that
are alive: gradients by an all-reduce hook, as torchft's own test and torchtitan do, or parameters
by LocalSGD and DiLoCo. The groups are made with different parameters: before the first step torchft
heals each rank from the same rank of the group that it chose for it.
"""

import datetime
import sys

import torch
import torch.distributed as dist
from common import finish, report_classes, report_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.process_group import ManagedProcessGroup

GROUPS, RANKS = 2, 2  # ranks of each group
STEPS = 6
SYNC_EVERY = 2  # steps between averages of LocalSGD and DiLoCo
HOST = "localhost"
TIMEOUT = datetime.timedelta(seconds=60)


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 8))
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model


def manage(model, optimizer, group, port, lighthouse):
    """The manager of one rank, with what it sends to a group that joins."""

    def state_dict():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=GROUPS,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        use_async_quorum=False,  # a group has what it is sent before its forward
        replica_id=f"group_{group}",
        store_addr=HOST,
        store_port=port,
        rank=dist.get_rank(),
        world_size=RANKS,
        lighthouse_addr=lighthouse,
        hostname=HOST,
    )


def steps(case, model, optimizer, group):
    for step in range(STEPS):
        torch.manual_seed(1000 * step + RANKS * group + dist.get_rank())
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        if group == 0:  # group 1 is in them: its gradients or parameters are averaged in
            report_loss(case, loss)
        loss.backward()
        optimizer.step()


def hooked(case, model, optimizer, manager, group):
    """Gradients are averaged across the groups, unit by unit, during backward."""
    replicas = ManagedProcessGroup(manager)

    def average(gradient):
        dist.all_reduce(gradient, group=replicas, op=dist.ReduceOp.AVG)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(average)
    steps(case, model, Optimizer(manager, optimizer), group)
    assert manager.current_step() == STEPS


def local_sgd(case, model, optimizer, manager, group):
    with LocalSGD(manager, model, optimizer, sync_every=SYNC_EVERY):
        steps(case, model, optimizer, group)
    assert manager.current_step() == STEPS // SYNC_EVERY


def diloco(case, model, optimizer, manager, group):
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(manager, [model], optimizer, outer, sync_every=SYNC_EVERY):
        steps(case, model, optimizer, group)
    assert manager.current_step() == STEPS // SYNC_EVERY


def train(number, case, ports, lighthouse):
    """On one of all ranks; `number` counts over the groups."""
    group, rank = divmod(number, RANKS)
    store = dist.TCPStore(HOST, ports[group])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = make(seed=group)
    report_classes(case, model, number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = manage(model, optimizer, group, ports[group], lighthouse)
    globals()[case](case, model, optimizer, manager, group)
    dist.barrier()
    manager.shutdown(wait=False)
    finish()


if __name__ == "__main__":
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=GROUPS, join_timeout_ms=60_000)
    stores = [dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False) for _ in range(GROUPS)]
    ports = [store.port for store in stores]
    arguments = (sys.argv[1], ports, lighthouse.address())
    torch.multiprocessing.spawn(train, arguments, GROUPS * RANKS)
