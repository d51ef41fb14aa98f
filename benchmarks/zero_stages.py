"""What each strategy of `shard_model` holds and sends: ZeRO's stages, measured on four gloo ranks.

    python benchmarks/zero_stages.py
    python benchmarks/zero_stages.py --json benchmarks/results/zero/DATE.json

Mixed precision with AdamW takes 16 bytes a parameter where nothing is sharded: 2 of the bf16
weight, 2 of its bf16 gradient, and 4 each of the fp32 master copy, momentum and variance. Here fp32
shards are the master copy; weights and gradients are bf16 where they are whole. A step has two
micro-batches, of which the second reduces. Each line, in bytes a parameter on the worst rank:

- weight: whole weights between forward and backward.
- gradient: whole gradients that wait between micro-batches.
- reduced: sharded gradients where each micro-batch reduces. They are fp32, as the shards are.
- master, momentum, variance: shards, and the optimizer's states.
- sent: what a rank's collectives send in a step, by the sizes of their tensors, as a ring sends
  them: an all-gather or a reduce-scatter (n - 1) / n of the whole, an all-reduce twice that.
  Gradients are reduced in bf16.
- process: growth of resident memory up to behind the third step, beside all live tensors then; and
  once more with what a first step of any model brings, which has nothing to do with the parameters:
  code that is loaded, threads, buffers of gloo.

Lines are bytes of live storages (`benchmarks.full_memory.LiveBytes`), so exact. In `process`
allocators round.
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
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp2
from benchmarks import stats
from benchmarks.full_memory import LiveBytes

RANKS, DIM, LAYERS, MICRO = 4, 1024, 16, 2
STRATEGIES = ("replicated", "zero1", "zero2", "zero3")
LINES = ("weight", "gradient", "reduced", "master", "momentum", "variance", "sent")


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


def run(rank: int, strategy: Any, folder: str, dim: int) -> None:
    """One rank of one strategy; writes what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    at_first = resident()
    with LiveBytes() as live:
        train(strategy, 64, live)  # what a first step of any model brings
        before, live_before = resident(), live.live
        found = train(strategy, dim, live)
        numel = LAYERS * dim * dim
        held = found.pop("held")
        found["live"] = (held["live"] - live_before) / numel
        found["process"] = (held["resident"] - before) / numel
        found["process and first step"] = (held["resident"] - at_first) / numel
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train(strategy: Any, dim: int, live: LiveBytes) -> dict[str, Any]:
    """Three steps that reduce once, and one that reduces each micro-batch; bytes a parameter."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(LAYERS)))
    numel = sum(param.numel() for param in model.parameters())
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    begin = live.live
    fsdp2.shard_model(model, {nn.Linear}, strategy=strategy, mp_policy=policy)
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.normal_(param, std=DIM**-0.5)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found: dict[str, Any] = {"master": (live.live - begin) / numel}
    for step in range(4):
        at_once = step == 3
        whole = {}
        with Sent() as sent:
            for micro in range(MICRO):
                sync = at_once or micro == MICRO - 1
                model.set_requires_gradient_sync(sync)  # type: ignore[operator]
                loss = model(torch.ones(1, dim)).square().mean()
                whole.setdefault("forward", live.live)
                loss.backward()
                del loss
                whole.setdefault("between", live.live)
            optimizer.step()
            optimizer.zero_grad()
        states = optimizer.state.values()
        sizes = [_bytes(state[kind] for state in states) for kind in ("exp_avg", "exp_avg_sq")]
        rest = live.live - begin - sum(sizes) - found["master"] * numel  # whole weights that stay
        if at_once:
            found["reduced"] = (whole["between"] - live.live) / numel
        else:
            found["weight"] = (whole["forward"] - live.live + rest) / numel
            found["gradient"] = (whole["between"] - live.live) / numel
            found["momentum"], found["variance"] = (size / numel for size in sizes)
            found["sent"] = sent.total / numel
            found["held"] = {"live": live.live, "resident": resident()}
    return found


def _bytes(tensors: Any) -> int:
    return sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors)


def theory(strategy: str) -> dict[str, float]:
    """The same by arithmetic."""
    share, sends = 1 / RANKS, (RANKS - 1) / RANKS
    gathers = {"replicated": 0, "zero1": 1, "zero2": MICRO, "zero3": 2 * MICRO}[strategy]
    part = 1.0 if strategy == "replicated" else share
    reduced = 4 * sends if strategy == "replicated" else 2 * sends
    return {
        "weight": 0.0 if strategy == "zero3" else 2.0,
        "gradient": 2.0,
        "reduced": 4 * part,
        "master": 4 * part,
        "momentum": 4 * part,
        "variance": 4 * part,
        "sent": gathers * 2 * sends + reduced,
    }


def measure(strategy: str, dim: int = DIM) -> dict[str, float]:
    """The worst of four ranks."""
    with tempfile.TemporaryDirectory(prefix="fsdp2-zero-") as folder:
        work = functools.partial(run, strategy=strategy, folder=folder, dim=dim)
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
    rows = [
        (line, *(f"{r['measured'][line]:.2f} ({r['theory'][line]:.2f})" for r in results.values()))
        for line in LINES
    ]
    for line in ("live", "process", "process and first step"):
        rows.append((line, *(f"{r['measured'][line]:.2f}" for r in results.values())))
    print(f"bytes a parameter on each of {RANKS} ranks, and in brackets what theory says\n")
    print(stats.table(("line", *STRATEGIES), rows))
    if options.json:
        facts = {"environment": stats.environment("cpu"), "results": results}
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
