"""Runs of the benchmarks whose results are kept, and the files in benchmarks/results/.

A file is named by date, machine and run: `2026-11-23-xeon-2core-host_cost.json`. The newest file of
each run counts. A machine's older ones are in git.

    RUNS ── measure ──> benchmarks/results/*.json ── newest ──> File
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import quiet

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

_REAL = ("--cases", "llama,moe,lora", "--variants", "none,torch,fsdp2,packed", "--rounds", "15")
_COUNTED = (
    *("--shrink", "8", "--cases", "32x9,llama,moe,lora"),
    *("--variants", "none,torch,fsdp2,packed"),
)
_FEW = "one process,torch,fsdp2,fp32 sums,8 bit,4 bit,levels,levels and fp32 sums"
RUNS: dict[str, tuple[str, ...]] = {
    "host_cost": ("host_cost.py", "--no-scaling", "--rounds", "15"),
    "scaling": (
        *("scaling.py", "--cases", "32x9,128x9,32x100,300x1-3"),
        *("--variants", "none,torch,fsdp2,packed"),
    ),
    "blocks": ("scaling.py", *_REAL),
    "blocks-mixed": ("scaling.py", *_REAL, "--precision", "mixed"),
    "instructions": ("instructions.py", *_COUNTED),
    "instructions-mixed": ("instructions.py", *_COUNTED, "--precision", "mixed"),
    "ranks": (
        *("host_cost.py", "--precision", "fp32", "--blocks", "8"),
        *("--world-size", "8,1024,16384", "--rows", "16384"),
    ),
    "startup": ("startup.py",),
    "imports": ("imports.py", "--rooms", "--without-bytecode"),
    "optimizer": ("optimizer.py",),
    "optimizer_offload": ("optimizer.py", "--offload"),
    "gloo": ("gloo.py", "--rounds", "15"),
    "compile": ("compile.py",),
    "compile-kernels": ("compile.py", "--dim", "256", "--layers", "8", "--seq", "64"),
    "checkpoint": (
        *("checkpoint.py", "--sizes", "256", "--rounds", "9"),
        *("--variants", "save", "dcp", "load", "dcp-load"),
    ),
    "memory": ("memory.py",),
    "padding": ("padding.py",),
    "collective_cost": ("collective_cost.py",),
    "slow_link": ("slow_link.py",),
    "slow_link_accumulated": ("slow_link.py", "--grad-accum", "4"),
    "slow_link_gigabit": ("slow_link.py", "--mbit", "1000"),
    "slow_link_four": ("slow_link.py", "--nodes", "4", "--variants", _FEW),
    "slow_link_pairs": (
        *("slow_link.py", "--ranks-per-node", "2", "--grad-accum", "4"),
        *("--variants", _FEW),
    ),
    "faults": ("faults.py",),
    "elastic": ("elastic.py",),
    "group_faults": ("group_faults.py",),
    "muon": ("muon.py",),
    "muon_losses": ("muon.py", "--losses"),
    "users": ("users.py",),
    "ema": ("ema.py", "--steps", "30"),
    "ema_small": ("ema.py", "--units", "64", "--dim", "32", "--steps", "100"),
    "accuracy": ("accuracy.py", "--formats", "exact,bf16-sums,int8,int4,int4-naive"),
}
"""What `--measure` runs, by the last part of the file's name."""


@dataclass(frozen=True)
class File:
    """The newest results of a run."""

    environment: dict[str, Any]
    results: Any

    @property
    def where(self) -> str:
        """Date and machine, as in the file's name."""
        return f"{self.environment['date'][:10]}, {machine(self.environment)}"

    @property
    def quiet(self) -> bool:
        """Whether the machine had nothing else to do; counts and sizes do not ask."""
        taken = self.environment.get("taken")
        return taken is None or quiet.Found(**taken).quiet


def machine(environment: dict[str, Any]) -> str:
    """A word for an accelerator, or for a processor and its cores: "epyc-2core"."""
    known = re.search(r"epyc|xeon|ryzen|core|h\d00|a100|b200", _device(environment).lower())
    word = known[0] if known else _device(environment).lower().split()[0]
    return word if "gpu" in environment else f"{word}-{environment['cores']}core"


def _device(environment: dict[str, Any]) -> str:
    return str(environment.get("gpu") or environment["cpu"])


def newest(run: str, folder: Path = RESULTS) -> File | None:
    """The newest file of a run, if there is one."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"*-{run}.json")]
    if not found:
        return None
    content = max(found, key=lambda each: each["environment"]["date"])
    return File(content["environment"], content["results"])


def measure(run: str) -> Path:
    """Run a benchmark; returns the file that it wrote, in place of the machine's older one."""
    RESULTS.mkdir(exist_ok=True)
    written = RESULTS / f"{run}.json.new"
    script, *arguments = RUNS[run]
    command = [sys.executable, f"benchmarks/{script}", *arguments]
    subprocess.run([*command, "--json", str(written.relative_to(ROOT))], cwd=ROOT, check=True)
    environment = json.loads(written.read_text())["environment"]
    name = f"{machine(environment)}-{run}.json"
    for older in RESULTS.glob(f"*-{name}"):
        older.unlink()
    return written.rename(RESULTS / f"{environment['date'][:10]}-{name}")
