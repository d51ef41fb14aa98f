import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fsdp2

DIM, HEADS, TOKENS, END = 32, 2, 12, 0
gpu = torch.cuda.is_available()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if gpu
    else torch.device("cpu")
)
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    # keys and values of the tokens before x, or none
    def forward(self, x, cache):
        q, k, v = (
            self.qkv(self.norm(x))
            .unflatten(-1, (3, HEADS, -1))
            .permute(2, 0, 3, 1, 4)
        )
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=cache is None
        )
        return x + self.out(mixed.transpose(1, 2).flatten(2)), (k, v)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(TOKENS, DIM),
            nn.Linear(DIM, TOKENS),
        )
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens):
        return self.step(tokens, [None] * len(self.blocks))[0]

    def step(self, tokens, caches):  # the new tokens only
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x, caches[i] = block(x, caches[i])
        return self.head(x), caches


torch.manual_seed(0)
model = Model().to(device)
for block in model.blocks:
    fsdp2.fully_shard(block)
fsdp2.fully_shard(model)
fsdp2.register_fsdp_forward_method(model, "step")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(60):  # learn to count down to END
    start = torch.randint(1, TOKENS, (64, 1), device=device)
    tokens = (start - torch.arange(5, device=device)).clamp(min=END)
    loss = F.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def generate(tokens, limit):
    caches, new = [None] * len(model.blocks), tokens
    for count in range(1, limit + 1):
        logits, caches = model.step(new, caches)
        new = (
            logits[:, -1:]
            .argmax(-1)
            .masked_fill(tokens[:, -1:] == END, END)
        )
        tokens = torch.cat([tokens, new], 1)
        unfinished = (new != END).any().float()
        # ranks stop together
        dist.all_reduce(unfinished, dist.ReduceOp.MAX)
        if not unfinished:
            break
    return tokens.tolist(), count


model.eval()
units = [*model.blocks, model]
model.set_reshard_after_forward(False)  # keep what a forward has gathered
for unit in units:
    unit.unshard()
start = 5 + 4 * dist.get_rank()  # rank 1 needs more tokens than rank 0
found, count = generate(
    torch.tensor([[start, start - 1]], device=device), limit=20
)
for unit in units:
    unit.reshard()
model.set_reshard_after_forward(True)
model.train()
every = [None] * dist.get_world_size()
dist.all_gather_object(every, (found, count))
if dist.get_rank() == 0:
    for rank, (found, count) in enumerate(every):
        print(f"rank {rank}: {found[0]} in {count} steps")
dist.destroy_process_group()
