"""A first step for real: ranks train a tiny model sharded, and each compares it with unsharded.

    run(device, backend, ranks)                       in the process of `fsdp2 doctor`
      python -m fsdp2.command.selftest FOLDER RANK …  a process per rank; FOLDER has their store
        FOLDER/RANK.stage                             how far it is, should it not come further
        FOLDER/RANK.json                              what it found
        FOLDER/RANK.err                               what it complained of

Every wait ends: `run` ends all ranks at its deadline, collectives have the same time-out, and a
rank whose parent is gone leaves by itself.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).parents[2]

TOLERANCE = 1e-5
"""The largest difference of a parameter after a step: ranks sum in another order."""

INTERVAL = 0.02
"""Seconds between two looks at the ranks."""

LATE = 5.0
"""Seconds after the deadline at which a rank leaves by itself."""


@dataclass(frozen=True)
class SelfTest:
    """The result of a self-test.

    Attributes:
        device: type of the devices.
        backend: of the process group.
        ranks: how many.
        seconds: from the first process to the end of the last.
        problem: what went wrong, in a sentence; "" where all is well.
        difference: the largest one of a parameter to the unsharded model's, after the step.
        transport: how parameters were gathered, as in `fsdp2.GroupReport`.
        gathered_bytes: of all-gathers of the step.
        reduced_bytes: of reduce-scatters of the step.
    """

    device: str
    backend: str
    ranks: int
    seconds: float
    problem: str
    difference: float = 0.0
    transport: str = ""
    gathered_bytes: int = 0
    reduced_bytes: int = 0

    @property
    def title(self) -> str:
        """The ranks, device and backend, in words."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks} on {self.device} over {self.backend}"


# ---- the parent


def run(device: str, backend: str, ranks: int, seconds: float) -> SelfTest:
    """Start the ranks, wait until all have ended or the time is over, and end the others.

    Args:
        device: type of the devices; rank r uses the r-th one.
        backend: of the process group.
        ranks: how many processes.
        seconds: after which all are ended.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fsdp2-doctor-") as name, ExitStack() as files:
        folder = Path(name)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                said = files.enter_context((folder / f"{rank}.err").open("wb"))
                told = [str(folder), str(rank), str(ranks), device, backend, str(seconds)]
                command = [sys.executable, "-m", "fsdp2.command.selftest", *told]
                processes.append(subprocess.Popen(command, env=_env(), stdout=said, stderr=said))
            problem = _watch(processes, folder, begin + seconds)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
        took = time.monotonic() - begin
        if problem:
            return SelfTest(device, backend, ranks, took, problem)
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    most = max(each["difference"] for each in found)
    if not most <= TOLERANCE:
        problem = f"parameters differ by {most:.2g} from unsharded ones; {TOLERANCE:.0e} is allowed"
    return SelfTest(device, backend, ranks, took, problem, **{**found[0], "difference": most})


def _env() -> dict[str, str]:
    """Ranks import the fsdp2 that this is, and leave cores to each other while they wait."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **ours, "OMP_WAIT_POLICY": "PASSIVE"}


def _watch(processes: Sequence[subprocess.Popen[bytes]], folder: Path, deadline: float) -> str:
    """Wait for the ranks; a sentence where one fails or is late, else ""."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return f"rank {rank} {_stage(folder, rank)}: {_complaint(folder, rank, code)}"
        if all(code == 0 for code in codes):
            return ""
        if time.monotonic() > deadline:
            late = [rank for rank, code in enumerate(codes) if code is None]
            told = ", ".join(f"rank {rank} {_stage(folder, rank)}" for rank in late)
            return f"the time was over: {told}"
        time.sleep(INTERVAL)


def _stage(folder: Path, rank: int) -> str:
    """How far a rank has come."""
    path = folder / f"{rank}.stage"
    return f"was to {path.read_text() if path.is_file() else 'start Python'}"


def _complaint(folder: Path, rank: int, code: int) -> str:
    """The last line that a rank has written, or how it ended."""
    said = (folder / f"{rank}.err").read_text(errors="replace").strip().splitlines()
    ended = f"signal {-code}" if code < 0 else f"code {code}"
    return said[-1].strip() if said else f"it ended with {ended}"


# ---- a rank


def main(arguments: Sequence[str]) -> None:
    """Run one rank's part of a self-test, and write what it found."""
    folder, rank, size = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    kind, backend, seconds = arguments[3], arguments[4], float(arguments[5])
    faulthandler.dump_traceback_later(seconds + LATE, exit=True)

    def at(stage: str) -> None:
        (folder / f"{rank}.stage").write_text(stage)

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
    expected = dict(whole.named_parameters())
    difference = max(
        float((full - expected[name]).abs().max()) for name, full in fsdp2.full_parameters(model)
    )
    groups = fsdp2.group_reports(model)
    found = {
        "difference": difference,
        "transport": groups[-1].transport,
        "gathered_bytes": sum(each.gathers * each.gathered_bytes for each in groups),
        "reduced_bytes": sum(each.reduced_bytes for each in groups),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


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


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # gloo together with a DeviceMesh may abort in an ordinary exit
