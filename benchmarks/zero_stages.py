"""What each strategy of `shard_model` holds and sends: ZeRO's stages, measured on four gloo ranks.

    python benchmarks/zero_stages.py
    python benchmarks/zero_stages.py --json benchmarks/results/zero/DATE.json

Shards are fp32, which is AdamW's master copy; parameters and gradients are bf16 where they are
whole. A step has two micro-batches, of which the second reduces. Theory, in bytes a parameter over
n ranks: 12 of optimizer and master copy, 2 of the parameter, 2 of its gradient.

- held: this process's resident memory, less what it had before the model, a parameter. Between the
  micro-batches, where whole gradients wait, and after the optimizer's step. A tiny model is trained
  first: what a process loads at its first step (modules, kernels, threads) is no state of a model.
- sent: bytes a parameter that a rank's collectives send in a step, by the sizes of their tensors,
  as a ring sends them: an all-gather or a reduce-scatter (n - 1) / n of the whole, an all-reduce
  twice that. Gradients are reduced in bf16.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp2
from benchmarks import stats

RANKS, DIM, LAYERS, MICRO = 4, 1024, 16, 2
STRATEGIES = ("replicated", "zero1", "zero2", "zero3")
WHOLE = "a whole parameter and its gradient are 2 bytes each, the rest 12"


class Sent(TorchDispatchMode):
    """Bytes that this rank's collectives send while it is entered."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().replace("_", "") if func.namespace == "c10d" else ""
        sizes = [leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if "allgather" in name or "reducescatter" in name:  # n shares as outputs, one as input
            self.total += (sum(sizes) * RANKS / (RANKS + 1)) * (RANKS - 1) / RANKS
        elif "allreduce" in name:
            self.total += 2 * sum(sizes) * (RANKS - 1) / RANKS
        return func(*args, **(kwargs or {}))


def resident() -> int:
    """This process's memory, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(rank: int, strategy: Any, folder: str) -> None:
    """One rank of one strategy; writes what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    loaded = resident()
    train(strategy, dim=64, layers=2)
    loaded = resident() - loaded
    held = train(strategy, DIM, LAYERS)
    held["loaded"] = float(loaded)
    Path(folder, f"{rank}.json").write_text(json.dumps(held))
    dist.barrier()
    dist.destroy_process_group()


def train(strategy: Any, dim: int, layers: int) -> dict[str, float]:
    """Three steps of a model; what it held and sent, in bytes a parameter."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(layers)))
    numel = sum(param.numel() for param in model.parameters())
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    before = resident()
    fsdp2.shard_model(model, {nn.Linear}, strategy=strategy, mp_policy=policy)
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.normal_(param, std=dim**-0.5)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    held: dict[str, float] = {}
    with Sent() as sent:
        for _ in range(3):
            sent.total = 0.0
            for micro in range(MICRO):
                model.set_requires_gradient_sync(micro == MICRO - 1)  # type: ignore[operator]
                model(torch.ones(1, dim)).square().mean().backward()
                if micro == 0:
                    held["between"] = (resident() - before) / numel
            optimizer.step()
            optimizer.zero_grad()
            held["after"] = (resident() - before) / numel
    held["sent"] = sent.total / numel
    return held


def theory(strategy: str) -> dict[str, float]:
    """The same by arithmetic. Whole gradients wait in bf16; zero3's root keeps nothing whole."""
    share, sends = 1 / RANKS, (RANKS - 1) / RANKS
    gathers = {"replicated": 0, "zero1": 1, "zero2": MICRO, "zero3": 2 * MICRO}[strategy]
    rest = 12.0 if strategy == "replicated" else 12 * share
    whole = 2.0 if strategy == "zero1" else 0.0  # replicated casts its shard for each micro-batch
    reduced = 4 * sends if strategy == "replicated" else 2 * sends
    return {
        "between": rest + whole + 2,
        "after": rest + whole,
        "sent": gathers * 2 * sends + reduced,
    }


def measure(strategy: str) -> dict[str, float]:
    """The worst of four ranks."""
    with tempfile.TemporaryDirectory(prefix="fsdp2-zero-") as folder:
        work = functools.partial(run, strategy=strategy, folder=folder)
        torch.multiprocessing.spawn(_call, args=(work,), nprocs=RANKS)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {kind: max(each[kind] for each in found) for kind in found[0]}


def _call(rank: int, work: Any) -> None:
    work(rank)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description="ZeRO's stages on four gloo ranks.")
    parser.add_argument("--json", metavar="PATH", help="write results here, too")
    options = parser.parse_args(arguments)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that what is freed leaves the process
    results = {name: {"measured": measure(name), "theory": theory(name)} for name in STRATEGIES}
    kinds = ("between", "after", "sent")
    rows = [
        (name, *(f"{r['measured'][kind]:.2f} ({r['theory'][kind]:.2f})" for kind in kinds))
        for name, r in results.items()
    ]
    print(f"bytes a parameter on each of {RANKS} ranks, and what theory says; {WHOLE}\n")
    print(stats.table(("strategy", "between micro-batches", "after a step", "sent a step"), rows))
    loaded = max(r["measured"]["loaded"] for r in results.values())
    print(f"\nloaded by a process at its first steps, and not counted: {loaded / 1e6:.0f} MB")
    if options.json:
        facts = {"environment": stats.environment("cpu"), "results": results}
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
