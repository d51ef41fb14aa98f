"""Time of a load, that training stands still for a save, and until it is durable: ours and DCP's.

    python benchmarks/checkpoint.py                          # 2 ranks, 64, 128 and 256 MB of state
    python benchmarks/checkpoint.py --sizes 512 1024 2048 --folder /mnt/disk
    python benchmarks/checkpoint.py --variants load dcp-load --rounds 9
    python benchmarks/checkpoint.py --json benchmarks/results/checkpoint/DATE.json

State is parameters and both of AdamW's, of all ranks together; the model, the disk and the ranks
are the same for all, and rounds are interleaved. The variants are

    save          `fsdp2.checkpoint.save`: checksums, synced, one rename
    async         `fsdp2.checkpoint.async_save`
    save-unsynced, async-unsynced   the same without any sync, which only this benchmark can
    dcp           ``torch.distributed.checkpoint.save`` as it comes, which syncs, without checksums
    dcp-unsynced  the same with ``FileSystemWriter(sync_files=False)``
    dcp-async, dcp-async-unsynced   ``async_save``, over a process group of its own
    load          `fsdp2.checkpoint.load` of model and optimizer
    dcp-load      ``torch.distributed.checkpoint.load``, each of what its own `save` has written

Behind each call a training step runs. *stall* is the time of the call (torch's `get_state_dict`
included, which DCP needs) and what the optimizer waits for the copy; that the step itself is slower
beside a copy is not in it. *durable* is the time from the call until the save is over. Both are of
the slowest rank, medians over rounds after one that warms up, with the lowest and the highest. A
load has one time, that of the call, `set_state_dict` included; it reads what is in the system's
memory still. *memory* is rank 0's peak of resident memory above what it was before, in any round
but the first. A ratio to DCP is the median over rounds of the ratio in each round.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdp2
from benchmarks import stats
from fsdp2.checkpoint import files, staging

VARIANTS = (
    *("save", "dcp", "async", "dcp-async"),
    *("save-unsynced", "dcp-unsynced", "async-unsynced", "dcp-async-unsynced"),
    *("load", "dcp-load"),
)
KINDS = ("stall", "durable")  # of time; a load has the second alone
WIDTH = 1024
MIB = 1 << 20


class Unsynced(files.Disk):
    """Leaves all to the system."""

    def sync(self, file: Any) -> None:
        file.flush()

    def sync_folder(self, path: Path) -> None:
        pass

    def start_writing(self, file: Any, start: int, length: int) -> None:
        pass


def make_model(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    blocks = max(1, round(megabytes * MIB / (3 * 4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(blocks)))
    for block in model:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def waits() -> Iterator[list[float]]:
    """Seconds that writers have waited for copies."""
    found: list[float] = []
    original = staging.Copy.wait

    def wait(copy: staging.Copy) -> None:
        start = time.perf_counter()
        original(copy)
        found.append(time.perf_counter() - start)

    with mock.patch.object(staging.Copy, "wait", wait):
        yield found


def resident(key: str) -> float:
    """MiB: VmRSS now, or VmHWM, the peak since `reset_peak`; Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def load_once(
    variant: str, root: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[float, float, float]:
    """As of `measure_once`; what is loaded is saved in the first call, which warms up."""
    folder = root / f"saved-{variant}"
    saved = folder.exists()
    dist.barrier()  # all have looked
    if not saved and variant == "load":
        fsdp2.checkpoint.save(folder, model, optimizer, step=1)
    elif not saved:
        own, states = get_state_dict(model, optimizer)
        dcp.save({"model": own, "optimizer": states}, checkpoint_id=folder)
    dist.barrier()
    reset_peak()
    before, start = resident("VmRSS"), time.perf_counter()
    if variant == "load":
        fsdp2.checkpoint.load(folder, model, optimizer)
    else:
        own, states = get_state_dict(model, optimizer)
        dcp.load({"model": own, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=states)
    taken = time.perf_counter() - start
    return taken, taken, resident("VmHWM") - before


def measure_once(
    variant: str,
    root: Path,
    number: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Any,
) -> tuple[float, float, float]:
    """(stall, durable) in seconds, and the peak of memory in MiB."""
    if variant in ("load", "dcp-load"):
        return load_once(variant, root, model, optimizer)
    synced = not variant.endswith("-unsynced")
    kind = variant.removesuffix("-unsynced")
    folder = root / f"{variant}-{number}"
    dist.barrier()
    reset_peak()
    before = resident("VmRSS")
    patched = nullcontext() if synced else mock.patch.object(files, "DISK", Unsynced())
    with patched, waits() as waited:
        start = time.perf_counter()
        pending: Any = None
        if kind == "save":
            fsdp2.checkpoint.save(folder, model, optimizer, step=1)
        elif kind == "async":
            pending = fsdp2.checkpoint.async_save(folder, model, optimizer, step=1)
        else:
            own, states = get_state_dict(model, optimizer)
            state = {"model": own, "optimizer": states}
            writer = dcp.FileSystemWriter(folder, sync_files=synced)
            if kind == "dcp":
                dcp.save(state, storage_writer=writer, process_group=group)
            else:
                pending = dcp.async_save(state, storage_writer=writer, process_group=group)
        stall = time.perf_counter() - start
        durable = stall
        if pending is not None:
            train_step(model, optimizer)
            pending.result()
            durable = time.perf_counter() - start
        stall += sum(waited)
    peak = resident("VmHWM") - before
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return stall, durable, peak


def run_rank(rank: int, options: argparse.Namespace, root: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}/store", options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    group = dist.new_group(backend="gloo")
    found: dict[str, Any] = {}
    for size in options.sizes:
        model, optimizer = make_model(size)
        train_step(model, optimizer)
        rows: dict[str, list[tuple[float, float, float]]] = {v: [] for v in options.variants}
        for number in range(options.rounds + 1):
            for variant in options.variants:
                mine = measure_once(variant, Path(root), number, model, optimizer, group)
                told: list[Any] = [None] * options.ranks
                dist.all_gather_object(told, mine)
                if number:
                    slowest = max(t[0] for t in told), max(t[1] for t in told), told[0][2]
                    rows[variant].append(slowest)
        found[str(size)] = {
            variant: {
                "stall": [row[0] * 1e3 for row in kept],
                "durable": [row[1] * 1e3 for row in kept],
                "memory_mib": round(max(row[2] for row in kept), 1),
            }
            for variant, kept in rows.items()
        }
        del model, optimizer
        dist.barrier()
        if rank == 0:
            for folder in Path(root).glob("saved-*"):
                shutil.rmtree(folder)
        dist.barrier()
    if rank == 0:
        Path(root, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def base_of(variant: str, kind: str) -> str:
    """DCP's variant that one of ours is compared with, in one kind of time."""
    call = variant.removesuffix("-unsynced")
    if call == "load":
        return "dcp-load"
    other = "dcp-async" if call == "async" and kind == "stall" else "dcp"
    return other + variant.removeprefix(call)


def ratios(found: dict[str, Any]) -> dict[str, stats.Summary]:
    """Ours over DCP's: {"256 MB: save / dcp, durable": ...}."""
    made = {}
    for size, rows in found.items():
        for variant in rows:
            for kind in KINDS[variant.startswith("load") :]:
                base = base_of(variant, kind)
                if not variant.startswith("dcp") and base in rows:
                    label = f"{size} MB: {variant} / {base}, {kind}"
                    made[label] = stats.ratio(rows[variant][kind], rows[base][kind])
    return made


def report(found: dict[str, Any], made: dict[str, stats.Summary]) -> None:
    header = ("", "stall, ms", "durable, ms", "MiB")
    for size, rows in found.items():
        print(f"\n{size} MB of state")
        lines = [
            (variant, *(stats.summarize(row[kind]) for kind in KINDS), row["memory_mib"])
            for variant, row in rows.items()
        ]
        print(stats.table(header, lines))
    stats.print_ratios(made)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256], help="in MB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write results here, too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        mp.spawn(run_rank, args=(options, root), nprocs=options.ranks)
        found = json.loads(Path(root, "found.json").read_text())
    made = ratios(found)
    report(found, made)
    about = {"ranks": options.ranks, "rounds": options.rounds}
    stats.write_json(options.json, "cpu", {**about, "sizes": found, "ratios": made})


if __name__ == "__main__":
    main()
