import json
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp2

gpu = torch.cuda.is_available()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if gpu
    else torch.device("cpu")
)
TOKENS, VOCABULARY, WIDTH = 1024, 8192, 128


class Block(nn.Sequential):
    def __init__(self):
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        super().__init__(nn.LayerNorm(WIDTH), up, nn.GELU(), down)

    def forward(self, x):
        return x + super().forward(x)


class Model(nn.Module):
    def __init__(self, chunks, recompute):
        super().__init__()
        self.chunks, self.recompute = chunks, recompute
        self.embed, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def loss_of(self, x, targets):
        return (
            nn.functional.cross_entropy(self.head(x), targets)
            / self.chunks
        )

    def forward(self, tokens):  # returns the loss
        x = self.embed(tokens)
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.recompute
                else block(x)
            )
        if self.chunks == 1:
            return self.loss_of(x, tokens)
        parts = zip(
            x.chunk(self.chunks), tokens.chunk(self.chunks), strict=True
        )
        return sum(
            checkpoint(self.loss_of, *part, use_reentrant=False)
            for part in parts
        )


def train(model, tokens):
    """Bytes that a step allocates at its peak, besides those before it."""
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # the first step also makes optimizer states
        if gpu:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        with torch.profiler.profile(profile_memory=not gpu) as recorded:
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    if gpu:
        return torch.cuda.max_memory_allocated() - held
    recorded.export_chrome_trace(f"step-{dist.get_rank()}.json")
    with open(f"step-{dist.get_rank()}.json") as file:
        events = [
            each
            for each in json.load(file)["traceEvents"]
            if each["name"] == "[memory]"
        ]
    events.sort(key=lambda event: event["ts"])
    return (
        torch.tensor([event["args"]["Bytes"] for event in events])
        .cumsum(0)
        .max()
        .item()
    )


machine = "h100" if gpu else "epyc-2core"
settings = [(1, False), (8, False), (8, True)]
plans = []
for chunks, recompute in settings:  # before there is a process group
    model, on = (
        partial(Model, chunks, recompute),
        {"mesh": 2, "hardware": machine},
    )
    plans.append(
        fsdp2.plan(
            model, lambda: torch.arange(TOKENS), units={Block}, **on
        ).memory
    )
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
for (chunks, recompute), memory in zip(settings, plans, strict=True):
    peak = (
        train(
            Model(chunks, recompute).to(device),
            torch.arange(TOKENS, device=device),
        )
        / 1e6
    )
    planned = (memory.peak.live - memory.before.live) / 1e6
    parts = [
        memory.peak.categories[name] / 1e6
        for name in ("activations", "temporary")
    ]
    if dist.get_rank() == 0:
        print(f"loss in {chunks} chunks, blocks recomputed: {recompute}")
        print(
            f"    a step adds {peak:.1f} MB; planned: {planned:.1f} MB",
            end="",
        )
        print(
            ", of which activations {:.1f} and temporary {:.1f}".format(
                *parts
            )
        )
dist.destroy_process_group()
