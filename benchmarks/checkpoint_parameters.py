"""Many small parameters: what a save and a load cost for each, ours and DCP's.

    python benchmarks/checkpoint_parameters.py                  # 1,000, 3,000 and 10,000 parameters
    python benchmarks/checkpoint_parameters.py --rounds 5 --json X.json

Parameters are 8×8 and 8, in units of 100, with AdamW's state: three tensors and a number each. One
process; rounds are interleaved, and medians given with the lowest and the highest. *CPU* is that of
the process, which other jobs on the machine change little; *wall* is what they change.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdp2

UNIT = 50  # modules of two parameters


def make_model(count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(count // 2)))
    for start in range(0, len(model), UNIT):
        fsdp2.fully_shard(list(model[start : start + UNIT]))
    fsdp2.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of CPU, and of the clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    return time.process_time() - cpu, time.perf_counter() - wall


def measure(count: int, rounds: int, root: Path) -> dict[str, Any]:
    model, optimizer = make_model(count)

    def dcp_save(folder: Path) -> None:
        own, states = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optimizer": states}, checkpoint_id=folder)

    def dcp_load(folder: Path) -> None:
        own, states = get_state_dict(model, optimizer)
        dcp.load({"model": own, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=states)

    rows: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        ours, theirs = root / f"ours-{number}", root / f"dcp-{number}"
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda ours=ours: fsdp2.checkpoint.save(ours, model, optimizer, step=1),
            "dcp save": lambda theirs=theirs: dcp_save(theirs),
            "load": lambda ours=ours: fsdp2.checkpoint.load(ours, model, optimizer),
            "dcp load": lambda theirs=theirs: dcp_load(theirs),
        }
        for name, call in calls.items():
            found = timed(call)
            if number:  # the first one warms up
                rows.setdefault(name, []).append(found)
        shutil.rmtree(ours)
        shutil.rmtree(theirs)
    return {
        name: {
            "cpu_s": [round(f([row[0] for row in kept]), 3) for f in (statistics.median, min, max)],
            "wall_s": [
                round(f([row[1] for row in kept]), 3) for f in (statistics.median, min, max)
            ],
        }
        for name, kept in rows.items()
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 3000, 10000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write results here, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, Any] = {}
    print(f"{'':8}" + "".join(f"{name:>26}" for name in ("save", "dcp save", "load", "dcp load")))
    for count in options.counts:
        with tempfile.TemporaryDirectory() as root:
            rows = found[str(count)] = measure(count, options.rounds, Path(root))
        cells = (
            f"{row['cpu_s'][0]:.2f} s, {row['cpu_s'][0] / count * 1e3:.2f} ms each"
            for row in rows.values()
        )
        print(f"{count:>8}" + "".join(f"{cell:>26}" for cell in cells), flush=True)
    dist.destroy_process_group()
    about = {"torch": torch.__version__, "ranks": 1, "rounds": options.rounds, "unit": 2 * UNIT}
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**about, "counts": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
