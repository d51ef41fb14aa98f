import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import fsdp2

MICRO_BATCHES, VOCABULARY, PADDING = 2, 32, -100
gpu = torch.cuda.is_available()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if gpu
    else torch.device("cpu")
)
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same data and weights on every rank
tokens = torch.randint(VOCABULARY, (64, 9))
for i, row in enumerate(tokens):
    row[2 + i % 8 :] = PADDING  # from 1 to 8 targets per sequence


def make_model():
    torch.manual_seed(1)
    blocks = [
        nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2)
    ]
    first, last = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
    return nn.Sequential(first, *blocks, last).to(device)


def loader_of(rank):
    sampler = DistributedSampler(
        tokens, num_replicas=ranks, rank=rank, shuffle=True, seed=0
    )
    sampler.set_epoch(0)  # the number of the epoch: another order in each
    return DataLoader(
        tokens, batch_size=4, sampler=sampler, drop_last=True
    )


def loss_of(model, batch, reduction):
    batch = batch.to(device)
    logits = model(batch[:, :-1].clamp(min=0)).flatten(0, 1)
    targets = batch[:, 1:].flatten()
    return F.cross_entropy(
        logits, targets, ignore_index=PADDING, reduction=reduction
    )


model = make_model()
units = [*model[1:3], model]
for unit in units:
    fsdp2.fully_shard(unit)
    # add the ranks' gradients: the loss is divided already
    unit.set_gradient_divide_factor(1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for batches in zip(*[iter(loader_of(rank))] * MICRO_BATCHES):
    count = sum((batch[:, 1:] != PADDING).sum() for batch in batches).to(
        device
    )
    dist.all_reduce(count)  # the targets in all micro-batches of all ranks
    total = torch.zeros((), device=device)
    for i, batch in enumerate(batches):
        model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
        loss = loss_of(model, batch, "sum") / count
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    losses.append(total.item())
weights = {
    name: weight.full_tensor()
    for name, weight in model.state_dict().items()
}

# the same in one process, with the batches of all ranks as one
if rank == 0:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rows = [
        torch.cat(batches)
        for batches in zip(*map(loader_of, range(ranks)))
    ]
    for step, sharded in enumerate(losses):
        batch = torch.cat(
            rows[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]
        )
        loss = loss_of(model, batch, "mean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(
            f"step {step}: loss {sharded:.4f}, in one process {loss.item():.4f}"
        )
    state = model.state_dict()
    print(
        "same weights:",
        all(
            torch.allclose(weights[n], state[n], atol=1e-6) for n in state
        ),
    )
dist.destroy_process_group()
