import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
from fsdp2 import checkpoint, fully_shard

DIM, EXPERTS, TOKENS = 16, 8, 12


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(
            torch.randn(EXPERTS, DIM, 4 * DIM) / DIM**0.5
        )
        self.down = nn.Parameter(
            torch.randn(EXPERTS, 4 * DIM, DIM) / (4 * DIM) ** 0.5
        )
        self.ep = None  # the mesh over which experts are split

    # rows sorted by expert; counts[e] rows are for expert e
    def forward(self, rows, counts):
        if self.ep is None:
            return self.compute(rows, counts)
        # per rank and expert of this rank: rows that arrive
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.ep.get_group())
        send, receive = (
            c.view(self.ep.size(), -1).sum(1).tolist()
            for c in (counts, theirs)
        )
        rows = all_to_all_single_autograd(rows, receive, send, self.ep)
        expert = torch.arange(len(theirs), device=rows.device) % (
            EXPERTS // self.ep.size()
        )
        # by rank -> by expert
        order = expert.repeat_interleave(theirs).argsort(stable=True)
        out = self.compute(
            rows[order], theirs.view(self.ep.size(), -1).sum(0)
        )
        return all_to_all_single_autograd(
            out[order.argsort()], send, receive, self.ep
        )

    def compute(self, rows, counts):
        up, down = (
            p.to_local() if isinstance(p, DTensor) else p
            for p in (self.up, self.down)
        )
        parts = zip(rows.split(counts.tolist()), up, down, strict=True)
        return torch.cat(
            [torch.relu(part @ u) @ d for part, u, d in parts]
        )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.router = (
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, EXPERTS),
        )
        self.experts = Experts()

    def forward(self, x):
        x = x + torch.tanh(self.dense(x))
        # each token goes to one expert
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        y = self.experts(x[order], expert.bincount(minlength=EXPERTS))
        return x + weight[:, None] * y[order.argsort()]


def loss_of(model, x):
    return (model(x) - x.sum(-1, keepdim=True)).square().mean()


kind = "cuda" if torch.cuda.is_available() else "cpu"
if kind == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
dp = init_device_mesh(kind, (ranks,), mesh_dim_names=("dp",))
mesh = init_device_mesh(
    kind, (ranks // 2, 2), mesh_dim_names=("efsdp", "ep")
)

torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(*(Block() for _ in range(2)), nn.Linear(DIM, 1)).to(
    kind
)
whole = copy.deepcopy(model)  # the same model in one process, to compare
for block in model[:-1]:
    for name, param in list(block.experts.named_parameters()):
        param = nn.Parameter(
            distribute_tensor(param.detach(), mesh["ep"], [Shard(0)])
        )
        setattr(block.experts, name, param)
    block.experts.ep = mesh["ep"]
    fully_shard(block.experts, mesh=mesh["efsdp"])
    # as many ranks as have sent tokens
    block.experts.set_gradient_divide_factor(ranks)
    fully_shard(block, mesh=dp)
fully_shard(model, mesh=dp)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
reference = torch.optim.AdamW(whole.parameters(), lr=3e-3)

weight = model[0].experts.up
if rank == 0:
    print(
        f"experts.up {tuple(weight.shape)}, rank 0 keeps {tuple(weight.to_local().shape)}"
    )
    print(f"{weight.placements} on {weight.device_mesh.mesh_dim_names}")
    print("step     loss    norm   one process:     loss    norm")
for step in range(5):
    torch.manual_seed(1 + step)
    # each rank trains on one row
    tokens = torch.randn(ranks, TOKENS, DIM, device=kind)
    loss = loss_of(model, tokens[rank])
    loss.backward()
    norm = fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)

    # the tokens of all ranks
    expected = loss_of(whole, tokens.flatten(0, 1))
    expected.backward()
    expected_norm = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    reference.step()
    reference.zero_grad()
    if rank == 0:
        print(
            f"{step:4}  {mean:.4f} {norm:.4f}                {expected:.4f} {expected_norm:.4f}"
        )

checkpoint.save("run", model, optimizer, step=5)
loaded = copy.deepcopy(whole)
checkpoint.load("run", loaded)  # the same names, and all experts
if rank == 0:
    pairs = zip(loaded.parameters(), whole.parameters(), strict=True)
    print(
        "loaded into one process:",
        all(torch.allclose(a, b, atol=1e-4) for a, b in pairs),
    )
dist.destroy_process_group()
