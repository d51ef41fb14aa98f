"""Two replica groups of two ranks, on torchft, beside a simulation: averages over participants.

    python groups_in_step.py CASE          steps, async or wrapper

The simulation trains one whole model on the average of all four ranks' gradients. Learning rate and
numbers of ranks are powers of two, so that both round alike. In the step `SHORT`, group 1 fails by
its own word, behind its backward: group 0 goes on, and group 1 heals.
"""

import datetime
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torchft
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchft.coordination import LighthouseServer

import fsdp2
from fsdp2 import elastic

GROUPS, RANKS, STEPS, SHORT = 2, 2, 6, 3
RATE = 0.125
HOST = "localhost"
TIMEOUT = datetime.timedelta(seconds=60)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 8))


def loss(model, step, group, rank):
    generator = torch.Generator().manual_seed(1000 * step + RANKS * group + rank)
    return model(torch.randn(4, 8, generator=generator)).square().mean()


def simulate():
    """What every group must end with."""
    model = make()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=RATE)
    for step in range(STEPS):
        averages = []
        for group in range(GROUPS):
            each = [torch.autograd.grad(loss(model, step, group, r), params) for r in range(RANKS)]
            averages.append([(a + b) / RANKS for a, b in zip(*each, strict=True)])
        for param, one, other in zip(params, *averages, strict=True):
            param.grad = (one + other) / GROUPS
        optimizer.step()
    return model.state_dict()


def train(case, model, optimizer, manager, group):
    """Returns the steps in which this group had to try again."""
    rank, again = dist.get_rank(), []
    wrapper = torchft.Optimizer(manager, optimizer)
    steps = elastic.attach(model, manager, () if case == "wrapper" else optimizer)
    failed = False
    while manager.current_step() < STEPS:
        before = manager.current_step()
        if case == "wrapper":
            wrapper.zero_grad()
        else:
            steps.begin()
        step = manager.current_step()
        loss(model, step, group, rank).backward()
        if case == "wrapper":
            wrapper.step()
        else:
            if step == SHORT and group == 1 and not failed:
                failed = True
                steps.fail(RuntimeError("of the user's code"))
            steps.commit()
        if manager.current_step() == before:
            again.append(step)
    return again


def work(case, group, rank, port, lighthouse, folder):
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = make()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    for module in (model[0], model[2], model):
        fsdp2.fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    transport = elastic.ShardTransport(model, optimizer, host=HOST)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=GROUPS,
        state_dict=transport.state_dict,
        load_state_dict=transport.load_state_dict,
        checkpoint_transport=transport,
        use_async_quorum=case == "async",
        init_sync=False,
        replica_id=f"group_{group}",
        store_addr=HOST,
        store_port=port,
        rank=rank,
        world_size=RANKS,
        lighthouse_addr=lighthouse,
        hostname=HOST,
    )
    again = train(case, model, optimizer, manager, group)
    full = {name: param.full_tensor() for name, param in model.state_dict().items()}
    if rank == 0:
        torch.save((full, again), Path(folder, str(group)))
    dist.barrier()
    manager.shutdown(wait=False)
    os._exit(0)  # gloo and a DeviceMesh may abort an interpreter that has finished


def main(case):
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=GROUPS, join_timeout_ms=60_000)
    stores = [dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False) for _ in range(GROUPS)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torchft", "fsdp2.elastic"])
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=work,
                args=(case, group, rank, stores[group].port, lighthouse.address(), folder),
            )
            for group in range(GROUPS)
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * len(processes)
        found = [torch.load(Path(folder, str(group))) for group in range(GROUPS)]
    expected = simulate()
    for group, (full, _) in enumerate(found):
        for name, value in expected.items():
            assert torch.equal(full[name], value), f"group {group}: {name}"
    again = [steps for _, steps in found]
    print(f"{GROUPS} groups are as simulated; tried again: {again}", flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
