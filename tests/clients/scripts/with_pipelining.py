"""torch.distributed.pipelining over sharded stages. Arguments: names of schedules.

2 ranks: 2 pipeline stages of one shard each; 4 ranks: 2 stages, 2 shards.
"""

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from common import report_classes, report_loss, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DIM = 12
MICROBATCHES = 4
STEPS = 3


class Stage(nn.Module):
    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def main(name):
    shards = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("pp", "dp"))
    place = mesh.get_local_rank("pp")
    looped = "Interleaved" in name
    count = 4 if looped else 2
    mine = [place, place + 2] if looped else [place]
    stages = []
    parameters = []
    for index in mine:
        module = Stage(index)
        for layer in module.layers:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        report_classes(name, module)
        parameters += module.parameters()
        device, group = torch.device("cpu"), mesh.get_group("pp")
        stages.append(pipelining.PipelineStage(module, index, count, device, group=group))
    schedule = getattr(pipelining, name)(
        stages if looped else stages[0],
        n_microbatches=MICROBATCHES,
        loss_fn=lambda output, target: (output - target).square().mean(),
    )
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for step in range(STEPS):
        torch.manual_seed(100 * step + mesh.get_local_rank("dp"))
        inputs, targets = torch.randn(2, 2 * MICROBATCHES, DIM)
        losses = []
        schedule.step(
            *((inputs,) if place == 0 else ()),
            **({"target": targets, "losses": losses} if place == 1 else {}),
        )
        norm = sum(p.grad.to_local().double().square().sum() for p in parameters)
        seen = torch.stack([*(loss.double() for loss in losses), norm]).sum()
        dist.all_reduce(seen)  # the losses are on the last stage, rank 0 reports
        report_loss(name, seen)
        optimizer.step()
        optimizer.zero_grad()


dist.init_process_group("gloo")
run(main)
