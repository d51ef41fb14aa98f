"""Measure this machine: products, memory traffic, host time, and collectives.

measure_cpu    a CPU, and gloo between its processes
measure_gpu    a GPU, and its node's links where torchrun started several ranks
``fsdp2 calibrate`` calls them.

On a CPU, the ranks of a machine share its cores. Tables are therefore measured with one process
that uses all threads, and with several at the same time (`probes`): operators by size, the host,
gloo; and sharded steps of small models, for the time that they take beyond these. On GPUs, the
collectives of one node are measured if torchrun started several ranks; figures between nodes are
taken from another machine.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from fsdp2.core.device.collectives import run_all_gather
from fsdp2.core.device.one_off import run_barrier
from fsdp2.core.device.process_groups import default_group
from fsdp2.core.errors import coded
from fsdp2.planning.hardware import Curve, Hardware, Measured, from_json
from fsdp2.planning.probes import (
    clock_of,
    contention_of,
    measure_gloo,
    measure_host,
    measure_operators,
    measure_products,
    measure_steps,
)

SMALL, LARGE = 2**12, 2**24  # bytes of gathered tensors
GIB = 2**30


def measure_cpu(
    ranks: Sequence[int], rounds: int = 1, progress: Callable[[str], object] = str
) -> Hardware:
    """This machine's CPU, with gloo between its processes.

    Args:
        ranks: numbers of processes that are measured at the same time; 1 is among them.
        rounds: how often all is measured; each figure is the median.
        progress: called with a description of the next measurement. Default: no call.
    """
    return median_of([_measure_cpu(ranks, progress) for _ in range(rounds)])


def median_of(found: Sequence[Hardware]) -> Hardware:
    """A machine that was measured several times: the median of each figure."""
    rates = [asdict(each) for each in found]
    return from_json(_median_of(rates))


def _median_of(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _median_of([value[key] for value in values]) for key in first}
    if isinstance(first, list | tuple):
        return [_median_of(column) for column in zip(*values, strict=True)]
    if isinstance(first, float | int) and not isinstance(first, bool):
        return statistics.median(values)
    return first


def _measure_cpu(ranks: Sequence[int], progress: Callable[[str], object]) -> Hardware:
    cores, runs = _cores(), {}
    for count in ranks:
        progress("1 process" if count == 1 else f"{count} processes at the same time")
        runs[count] = _run_ranks(count, max(1, cores // count))
    gloo: dict[str, list[tuple[int, int, Curve]]] = {}
    for run in runs.values():
        for kind, curves in run["gloo"].items():
            gloo.setdefault(kind, []).extend(curves)
    # More ranks than cores take turns: what they compute is known from as many as there are cores.
    tables = [Measured(**run["table"]) for count, run in runs.items() if count <= cores]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = _with_tables(tables, gloo, cores, memory)
    steps = [step for run in runs.values() for step in run["steps"]]
    return replace(found, contention=contention_of(found, steps))


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _with_tables(
    tables: Sequence[Measured],
    gloo: dict[str, list[tuple[int, int, Curve]]],
    cores: int,
    memory: int,
) -> Hardware:
    """Rates are those of all cores, from the tables; they count for MFU."""
    most = max(tables, key=lambda table: table.ranks)
    flops = {"float32": most.ranks * max(rate for _, _, rate in most.products["mm"])}
    nbytes, took = most.operators["add"][-1]
    curves = gloo.get("all-gather") or [(1, 1, [(1.0, 0.0), (2.0, 1e-9)])]
    (small, latency), (large, slow) = curves[0][2][0], curves[0][2][-1]
    rate = (large - small) / max(slow - latency, 1e-9)
    return Hardware(
        name=platform.processor() or platform.machine(),
        device="cpu",
        backend="gloo",
        memory=memory,
        reserved=GIB,
        rounding=64,
        peak_flops=dict(flops),
        flops=flops,
        bandwidth=most.ranks * nbytes / took,
        kernel=0.0,
        host_op=most.host["forward"],
        host_collective=most.host["collective"],
        node=max(cores, 64),
        link=rate,
        link_latency=latency,
        network=rate,
        network_latency=latency,
        shared=True,
        sources={"all": "fsdp2 calibrate"},
        cores=cores,
        measured=tuple(tables),
        gloo=gloo,
    )


def measure_gpu(base: Hardware) -> tuple[Hardware, bool]:
    """This GPU; returns whether this is the first rank, too."""
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device.index)
    flops = {name: _products(device, getattr(torch, name)) for name in ("float32", "bfloat16")}
    flops["float16"] = flops["bfloat16"]
    found = replace(
        base,
        name=torch.cuda.get_device_name(device),
        memory=torch.cuda.get_device_properties(device).total_memory,
        flops=flops,
        bandwidth=_bandwidth(device),
        host_op=_host_op(device),
        sources={**base.sources, "flops, bandwidth, host_op": "fsdp2 calibrate"},
    )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        latency, rate = _gathers(device)
        found = replace(found, link=rate, link_latency=latency)
    return found, rank == 0


# ---- one device


def _median(run: Callable[[], object], device: torch.device, times: int = 9) -> float:
    """Seconds of a run."""
    for _ in range(2):
        run()
    seconds = []
    for _ in range(times):
        _finish(device)
        start = time.perf_counter()
        run()
        _finish(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _products(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a matrix product."""
    size = 512 if device.type == "cpu" else 8192
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return float(2 * size**3 / _median(lambda: a @ b, device))


def _bandwidth(device: torch.device) -> float:
    """Bytes per second that an addition reads and writes: of activations' size on a CPU."""
    numel = 2**20 if device.type == "cpu" else 2**28
    a, b = (torch.ones(numel, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return float(3 * a.nbytes / _median(lambda: torch.add(a, b, out=out), device))


def _host_op(device: torch.device) -> float:
    """Seconds of the host per operator of a training step, including views and autograd."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(32)]).to(device)
    x = torch.ones(1, 4, device=device)
    operators = 32 * 9  # t, addmm; and in backward t, mm, t, mm, t, sum, view

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return _median(step, device) / operators


# ---- collectives


def _gathers(device: torch.device) -> tuple[float, float]:
    """Seconds per round, and bytes per second that a rank sends, of all-gathers."""
    group = default_group()
    size = group.size()
    run_barrier(group)

    def seconds(nbytes: int) -> float:
        output = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        own = output[: nbytes // size].clone()

        def gather() -> None:
            work = run_all_gather(group, output, own)
            if work is not None:
                work.wait()

        return _median(gather, device)

    small, large = seconds(SMALL), seconds(LARGE)
    sent = (LARGE - SMALL) * (size - 1) / size
    rounds = max((size - 1).bit_length(), 1)
    return small / rounds, sent / max(large - small, 1e-9)


def _run_ranks(ranks: int, threads: int) -> dict[str, Any]:
    """The result of the first of several processes, which all measure at the same time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "fsdp2.planning.calibrate"],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=900)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise coded(
            RuntimeError,
            "plan-calibration",
            f"one of the {ranks} processes that measure this machine failed; see its error above",
        )
    found: dict[str, object] = json.loads(printed[0].splitlines()[-1])
    return found


def _measure_as_rank() -> dict[str, object]:
    """In one of the processes of `_run_ranks`."""
    ranks = int(os.environ["WORLD_SIZE"])
    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    table = None
    if ranks <= _cores():
        clock = clock_of(threads)
        bare = Measured(ranks, measure_products(clock), measure_operators(clock), {}, {})
        zeros = dict.fromkeys(("forward", "backward", "optimizer", "collective", "unit"), 0.0)
        base = _with_tables([replace(bare, ranks=1, host=zeros)], {}, 1, GIB)
        found = measure_host(base, replace(bare, host=zeros))
        table = asdict(found)
    device = torch.device("cpu")
    gloo = measure_gloo(device) if ranks > 1 else {}
    steps = measure_steps(device)
    run_barrier(default_group())  # nobody leaves while another still measures with it
    return {"table": table, "gloo": gloo, "steps": steps}


if __name__ == "__main__":
    print(json.dumps(_measure_as_rank()), flush=True)
    os._exit(0)  # gloo together with a DeviceMesh may abort in an ordinary exit
