"""What there is to measure on, found in a process of its own: a GPU's memory stays free.

python -m benchmarks.gpu_day.machine     # prints it as JSON
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.workers import ROOT

KINDS = ("cpu", "stand-in", "cuda")
SOURCES = ("fsdp2", "benchmarks", "tests")
SUFFIXES = {".py", ".cpp", ".h"}


@dataclass(frozen=True)
class Machine:
    """Where stages run, and what.

    Attributes:
        kind: one of `KINDS`.
        device: the GPU's name, or the processor's and its cores.
        gpus: how many there are.
        driver, cuda, nccl: versions; "" where there are none.
        backends: what "nccl" may stand for in this torch.
        torch, python: versions.
        commit: of the sources; "" without git.
        sources: a digest of them, changes that are not committed included.
    """

    kind: str
    device: str
    gpus: int
    driver: str
    cuda: str
    nccl: str
    backends: tuple[str, ...]
    torch: str
    python: str
    commit: str
    sources: str


def found(kind: str) -> Machine:
    """The machine, by a look from another process; ``kind`` may be "auto"."""
    command = [sys.executable, "-m", "benchmarks.gpu_day.machine", kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"gpu_day: cannot tell what there is:\n{done.stdout}{done.stderr}")
    facts = json.loads(done.stdout.splitlines()[-1])
    return Machine(**{**facts, "backends": tuple(facts["backends"])})


def look(kind: str) -> Machine:
    """The same in this process."""
    import torch

    from benchmarks import stats, variants

    there = torch.cuda.is_available()
    if kind == "auto":
        kind = "cuda" if there else "cpu"
    if kind == "cuda" and not there:
        raise SystemExit("there is no CUDA device that torch can use: --device cpu, or stand-in")
    facts = stats.environment("cuda" if kind == "cuda" else "cpu")
    on_gpu = kind == "cuda"
    device = str(facts["gpu"]) if on_gpu else f"{facts['cpu']} ({facts['cores']} cores)"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else ""
    return Machine(
        kind=kind,
        device=device,
        gpus=torch.cuda.device_count() if on_gpu else 0,
        driver=_driver() if on_gpu else "",
        cuda=str(torch.version.cuda) if on_gpu else "",
        nccl=nccl,
        backends=variants.nccl_backends() if on_gpu else (),
        torch=torch.__version__,
        python=facts["python"],
        commit=_commit(),
        sources=digest(ROOT),
    )


def digest(root: Path) -> str:
    """Of all sources below ``root``: equal where equal code runs, with git or without."""
    found = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "not known"
    return next((word for word in text.split() if word[:1].isdigit() and "." in word), "not known")


def _commit() -> str:
    command = ["git", "-C", os.fspath(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    print(json.dumps(asdict(look(sys.argv[1] if len(sys.argv) > 1 else "auto"))))
