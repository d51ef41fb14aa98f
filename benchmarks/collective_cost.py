"""Host time of one real collective, and of one coalesced collective of many tensors.

    python benchmarks/collective_cost.py                  # NCCL on a GPU, gloo without one
    python benchmarks/collective_cost.py --tensors 1,9,100

The null group leaves this cost out of the other benchmarks. It matters when runtimes are compared
that issue different calls: torch's FSDP2 gathers a group of parameters with one tensor, a coalesced
call has one tensor per parameter. One process forms a world of size 1: the way through c10d and the
backend is the real one, and next to no data moves. Calls are not asynchronous, as fsdp2's are not:
NCCL runs them on the current stream and returns nothing to wait for, gloo a work object, which is
waited for. Figures are microseconds of host time a call, the median of bursts, with a
synchronisation after each burst outside the timing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from benchmarks import stats

CALLS_IN_A_BURST = 50
BURSTS = 21


def host_microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Median over bursts of the mean host time of a call."""
    bursts = []
    for _ in range(BURSTS):
        start = time.perf_counter()
        for _ in range(CALLS_IN_A_BURST):
            call()
        bursts.append((time.perf_counter() - start) / CALLS_IN_A_BURST * 1e6)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return statistics.median(bursts)


def method(group: Any, new: str, old: str) -> Callable[..., dist.Work | None]:
    """A collective of a process group, by its name since torch 2.13 and before."""
    return getattr(group, new, None) or getattr(group, old)


def collectives(n: int, numel: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """The calls to time, on n tensors of `numel` elements each."""
    group = dist.group.WORLD
    outputs = [torch.empty(numel, device=device) for _ in range(n)]
    inputs = [torch.empty(numel, device=device) for _ in range(n)]
    one_output, one_input = (torch.empty(n * numel, device=device) for _ in range(2))
    gather, scatter = AllgatherOptions(), ReduceScatterOptions()
    gather.asyncOp = scatter.asyncOp = False

    all_gather = method(group, "all_gather_single", "_allgather_base")
    reduce_scatter = method(group, "reduce_scatter_single", "_reduce_scatter_base")
    all_gather_many = method(
        group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
    )
    reduce_scatter_many = method(
        group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
    )
    return {
        "all-gather, one tensor": lambda: _wait(all_gather(one_output, one_input, gather)),
        "all-gather, coalesced": lambda: _wait(all_gather_many(outputs, inputs, gather)),
        "reduce-scatter, one tensor": lambda: _wait(reduce_scatter(one_output, one_input, scatter)),
        "reduce-scatter, coalesced": lambda: _wait(reduce_scatter_many(outputs, inputs, scatter)),
    }


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Host time of one real collective.")
    parser.add_argument("--tensors", default="1,9,100", help="in a coalesced call, comma list")
    parser.add_argument("--numel", type=int, default=4096, help="elements of each tensor")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu else "gloo"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    counts = [int(count) for count in options.tensors.split(",")]
    results: dict[str, dict[int, float]] = {}
    for count in counts:
        for name, call in collectives(count, options.numel, device).items():
            try:
                call()
            except RuntimeError:  # gloo: not every collective is there
                continue
            results.setdefault(name, {})[count] = host_microseconds(call, device)
    print(f"{backend}, world size 1; {stats.describe(stats.environment(device.type))}\n")
    rows = [
        (name, *(f"{by_count[count]:.1f}" for count in counts))
        for name, by_count in results.items()
    ]
    print(stats.table(("host us a call", *(f"{count} tensors" for count in counts)), rows))
    stats.write_json(options.json, device.type, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
