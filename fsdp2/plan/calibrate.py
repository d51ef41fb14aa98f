"""Measure this machine's figures: products, memory traffic, host time, and collectives.

    python -m fsdp2.plan calibrate -o this_machine.json              # a CPU, gloo between processes
    torchrun --nproc-per-node 8 -m fsdp2.plan calibrate -o node.json --device cuda

Each figure is the median of repeated runs. On a CPU the ranks of a machine share its cores, so the
rates are the machine's, and a rank has its part. On GPUs the collectives of one node are measured
where torchrun started several ranks; what lies between nodes is taken from ``--base``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fsdp2.core.device.collectives import default_group, run_all_gather, run_barrier
from fsdp2.plan.hardware import Hardware, load, write

SMALL, LARGE = 2**12, 2**24  # bytes of gathered tensors
GIB = 2**30


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 done."""
    parser = argparse.ArgumentParser(prog="python -m fsdp2.plan calibrate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-o", "--output", type=Path, default=Path("this_machine.json"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--base", default="h100", help="what is not measured on GPUs is this one's")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the CPU's collectives")
    args = parser.parse_args(argv)
    if args.device == "cpu":
        found = measure_cpu(args.ranks)
        first = True
    else:
        found, first = measure_gpu(load(args.base))
    if first:
        write(found, args.output)
        print(f"{args.output}: {json.dumps({'flops': found.flops, 'bandwidth': found.bandwidth})}")
    return 0


def measure_cpu(ranks: int) -> Hardware:
    """This machine's CPU, with gloo between its processes."""
    cpu = torch.device("cpu")
    latency, rate = _measure_gloo(ranks)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    flops = {"float32": _products(cpu, torch.float32), "bfloat16": _products(cpu, torch.bfloat16)}
    return Hardware(
        name=platform.processor() or platform.machine(),
        device="cpu",
        backend="gloo",
        memory=memory,
        reserved=GIB,
        rounding=64,
        peak_flops=dict(flops),
        flops=flops,
        bandwidth=_bandwidth(cpu),
        kernel=0.0,
        host_op=_host_op(cpu),
        host_collective=0.0,
        node=max(os.cpu_count() or 1, ranks, 64),
        link=rate * ranks,  # of all ranks, which share the cores that copy
        link_latency=latency,
        network=rate,
        network_latency=latency,
        shared=True,
        sources={"all": "python -m fsdp2.plan calibrate"},
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
        sources={**base.sources, "flops, bandwidth, host_op": "python -m fsdp2.plan calibrate"},
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
    """FLOPs a second of a matrix product."""
    size = 512 if device.type == "cpu" else 8192
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return float(2 * size**3 / _median(lambda: a @ b, device))


def _bandwidth(device: torch.device) -> float:
    """Bytes a second that an addition reads and writes: of activations' size on a CPU."""
    numel = 2**20 if device.type == "cpu" else 2**28
    a, b = (torch.ones(numel, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return float(3 * a.nbytes / _median(lambda: torch.add(a, b, out=out), device))


def _host_op(device: torch.device) -> float:
    """Seconds of the host for an operator of a training step, views and autograd included."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(32)]).to(device)
    x = torch.ones(1, 4, device=device)
    operators = 32 * 9  # t, addmm; and in backward t, mm, t, mm, t, sum, view

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return _median(step, device) / operators


# ---- collectives


def _gathers(device: torch.device) -> tuple[float, float]:
    """Seconds of a round, and bytes a second that a rank sends, of all-gathers."""
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


def _measure_gloo(ranks: int) -> tuple[float, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "fsdp2.plan.calibrate"],
            env={**os.environ, **common, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    latency, rate = json.loads(printed[0].splitlines()[-1])
    return float(latency), float(rate)


if __name__ == "__main__":  # one of the processes of `_measure_gloo`
    print(json.dumps(_gathers(torch.device("cpu"))), flush=True)
