import os

import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import checkpoint

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

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 1)
).to(device)
for layer in model:
    fsdp2.fully_shard(layer)
fsdp2.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)

start = 0
# complete steps; a load from an empty folder raises an error
if checkpoint.steps("run"):
    found = checkpoint.load("run", model, optimizer)
    scheduler.load_state_dict(found.extra["scheduler"])
    start = found.step
    if rank == 0:
        print(f"step {start} of run, loaded on {ranks} ranks")
for step in range(start + 1, start + 11):
    # 12 rows per step, whatever the number of ranks
    torch.manual_seed(step)
    x = torch.randn(12, 64, device=device).chunk(ranks)[rank]
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
mean = loss.detach() / ranks
dist.all_reduce(mean)
extra = {"scheduler": scheduler.state_dict()}
checkpoint.save("run", model, optimizer, step=step, extra=extra, keep=3)
# safetensors files
checkpoint.export(f"weights-{step}", model, dtype=torch.bfloat16)
if rank == 0:
    print(f"step {step} of run, saved on {ranks} ranks; loss {mean:.2f}")
    print(f"weights-{step}:", os.listdir(f"weights-{step}"))
dist.barrier()
dist.destroy_process_group()
