"""Saves, loads and Hugging Face folders: fsdp2's beside those of torch's DCP.

    python -m benchmarks.checkpoint                       # 2 ranks, 256 MB of state
    python -m benchmarks.checkpoint --sizes 512,1024 --folder /mnt/disk
    python -m benchmarks.checkpoint --parameters 10000    # many small parameters, per rank

State is parameters and both states of AdamW, of all ranks together. The variants are

    save, async          `fsdp2.checkpoint.save` and `async_save`: checksums, synced, one rename
    dcp, dcp-async       `torch.distributed.checkpoint.save` and `async_save`, which sync
    load, dcp-load       of model and optimizer; each of what its own save has written
    export, dcp-export   a folder for Hugging Face's libraries: `fsdp2.checkpoint.export`, and DCP's
                         HuggingFaceStorageWriter, which rank 0 consolidates
    pretrained, dcp-pretrained   `load_pretrained`, and DCP's HuggingFaceStorageReader

*stall* is the time of the call, torch's `get_state_dict` included, which DCP needs. *durable* is
the time from the call until the save is over; a training step runs meanwhile. DCP's Hugging Face
writer does not sync. Both are of the slowest rank, with the rounds interleaved after one that warms
up. Loads read what is in the system's memory. *MiB* is rank 0's peak of resident memory above what
it was before; *cpu* its processor time.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

import fsdp2
from benchmarks import harness

BASES = {
    **{"save": "dcp", "async": "dcp-async", "load": "dcp-load"},
    **{"export": "dcp-export", "pretrained": "dcp-pretrained"},
}
"""What each of ours is compared with."""
VARIANTS = (*BASES, *BASES.values())
FILES = {"load": "save", "dcp-load": "dcp", "pretrained": "export", "dcp-pretrained": "export"}
"""Who writes what a load reads."""
WIDTH, MIB = 1024, 1 << 20


def make_model(megabytes: int, parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    if parameters:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(parameters // 2)))
        for start in range(0, len(model), 50):
            fsdp2.fully_shard(list(model[start : start + 50]))
    else:
        blocks = max(1, round(megabytes * MIB / (3 * 4 * WIDTH * WIDTH)))
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(blocks)))
        for block in model:
            fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


class Calls:
    """The variants, over one model; a call returns what to wait for, if anything."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.group = dist.new_group(backend="gloo")  # DCP's threads have one of their own

    def train_step(self) -> None:
        width = next(self.model.parameters()).shape[-1]
        self.model(torch.ones(2, width)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, variant: str, folder: Path) -> Any:
        ours: dict[str, Callable[[], Any]] = {
            "save": lambda: fsdp2.checkpoint.save(folder, self.model, self.optimizer, step=1),
            "async": lambda: fsdp2.checkpoint.async_save(
                folder, self.model, self.optimizer, step=1
            ),
            "load": lambda: fsdp2.checkpoint.load(folder, self.model, self.optimizer),
            "export": lambda: fsdp2.checkpoint.export(folder, self.model, shard_size=1 << 40),
            "pretrained": lambda: fsdp2.checkpoint.load_pretrained(self.model, folder),
        }
        if variant not in ours:
            return self._run_dcp(variant, folder)
        found = ours[variant]()
        return found if variant == "async" else None

    def _run_dcp(self, variant: str, folder: Path) -> Any:
        from torch.distributed.checkpoint import hf_storage

        if variant == "dcp-export":
            state = get_model_state_dict(self.model)
            writer = hf_storage.HuggingFaceStorageWriter(
                str(folder),
                fqn_to_index_mapping=dict.fromkeys(state, 1),
                save_distributed=True,
                enable_consolidation=True,
            )
            dcp.save(state, storage_writer=writer)
        elif variant == "dcp-pretrained":
            reader = hf_storage.HuggingFaceStorageReader(str(folder))
            dcp.load(get_model_state_dict(self.model), storage_reader=reader)
        else:
            own, states = get_state_dict(self.model, self.optimizer)
            both = {"model": own, "optimizer": states}
            if variant == "dcp-async":
                return dcp.async_save(both, checkpoint_id=folder, process_group=self.group)
            if variant == "dcp":
                dcp.save(both, checkpoint_id=folder, process_group=self.group)
            else:
                dcp.load(both, checkpoint_id=folder)
                model, optimizer = self.model, self.optimizer
                set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=states)
        return None


def make_worker(spec: dict[str, Any]) -> harness.Handler:
    rank = harness.join_ranks(spec, spec["ranks"])
    calls = Calls(*make_model(spec["size"], spec["parameters"]))
    calls.train_step()
    root = Path(spec["folder"])

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        variant = request["variant"]
        writes = variant not in FILES
        folder = root / FILES.get(variant, variant)
        dist.barrier()
        if rank == 0 and writes:
            shutil.rmtree(folder, ignore_errors=True)
        missing = not writes and not folder.exists()
        dist.barrier()
        if missing:
            calls.run(FILES[variant], folder)
            dist.barrier()
        before = _resident("VmRSS", reset=True)
        start, cpu = time.perf_counter(), time.process_time()
        pending = calls.run(variant, folder)
        stall = durable = time.perf_counter() - start
        if pending is not None:
            calls.train_step()
            pending.result()
            durable = time.perf_counter() - start
        used, peak = time.process_time() - cpu, _resident("VmHWM") - before
        dist.barrier()
        times = {"stall": stall, "durable": durable, "cpu": used}
        return {name: seconds * 1e3 for name, seconds in times.items()} | {"MiB": peak}

    return handle


def _resident(key: str, reset: bool = False) -> float:
    """MiB: VmRSS now, or VmHWM, the peak since it was ``reset``; Linux."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """{"sizes": {size: rounds by variant}, "ratios": ...}."""
    sizes: dict[str, harness.Rounds] = {}
    ratios: dict[str, harness.Summary] = {}
    for size in options.sizes:
        label = f"{options.parameters} parameters" if options.parameters else f"{size} MB"
        rounds: harness.Rounds = {variant: {} for variant in options.variants}
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
            spec = {"ranks": options.ranks, "parameters": options.parameters, "size": size}
            specs = {label: {**spec, "folder": folder}}
            ready = harness.pool("checkpoint", specs, options.ranks, at_once=True)
            pool = stack.enter_context(ready)
            for number in range(options.rounds + 1):
                for variant in options.variants:
                    for kind, value in pool[label].ask(variant=variant).items():
                        if number:  # the first one warms up
                            rounds[variant].setdefault(kind, []).append(value)
        sizes[label] = rounds
        for variant, base in BASES.items():
            for kind in ("stall", "durable", "cpu"):
                if {variant, base} <= rounds.keys():
                    found = harness.ratio(rounds[variant][kind], rounds[base][kind])
                    ratios[f"{label}: {variant} / {base}, {kind}"] = found
    return {"options": vars(options), "sizes": sizes, "ratios": ratios}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    default = ("save", "dcp", "async", "dcp-async", "load", "dcp-load")
    parser = harness.make_parser(__doc__, variants=VARIANTS, default=default, rounds=9)
    parser.add_argument("--sizes", type=harness.integers, default="256", help="MB, comma list")
    parser.add_argument("--parameters", type=int, default=0, help="small ones, in place of a size")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", help="on the disk to measure; default: temporary")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print(harness.describe(harness.environment()))
    result = measure(options)
    for label, rounds in result["sizes"].items():
        print(f"\n{label}")
        harness.print_rounds(rounds)
    harness.print_ratios(result["ratios"])
    harness.write_json(options.json, result)


if __name__ == "__main__":
    main()
