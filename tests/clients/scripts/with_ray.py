"""Ray starts the ranks, with a path of their own: actors, or Ray Train. Arguments: a case."""

import contextlib
import os
import sys

import ray
import torch.distributed as dist
from common import SCRATCH
from with_launchers import RANKS, rank_variables, run_steps

HERE = os.path.dirname(os.path.abspath(__file__))


def train(case):
    """On one rank; what it reports goes to a file, as Ray takes what workers print."""
    with open(os.path.join(SCRATCH, f"worker{os.environ['RANK']}"), "w") as file:
        with contextlib.redirect_stdout(file):
            run_steps(case)
        dist.barrier()
        file.write("finished\n")


class Rank:
    def train(self, rank, case):
        os.environ.update(rank_variables(rank))
        train(case)


def ray_actors(case):
    made = [ray.remote(num_cpus=0)(Rank).remote() for _ in range(RANKS)]
    ray.get([each.train.remote(rank, case) for rank, each in enumerate(made)])


def ray_trainer(case):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        train,
        train_loop_config=case,
        scaling_config=ScalingConfig(num_workers=RANKS),
        run_config=RunConfig(storage_path=os.path.join(SCRATCH, "ray")),
    ).fit()


if __name__ == "__main__":
    environment = {
        "env_vars": {"PYTHONPATH": os.pathsep.join([HERE, *filter(None, sys.path)])},
        "worker_process_setup_hook": "fsdp2.install",
    }
    ray.init(num_cpus=2 * RANKS, include_dashboard=False, runtime_env=environment)
    globals()[sys.argv[1]](sys.argv[1])
    for rank in range(RANKS):
        with open(os.path.join(SCRATCH, f"worker{rank}")) as file:
            sys.stdout.write(file.read())
    sys.stdout.flush()
    ray.shutdown()
