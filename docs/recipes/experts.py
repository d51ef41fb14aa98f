"""Train a mixture of experts with 21 billion parameters on 8 GPUs.

torchrun --nproc-per-node 8 experts.py --data tokens.bin
torchrun --nproc-per-node 4 experts.py --tiny
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single_autograd,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
from fsdp2 import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument(
    "--data", default="tokens.bin", help="int32 tokens, as for llama_8b.py"
)
parser.add_argument("--out", default="out")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument(
    "--batch-size",
    type=int,
    default=8,
    help="sequences per step, of all ranks",
)
parser.add_argument(
    "--ep",
    type=int,
    default=4,
    help="ranks that split the experts of a layer",
)
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
DIM, LAYERS, FFN, HEADS, KV, HEAD, VOCAB = (
    2880,
    24,
    2880,
    64,
    8,
    64,
    201088,
)
EXPERTS, ACTIVE, SEQ, LR = 32, 4, 4096, 3e-4
if args.tiny:
    DIM, LAYERS, FFN, HEADS, KV, HEAD, VOCAB = 64, 2, 64, 4, 2, 16, 256
    EXPERTS, ACTIVE, SEQ, LR, args.batch_size = 8, 2, 32, 3e-3, 4

kind = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
if kind == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
data_mesh = init_device_mesh(kind, (ranks,), mesh_dim_names=("dp",))
# Ranks of ep have different experts, and exchange tokens; ranks of efsdp
# shard the same experts.
mesh = init_device_mesh(
    kind, (ranks // args.ep, args.ep), mesh_dim_names=("efsdp", "ep")
)
if args.tiny and rank == 0 and not os.path.exists(args.data):
    (torch.arange(4000) ** 2 % 251).int().numpy().tofile(args.data)
dist.barrier()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, DIM, 2 * FFN))
        self.down = nn.Parameter(torch.empty(EXPERTS, FFN, DIM))

    def reset_parameters(self):
        nn.init.normal_(self.up, std=DIM**-0.5)
        nn.init.normal_(self.down, std=FFN**-0.5)

    # rows sorted by expert; counts[e] rows are for expert e
    def forward(self, rows, counts):
        group, ep = mesh["ep"], mesh["ep"].size()
        # per rank and expert of this rank: rows that arrive
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group.get_group())
        send, receive = (
            c.view(ep, -1).sum(1).tolist() for c in (counts, theirs)
        )
        rows = all_to_all_single_autograd(rows, receive, send, group)
        expert = torch.arange(len(theirs), device=rows.device) % (
            EXPERTS // ep
        )
        # by rank -> by expert
        order = expert.repeat_interleave(theirs).argsort(stable=True)
        ends = theirs.view(ep, -1).sum(0).cumsum(0).int()
        up, down = (
            w.to_local() if isinstance(w, DTensor) else w
            for w in (self.up, self.down)
        )
        gate, value = F.grouped_mm(rows[order], up, offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * value, down, offs=ends)
        return all_to_all_single_autograd(
            out[order.argsort()], send, receive, group
        )


def rotate(x):
    half = x.size(-1) // 2
    turns = 1e4 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.size(-2), device=x.device)[:, None] * turns
    cos, sin, (a, b) = (
        angle.cos().to(x.dtype),
        angle.sin().to(x.dtype),
        x.chunk(2, -1),
    )
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm_experts = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV) * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, DIM, bias=False)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        qkv = (
            self.qkv(self.norm(x))
            .unflatten(-1, (-1, HEAD))
            .transpose(1, 2)
        )
        q, k, v = qkv.split([HEADS, KV, KV], 1)
        q, k = rotate(q), rotate(k)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))

        rows = self.norm_experts(x).flatten(0, 1)
        chances = self.router(rows).float().softmax(-1)
        weight, expert = chances.topk(ACTIVE)
        weight = (
            (weight / weight.sum(-1, keepdim=True)).flatten().to(x.dtype)
        )
        order = expert.flatten().argsort(stable=True)
        counts = F.one_hot(expert, EXPERTS).sum((0, 1))
        y = (
            self.experts(rows[order // ACTIVE], counts)
            * weight[order, None]
        )
        y = torch.zeros_like(rows).index_add(0, order // ACTIVE, y)

        # of tokens, over all ranks; it is 1 / EXPERTS if all are balanced
        share = counts.float()
        dist.all_reduce(share)
        balance = EXPERTS * (share / share.sum() * chances.mean(0)).sum()
        return x + y.view_as(x), balance


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(VOCAB, DIM),
            nn.Linear(DIM, VOCAB, bias=False),
        )
        self.blocks, self.norm = (
            nn.ModuleList(Block() for _ in range(LAYERS)),
            nn.RMSNorm(DIM),
        )

    def forward(self, tokens):
        x, total = self.embed(tokens), 0.0
        for block in self.blocks:
            x, balance = block(x)
            total = total + balance / LAYERS
        return self.head(self.norm(x)), total


with torch.device("meta"):
    model = Model()
policy = fsdp2.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
)
for i, block in enumerate(model.blocks):
    for name, param in list(block.experts.named_parameters()):
        part = distribute_tensor(param.detach(), mesh["ep"], [Shard(0)])
        setattr(block.experts, name, nn.Parameter(part))
    fsdp2.fully_shard(block.experts, mesh=mesh["efsdp"], mp_policy=policy)
    # as many ranks as have sent tokens
    block.experts.set_gradient_divide_factor(ranks)
    model.blocks[i] = fsdp2.fully_shard(
        checkpoint_wrapper(block), mesh=data_mesh, mp_policy=policy
    )
fsdp2.fully_shard(model, mesh=data_mesh, mp_policy=policy)
# experts are large, and attention before them is short
model.set_tuning(prefetch_window=2)
model.to_empty(device=kind)
torch.manual_seed(0)  # the same weights on every number of ranks
for module in model.modules():
    if hasattr(module, "reset_parameters"):
        with fsdp2.gathered(module, recurse=False):
            module.reset_parameters()

optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
start = (
    checkpoint.load(args.out, model, optimizer).step
    if checkpoint.steps(args.out)
    else 0
)
tokens = torch.from_file(
    args.data, size=os.path.getsize(args.data) // 4, dtype=torch.int32
)
rows = tokens.unfold(0, SEQ + 1, SEQ)


def batch_of(step):
    """This rank's sequences of a step; each epoch has an order of its own."""
    epoch, at = divmod(step - 1, len(rows) // args.batch_size)
    order = torch.randperm(
        len(rows), generator=torch.Generator().manual_seed(epoch)
    )
    chosen = order[at * args.batch_size :][: args.batch_size][rank::ranks]
    return rows[chosen].to(kind).long()


for step in range(start + 1, args.steps + 1):
    batch = batch_of(step)
    logits, balance = model(batch[:, :-1])
    loss = F.cross_entropy(
        logits.flatten(0, 1).float(), batch[:, 1:].flatten()
    )
    (loss + 0.01 * balance).backward()
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % (1 if args.tiny else 10) == 0:
        mean = torch.stack([loss.detach(), balance.detach()]) / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean[0]:.6f} balance {mean[1]:.4f}")
    if step % 100 == 0 or step == args.steps:
        checkpoint.save(args.out, model, optimizer, step=step, keep=2)
dist.destroy_process_group()
