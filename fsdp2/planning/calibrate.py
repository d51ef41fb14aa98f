"""Measure this machine: products, memory traffic, host time, and collectives of its ranks.

`fsdp2 calibrate` calls `measure`. Under torchrun all ranks of a node measure at the same
time; figures between nodes are those of another machine.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from fsdp2.core.facts import default_group, run_all_gather, run_barrier
from fsdp2.planning.hardware import Hardware

SMALL, LARGE = 2**12, 2**24  # bytes of gathered tensors


def measure(base: Hardware, device_type: str) -> tuple[Hardware, bool]:
    """This machine; returns whether this is the first rank, too."""
    device, ranks = torch.device(device_type), int(os.environ.get("WORLD_SIZE", "1"))
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
        name = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        name = platform.processor() or platform.machine()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if ranks > 1:
        run_barrier(default_group())
    sharers = ranks if base.shared else 1  # its rates are then those of all ranks together
    flops = {n: sharers * _products(device, getattr(torch, n)) for n in ("float32", "bfloat16")}
    flops["float16"] = flops["bfloat16"]
    found = replace(
        base,
        name=name,
        memory=memory,
        flops=flops,
        peak_flops=dict(flops) if base.shared else base.peak_flops,
        bandwidth=sharers * _bandwidth(device),
        host_op=_host_op(device),
        sources={**base.sources, "flops, bandwidth, host_op": "fsdp2 calibrate"},
    )
    if ranks > 1:
        latency, rate = _gathers(device)
        found = replace(found, link=sharers * rate, link_latency=latency)
    return found, os.environ.get("RANK", "0") == "0"


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
