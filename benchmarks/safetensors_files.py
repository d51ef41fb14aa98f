"""Safetensors files of a sharded model: `export` and `load_pretrained` beside what there is.

    python benchmarks/safetensors_files.py                     # 2 ranks, 512 MiB of fp32
    python benchmarks/safetensors_files.py --ranks 4 --rounds 7 --json FILE

All write one folder that Hugging Face's libraries load, and load it into the same sharded model:

    export        `fsdp2.checkpoint.export`: each rank its slices at their offsets
    dcp           DCP's HuggingFaceStorageWriter: a file for each rank, then consolidated by rank 0
    safetensors   a full state dict on rank 0 alone, and `safetensors.torch.save_file`
    load          `fsdp2.checkpoint.load_pretrained`: each rank its slices
    dcp load      DCP's HuggingFaceStorageReader into the sharded state dict
    safetensors load   `load_file` on rank 0, broadcast by `set_model_state_dict`

A call ends when it returns on all ranks. Files of `export` are on the disk then. Those of the
others are not: "durable" adds the time of fsync of each of them. "beside" is what is on the disk
besides the folder's tensors at the end. Memory is the largest resident set during the call (VmHWM)
less that before, of the rank with the most; pages of mapped files count. Rounds are interleaved.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import hashlib
import json
import os
import shutil
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp2
from benchmarks import stats, workers

MIB = 2**20
WRITERS = ("export", "dcp", "safetensors")
READERS = ("load", "dcp load", "safetensors load")


# ---- in a worker


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.hf_storage import (
        HuggingFaceStorageReader,
        HuggingFaceStorageWriter,
    )

    ranks, folder = spec["ranks"], Path(spec["folder"])
    rank = workers.join_ranks(spec, ranks, datetime.timedelta(seconds=300))
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    dim = spec["dim"]
    model = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(spec["layers"])))
    place = (lambda _: Shard(1)) if spec["columns"] else None
    for layer in model:
        fsdp2.fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    fsdp2.fully_shard(model, mesh=mesh, shard_placement_fn=place)
    expected = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    names = list(expected)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def export(out: Path) -> None:
        fsdp2.checkpoint.export(out, model, shard_size=1 << 40)

    def with_dcp(out: Path) -> None:
        writer = HuggingFaceStorageWriter(
            str(out),
            fqn_to_index_mapping=dict.fromkeys(names, 1),
            save_distributed=True,
            enable_consolidation=True,
            thread_count_consolidation=2,
        )
        dcp.save(get_model_state_dict(model), storage_writer=writer)

    def alone(out: Path) -> None:
        state = get_model_state_dict(model, options=full)
        if rank == 0:
            out.mkdir()
            save_file(state, out / "model.safetensors", {"format": "pt"})
        dist.barrier()

    def load(out: Path) -> None:
        fsdp2.checkpoint.load_pretrained(model, out)

    def load_with_dcp(out: Path) -> None:
        dcp.load(get_model_state_dict(model), storage_reader=HuggingFaceStorageReader(str(out)))

    def load_alone(out: Path) -> None:
        state = load_file(out / "model.safetensors") if rank == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)

    cases: dict[str, Callable[[Path], None]] = {
        "export": export,
        "dcp": with_dcp,
        "safetensors": alone,
        "load": load,
        "dcp load": load_with_dcp,
        "safetensors load": load_alone,
    }

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        case, out = request["case"], folder / request["out"]
        reads = case in READERS
        if reads:
            for value in model.state_dict().values():
                value.to_local().zero_()
        _trim()
        dist.barrier()
        before = _reset_peak()
        start = time.perf_counter()
        cases[case](out)
        dist.barrier()
        returned = time.perf_counter()
        if rank == 0 and not reads:
            _sync(out)
        dist.barrier()
        durable = time.perf_counter() - start
        peak = _status("VmHWM") - before
        if reads:
            for name, value in model.state_dict().items():
                assert torch.equal(value.to_local(), expected[name]), (case, name)
        return {"returned": 1e3 * (returned - start), "durable": 1e3 * durable, "peak": peak / MIB}

    return handle


def _trim() -> None:
    """Give freed memory back, so that the next call cannot hide in it."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status(key: str) -> int:
    """Bytes, of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _reset_peak() -> int:
    """Let VmHWM begin anew; the resident set now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


# ---- in the parent


def measure(
    ranks: int, layers: int, dim: int, rounds: int, columns: bool, place: str | None
) -> dict[str, Any]:
    """Figures of each case, a list over rounds; and bytes that each writer leaves beside."""
    figures: dict[str, dict[str, list[float]]] = {
        case: {"returned": [], "durable": [], "peak": []} for case in (*WRITERS, *READERS)
    }
    beside: dict[str, float] = {}
    contents: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="fsdp2-safetensors-", dir=place) as folder:
        common = {
            **{"ranks": ranks, "layers": layers, "dim": dim, "columns": columns},
            **{"store": f"{folder}/store", "folder": folder},
        }
        specs = {f"rank {rank}": {**common, "rank": rank} for rank in range(ranks)}
        with workers.pool("safetensors_files", specs, at_once=True) as pool:

            def ask(case: str, out: str) -> None:
                for worker in pool.values():
                    worker.send(case=case, out=out)
                answers = [worker.receive(timeout=300) for worker in pool.values()]
                for key, values in figures[case].items():
                    values.append(max(answer[key] for answer in answers))

            for number in range(rounds + 1):  # the first one warms up
                for turn in range(len(WRITERS)):
                    case = WRITERS[(turn + number) % len(WRITERS)]
                    ask(case, case)
                for turn in range(len(READERS)):
                    ask(READERS[(turn + number) % len(READERS)], "export")
                for case in WRITERS:
                    path = Path(folder) / case
                    total = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
                    beside[case] = (total - layers * dim * dim * 4) / MIB
                    if number == 0:
                        (file,) = path.glob("*.safetensors")
                        contents[case] = _tensors_of(file)
                    shutil.rmtree(path)
    assert len(set(contents.values())) == 1, "the writers' tensors differ"
    for found in figures.values():
        for values in found.values():
            del values[0]
    return {"figures": figures, "beside": beside}


def _tensors_of(path: Path) -> bytes:
    """A hash of names, shapes, dtypes and values."""
    from safetensors import safe_open

    found = hashlib.sha256()
    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dim", type=int, default=2048, help="matrices are [dim, dim], in fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--columns", action="store_true", help="shard dim 1 in the place of dim 0")
    parser.add_argument("--folder", help="on whose disk (default: that of temporary files)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    found = measure(
        options.ranks, options.layers, options.dim, options.rounds, options.columns, options.folder
    )
    size = options.layers * options.dim**2 * 4 / MIB
    print(
        f"{options.ranks} ranks, {options.layers} tensors, {size:.0f} MiB, {options.rounds} rounds"
    )
    print(stats.describe(stats.environment("cpu")))
    print(_table(found))
    if options.json is not None:
        content = {"environment": stats.environment("cpu"), "options": vars(options), **found}
        options.json.write_text(json.dumps(content, indent=1, default=str) + "\n")


def _table(found: dict[str, Any]) -> str:
    rows = []
    for ours, cases in (("export", WRITERS), ("load", READERS)):
        for case in cases:
            figures, base = found["figures"][case], found["figures"][ours]
            rows.append(
                (
                    case,
                    stats.summarize(figures["returned"]),
                    f"{stats.ratio(base['returned'], figures['returned']).median:.2f}",
                    stats.summarize(figures["durable"]) if case in WRITERS else "",
                    f"{stats.ratio(base['durable'], figures['durable']).median:.2f}"
                    if case in WRITERS
                    else "",
                    f"{stats.summarize(figures['peak']).median:.0f}",
                    f"{found['beside'][case]:.0f}" if case in WRITERS else "",
                )
            )
    header = ("", "returned, ms", "ours/it", "durable, ms", "ours/it", "peak, MiB", "beside, MiB")
    return stats.table(header, rows)


if __name__ == "__main__":
    main()
