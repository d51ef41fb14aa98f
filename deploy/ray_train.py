"""train_lm by Ray Train: Ray places the workers, and starts all of them again when one is lost.

    python deploy/ray_train.py --workers 16 --gpu -- --preset llama-8b --precision bf16
    python deploy/ray_train.py --workers 2 -- --preset tiny --steps 20        # on a CPU

What stands behind ``--`` is train_lm's. ``--storage`` is a folder that all nodes see; checkpoints
are there.

For a script of your own: call it in `train`. Ray Train has made the process group by then, with the
time-out of `TorchConfig`, and the device is the one of `ray.train.torch.get_device()`. It runs
`train` in a thread, in which Python takes no signals: a `Preemption` there has to be told
(`request`), and a node that Ray drains costs the steps since the last checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(config: dict[str, Any]) -> None:
    """On every worker. Ray has set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and their like."""
    from fsdp2.examples import train_lm

    code = train_lm.run_rank(config["arguments"])
    if code:
        raise SystemExit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description="train_lm by Ray Train.")
    parser.add_argument("--workers", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--gpu", action="store_true", help="one GPU per rank")
    parser.add_argument("--name", default="train_lm", help="of the run (default train_lm)")
    parser.add_argument("--storage", default="/tmp/runs", help="a folder that all nodes see")
    parser.add_argument("--failures", type=int, default=3, help="restarts at most (default 3)")
    parser.add_argument("--timeout", type=int, default=600, help="of a collective, in seconds")
    parser.add_argument("arguments", nargs="*", help="train_lm's")
    options = parser.parse_args()
    folder = f"{options.storage}/{options.name}"
    arguments = [*options.arguments, "--checkpoint", f"{folder}/steps", "--resume"]
    TorchTrainer(
        train,
        train_loop_config={"arguments": arguments},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=options.failures),
        ),
        torch_config=TorchConfig(
            backend="nccl" if options.gpu else "gloo", timeout_s=options.timeout
        ),
    ).fit()


if __name__ == "__main__":
    sys.exit(main())
