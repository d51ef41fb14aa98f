"""torchft: two replica groups of two ranks, which the script starts. Argument: a case.

hooked, local_sgd, diloco     as users of torchft have it, with any `fully_shard`
steps, async, wrapper         on `fsdp2.elastic`, beside a simulation

torchft's managed process group averages across the groups that are alive: gradients by an
all-reduce hook, as torchft's own test and torchtitan do, or parameters by LocalSGD and DiLoCo. The
groups are made with different parameters: before the first step torchft heals each rank from the
same rank of the group that it chose for it.

The simulation trains one whole model on the average of all four ranks' gradients. Learning rate and
numbers of ranks are powers of two, so that both round alike. In the step `SHORT`, group 1 fails by
its own word, behind its backward: group 0 goes on, and group 1 heals.
"""

import sys

import groups
import torch
import torch.distributed as dist
from common import finish, report_classes, report_loss
from groups import RANKS
from torch.distributed.fsdp import FSDPModule
from torchft import Optimizer
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.process_group import ManagedProcessGroup

GROUPS = 2
STEPS, SHORT = 6, 3
SYNC_EVERY = 2  # steps between averages of LocalSGD and DiLoCo
RATE = 0.125


def loss_of(model, step, group, rank):
    generator = torch.Generator().manual_seed(1000 * step + RANKS * group + rank)
    return model(torch.randn(4, 8, generator=generator)).square().mean()


# ---- with any `fully_shard`


class States:
    """What is sent to a group that joins."""

    def __init__(self, model, optimizer):
        self.parts = {"model": model, "optimizer": optimizer}

    def state_dict(self):
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state):
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def steps(case, model, optimizer, group):
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, group, dist.get_rank())
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


# ---- on `fsdp2.elastic`

AGAIN = {
    "wrapper": [[], []],  # which fails in no step
    "steps": [[], [SHORT]],  # the other group had its gradients, and committed
    "async": [[4], [SHORT]],  # one of two groups heals beside the next step: too few are left
}
"""The steps that each group has to try again."""


def simulate():
    """What every group must end with."""
    model = groups.make(0)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=RATE)
    for step in range(STEPS):
        averages = []
        for group in range(GROUPS):
            each = [
                torch.autograd.grad(loss_of(model, step, group, rank), params)
                for rank in range(RANKS)
            ]
            averages.append([(a + b) / RANKS for a, b in zip(*each, strict=True)])
        for param, one, other in zip(params, *averages, strict=True):
            param.grad = (one + other) / GROUPS
        optimizer.step()
    return model.state_dict()


def simulated(case, model, optimizer, manager, group):
    from fsdp2 import elastic

    wrapper = Optimizer(manager, optimizer)
    own = elastic.attach(model, manager, () if case == "wrapper" else optimizer)
    again = []
    while manager.current_step() < STEPS:
        before = manager.current_step()
        wrapper.zero_grad() if case == "wrapper" else own.begin()
        step = manager.current_step()
        loss_of(model, step, group, dist.get_rank()).backward()
        if case == "wrapper":
            wrapper.step()
        else:
            if step == SHORT and group == 1 and SHORT not in again:
                own.fail(RuntimeError("of the user's code"))
            own.commit()
        if manager.current_step() == before:
            again.append(step)
    assert again == AGAIN[case][group], f"group {group} tried {again} again"
    full = {name: param.full_tensor() for name, param in model.state_dict().items()}
    for name, value in simulate().items():
        assert torch.equal(full[name], value), f"group {group}: {name}"


# ---- a rank


def train(number, case, ports, lighthouse):
    """On one of all ranks; `number` counts over the groups."""
    torch.set_num_threads(1)
    group, rank = divmod(number, RANKS)
    groups.join(rank, ports[group])
    model = groups.sharded(seed=0 if case in AGAIN else group)
    report_classes(case, model, number)
    if case in AGAIN:
        from fsdp2 import elastic

        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        states = elastic.ShardTransport(model, optimizer, host=groups.HOST)
        options = {"checkpoint_transport": states, "init_sync": False}
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        states, options = States(model, optimizer), {}
    # Without an asynchronous quorum a group has what it is sent before its forward.
    options |= {"min_replica_size": GROUPS, "use_async_quorum": case == "async"}
    manager = groups.manage(group, ports[group], lighthouse, states, 60, **options)
    course = simulated if case in AGAIN else globals()[case]
    course(case, model, optimizer, manager, group)
    dist.barrier()
    manager.shutdown(wait=False)
    finish()


if __name__ == "__main__":
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=GROUPS, join_timeout_ms=60_000)
    stores = [groups.store() for _ in range(GROUPS)]
    arguments = (sys.argv[1], [store.port for store in stores], lighthouse.address())
    torch.multiprocessing.spawn(train, arguments, GROUPS * RANKS)
