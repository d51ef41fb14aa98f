import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import checkpoint, fully_shard

DIM, LAYERS, ROWS, MICRO_BATCHES = 16, 4, 8, 4
STAGES = {  # of the first half of the ranks, and of the second
    "ScheduleGPipe": ((0,), (1,)),
    "Schedule1F1B": ((0,), (1,)),
    "ScheduleInterleaved1F1B": ((0, 2), (1, 3)),
    "ScheduleInterleavedZeroBubble": ((0, 2), (1, 3)),
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (
            nn.Linear(DIM, 4 * DIM),
            nn.Linear(4 * DIM, DIM),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """The whole model, or the layers of one stage under the names that they have in it."""

    def __init__(self, stage=0, stages=1):
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank
        self.layers = nn.ModuleDict(
            {str(i): Layer() for i in range(LAYERS)}
        )
        for i in range(LAYERS):
            if i * stages // LAYERS != stage:
                del self.layers[str(i)]

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def loss_of(output, target):
    return (output - target).square().mean()


kind = "cuda" if torch.cuda.is_available() else "cpu"
device = torch.device(
    kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0
)
if kind == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("pp", "dp"))
pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")


def train(name):
    mine, count = STAGES[name][pp], sum(map(len, STAGES[name]))
    parts = [Model(index, count).to(device) for index in mine]
    for part in parts:
        for layer in part.layers.values():
            fully_shard(
                layer, mesh=mesh["dp"], reshard_after_forward=False
            )
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    stages = [
        pipelining.PipelineStage(
            part, index, count, device, group=mesh.get_group("pp")
        )
        for part, index in zip(parts, mine, strict=True)
    ]
    schedule = getattr(pipelining, name)(
        stages if len(stages) > 1 else stages[0],
        n_microbatches=MICRO_BATCHES,
        loss_fn=loss_of,
    )
    params = [param for part in parts for param in part.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    first, last = 0 in mine, count - 1 in mine

    whole = Model().to(device)  # the same model in one process, to compare
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(3):
        torch.manual_seed(1 + step)
        # [dp, rows, dim] each
        inputs, targets = torch.randn(2, 2, ROWS, DIM, device=device)
        losses = []
        schedule.step(
            *((inputs[dp],) if first else ()),
            **({"target": targets[dp], "losses": losses} if last else {}),
        )
        power = (
            fsdp2.optim.get_total_norm([param.grad for param in params])
            ** 2
        )
        dist.all_reduce(power, group=mesh.get_group("pp"))
        norm = power.sqrt()
        fsdp2.optim.clip_grads_with_norm_(params, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        mean = (
            torch.stack(losses).mean() / 2
            if last
            else torch.zeros((), device=device)
        )
        dist.all_reduce(mean)  # the last stage has the losses

        expected = loss_of(
            whole(inputs.flatten(0, 1)), targets.flatten(0, 1)
        )
        expected.backward()
        expected_norm = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        reference.step()
        reference.zero_grad()
    if dist.get_rank() == 0:
        print(
            f"{name:30} {mean:.4f} {norm:.4f}   {expected:.4f} {expected_norm:.4f}"
        )
    return parts, optimizer, whole


if dist.get_rank() == 0:
    print(f"{'third step':30} loss   norm     in one process")
for name in STAGES:
    parts, optimizer, whole = train(name)
    if name == "Schedule1F1B":  # a folder per stage, saved by its ranks
        group = mesh.get_group("dp")
        checkpoint.save(
            f"run-{pp}", parts[0], optimizer, step=3, process_group=group
        )
        checkpoint.load(
            f"run-{pp}", parts[0], optimizer, process_group=group
        )
        dist.barrier()
        loaded = Model()
        for stage in range(2):
            checkpoint.load(f"run-{stage}", loaded, strict=False)
        pairs = zip(
            loaded.parameters(), whole.cpu().parameters(), strict=True
        )
        same = all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)
if dist.get_rank() == 0:
    print("both stages loaded into one process:", same)
dist.destroy_process_group()
