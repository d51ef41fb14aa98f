import os

import torch
import torch.distributed as dist
from torch import nn

import fsdp2

gpu = torch.cuda.is_available()
device = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if gpu
    else torch.device("cpu")
)
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
VOCABULARY, WIDTH = 2048, 64


class Block(nn.Sequential):
    def __init__(self):
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        super().__init__(nn.LayerNorm(WIDTH), up, nn.GELU(), down)

    def forward(self, x):
        return x + super().forward(x)


def train(name, kinds):
    torch.manual_seed(0)
    blocks = [Block() for _ in range(8)]
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        *blocks,
        nn.Linear(WIDTH, VOCABULARY),
    ).to(device)
    for module in list(model.modules())[1:]:  # without the model itself
        if isinstance(module, kinds):
            fsdp2.fully_shard(module)
    fsdp2.fully_shard(model)
    tokens = torch.randint(VOCABULARY, (4, 32), device=device)
    # from the second step on, fsdp2 knows the order of units
    model(tokens).mean().backward()
    with fsdp2.trace("step.json") as trace:
        model(tokens).mean().backward()
    if dist.get_rank() == 0:
        units = len(fsdp2.report(model).groups)
        run = [each.operation for each in trace.timeline.slices]
        counts = f"{run.count('all-gather'):3} all-gathers {run.count('reduce-scatter'):3} reductions"
        gathered = fsdp2.tracing.summary("step.json").most["gathered"]
        print(
            f"{name:22} {units:3} units {counts}  gathered: {gathered:9,} bytes"
        )


train("the model", ())
train("blocks", Block)
train("blocks, embedding", (Block, nn.Embedding))
train("layers", (nn.Linear, nn.LayerNorm, nn.Embedding))
dist.destroy_process_group()
