"""Ranks that a script starts itself, in each of the ways there are. Arguments: cases."""

import os
import subprocess
import sys

import common
import torch
import torch.distributed as dist
from common import finish, report_classes
from torch import nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
STEPS = 3


def train(case):
    """On one rank, whoever started it."""
    run_steps(case)
    finish()


def run_steps(case):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    fully_shard(model[0])
    fully_shard(model)
    report_classes(case, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(model, step):
        torch.manual_seed(100 * step + dist.get_rank())
        return model(torch.randn(4, 8)).square().mean()

    common.train(case, model, optimizer, range(STEPS), loss_of)


def rank_variables(rank):
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}


def rank_process(rank, case):
    """Of `torch.multiprocessing`: the environment is the parent's."""
    os.environ.update(rank_variables(rank))
    train(case)


def spawn(case):
    torch.multiprocessing.spawn(rank_process, (case,), RANKS)


def fork(case):
    torch.multiprocessing.start_processes(rank_process, (case,), RANKS, start_method="fork")


def popen(case):
    """Rank 1 is a process of this script's, with its own environment added to."""
    environment = {**os.environ, **rank_variables(1)}
    subprocess.Popen([sys.executable, os.path.abspath(__file__), "--rank", case], env=environment)
    rank_process(0, case)


def torchrun(case):
    """All ranks are processes of torchrun's, which is one of this script's."""
    os.environ.pop("MASTER_PORT")
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    subprocess.run([sys.executable, *command, os.path.abspath(__file__), "--rank", case])


def accelerates(case):
    """accelerate's `debug_launcher`, which forks; `notebook_launcher` does on a CPU, too."""
    from accelerate import debug_launcher

    debug_launcher(train, (case,), RANKS)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        train(sys.argv[2])
    globals()[sys.argv[1]](sys.argv[1])
