"""A first step for real: ranks train a tiny model sharded, and each compares it with unsharded.

`run` starts a process per rank, which writes how far it is to RANK.stage and what it found to
RANK.json, and ends all of them at its deadline. A rank whose parent is gone is ended by torch.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessException,
    ProcessRaisedException,
    start_processes,
)

TOLERANCE = 1e-5
"""The largest difference of a parameter after a step: ranks sum in another order."""


@dataclass(frozen=True)
class SelfTest:
    """The result of a self-test."""

    device: str
    backend: str
    ranks: int
    seconds: float  # from the first process to the end of the last
    problem: str  # what went wrong, in a sentence; "" where all is well
    difference: float = 0.0  # the largest one of a parameter to the unsharded model's
    transport: str = ""  # how parameters were gathered, as in `fsdp2.tracing.GroupReport`
    gathered_bytes: int = 0  # of the step's all-gathers
    reduced_bytes: int = 0  # of its reduce-scatters

    @property
    def title(self) -> str:
        """The ranks, device and backend, in words."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks} on {self.device} over {self.backend}"


# ---- the parent


def run(
    device: str,
    backend: str,
    ranks: int,
    seconds: float,
    work: Callable[[int, Path, int, str, str, float], None] | None = None,
) -> SelfTest:
    """Start the ranks, wait until all have ended or the time is over, and end the others.

    Rank r uses the r-th device; tests pass other `work` for the ranks.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fsdp2-doctor-") as name:
        folder = Path(name)
        given = (folder, ranks, device, backend, seconds)
        processes = start_processes(
            work or train, args=given, nprocs=ranks, join=False, start_method="spawn"
        )
        assert processes is not None
        try:
            problem = _wait(processes, folder, begin + seconds)
        finally:
            for process in processes.processes:
                process.kill()
                process.join()
        took = time.monotonic() - begin
        if problem:
            return SelfTest(device, backend, ranks, took, problem)
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    most = max(each["difference"] for each in found)
    if not most <= TOLERANCE:
        problem = f"parameters differ by {most:.2g} from unsharded ones; {TOLERANCE:.0e} is allowed"
    return SelfTest(device, backend, ranks, took, problem, **{**found[0], "difference": most})


def _wait(processes: ProcessContext, folder: Path, deadline: float) -> str:
    """Wait for the ranks; a sentence where one fails or is late, else ""."""
    try:
        while not processes.join(max(0.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                alive = [rank for rank, each in enumerate(processes.processes) if each.is_alive()]
                return f"the time was over: {', '.join(_stage(folder, rank) for rank in alive)}"
    except ProcessException as error:
        lines = str(error).strip().splitlines()
        said = lines[-1] if isinstance(error, ProcessRaisedException) else " ".join(lines)
        return f"{_stage(folder, error.error_index)}: {said}"
    return ""


def _stage(folder: Path, rank: int) -> str:
    """How far a rank has come."""
    path = folder / f"{rank}.stage"
    return f"rank {rank} was to {path.read_text() if path.is_file() else 'start Python'}"


# ---- a rank


def train(rank: int, folder: Path, size: int, kind: str, backend: str, seconds: float) -> None:
    """One rank's part of a self-test."""

    def at(stage: str) -> None:
        (folder / f"{rank}.stage").write_text(stage)

    torch.set_num_threads(1)
    at("import fsdp2")
    import fsdp2

    at(f"use its {kind} device")
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    if kind != "cpu":
        torch.accelerator.set_device_index(rank)
    model, whole = _model(device), _model(device)
    at("join the process group")
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )
    at("shard a model")
    mesh = init_device_mesh(kind, (size,))
    for layer in (model[0], model[2]):
        fsdp2.fully_shard(layer, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    at("run a forward, a backward and an optimizer's step")
    _step(model, [_loss(model, rank, device)])
    at("train the same model unsharded")
    _step(whole, [_loss(whole, each, device) / size for each in range(size)])
    at("compare parameters")
    expected = {name: param.detach() for name, param in whole.named_parameters()}
    difference = max(
        float((full.detach() - expected[name]).abs().max())
        for name, full in fsdp2.full_parameters(model)
    )
    groups = fsdp2.report(model).groups
    found = {
        "difference": difference,
        "transport": groups[-1].transport,
        "gathered_bytes": sum(each.gathers * each.gathered_bytes for each in groups),
        "reduced_bytes": sum(each.reduced_bytes for each in groups),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # gloo together with a DeviceMesh may abort in an ordinary exit


def _model(device: torch.device) -> nn.Sequential:
    """Two layers; 33 rows do not divide evenly, so that shards are padded."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 5)).to(device)


def _loss(model: nn.Module, rank: int, device: torch.device) -> Tensor:
    """The loss of the samples of one rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    inputs = torch.randn(4, 8, generator=generator).to(device)
    outputs: Tensor = model(inputs)
    return outputs.square().mean()


def _step(model: nn.Module, losses: Sequence[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.stack(list(losses)).sum().backward()
    optimizer.step()
