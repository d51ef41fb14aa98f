"""A script of your own that any launcher of this folder starts, survives and resumes.

    TRAIN=deploy/own_script.py NODES=1 NODE_RANK=0 MASTER_ADDR=localhost NPROC=2 \
        deploy/torchrun_static.sh --steps 20

Marked (1) to (6): what a script has to do itself. All else is a small model and data of no meaning.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import checkpoint, fully_shard

WIDTH = 32


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True, help="a folder that all nodes see, or a URL")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps from save to save")
    parser.add_argument("--inside-a-node", action="store_true", help="shard there, copy between")
    options = parser.parse_args()

    # (1) This rank's device, before anything is made on it.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    # (2) The process group: bound to the device (NCCL connects at once, and errors name it), and
    # with a time-out that is longer than the longest step or save, and not longer.
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
        timeout=datetime.timedelta(minutes=10),
    )

    # (3) The mesh: all ranks, or the ranks of a node as shards and the nodes as copies. Which one
    # is faster, and whether it fits, `fsdp2.plan` says (docs/guides/planning.md).
    if options.inside_a_node:
        shape, names = (world_size // local_size, local_size), ("replicate", "shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    else:
        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # (4) Where it stood: one command for the first start and for all others. Rank 0 says, as others
    # may see a shared folder a moment later.
    newest = [checkpoint.steps(options.checkpoint)[-1:] if options.resume else []]
    dist.broadcast_object_list(newest)
    start, preempted = 0, False
    if newest[0]:
        start = newest[0][0]
        checkpoint.load(options.checkpoint, model, optimizer, step=start)

    # (5) A signal to any rank saves the run, and ends it with a code that schedulers know.
    with checkpoint.Preemption() as preemption:
        for step in range(start, options.steps):
            # (6) Data as a function of the step, or a loader's state_dict() in `rank_extra`.
            data = torch.Generator().manual_seed(step * world_size + rank)
            inputs = torch.randn(8, WIDTH, generator=data).to(device)
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done = step + 1
            preempted = preemption.agreed() and done < options.steps
            if preempted or done % options.every == 0 or done == options.steps:
                checkpoint.save(options.checkpoint, model, optimizer, step=done, keep=2)
                if rank == 0:
                    print(f"step {done} loss {loss.item():.6f}, saved", flush=True)
            if preempted:
                break
    dist.destroy_process_group()
    return preemption.exit_code if preempted else 0


if __name__ == "__main__":
    sys.exit(main())
