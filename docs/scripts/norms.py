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

torch.manual_seed(0)  # the same weights on every rank
blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]
model = nn.Sequential(*blocks, nn.Linear(32, 1)).to(device)
for layer in model:
    fsdp2.fully_shard(layer)
fsdp2.fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def norms_of_layers(layers):
    """One norm per layer, from one all-reduce; for parameters on a mesh of one dim."""
    squares = torch.zeros(len(layers), device=device)
    for i, layer in enumerate(layers):
        for param in layer.parameters():
            if param.grad is not None:
                squares[i] += param.grad.to_local().float().square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


torch.manual_seed(1 + dist.get_rank())  # different data on every rank
recorded = []
for step in range(1, 21):
    x = torch.randn(16, 32, device=device)
    loss = (model(x) - x[:, :1]).square().mean()
    loss.backward()
    layers = norms_of_layers(model)
    norm = fsdp2.clip_grad_norm_(model.parameters(), max_norm=0.5)
    recorded.append(torch.cat([norm[None], layers]))  # stays on the device
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        # the only synchronization in five steps
        rows = torch.stack(recorded).cpu()
        recorded.clear()
        clipped = (rows[:, 0] > 0.5).sum().item()
        if dist.get_rank() == 0:
            print(
                f"step {step:2}: mean norm {rows[:, 0].mean():.2f}, {clipped} of 5 steps clipped"
            )
            print(
                "    layers:",
                ", ".join(f"{norm:.2f}" for norm in rows.mean(0)[1:]),
            )
dist.destroy_process_group()
