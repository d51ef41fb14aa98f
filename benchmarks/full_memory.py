"""What whole tensors cost: live tensor bytes of each process, beside the bound of each function.

    python benchmarks/full_memory.py                         # 2 ranks, 16 blocks of 3 MiB
    python benchmarks/full_memory.py --ranks 4 --json FILE

Each rank counts the bytes of all tensor storages that are alive, at every operator, and notes the
most. Its bound is what the documentation promises. Buffers inside of the process group's backend
are not counted. The figures:

    whole           deferred's rival: the model made whole, then sharded
    deferred        this rank's shards, and one block; the root's own parameters are whole till last
    load_from_rank0 shards, and one whole tensor; rank 0 besides: the state dict
    full_parameters shards, one unit, and the tensor that the loop still holds; with rank0_only, on
                    other ranks: shards, and a piece of one tensor
    gathered        shards, and the model; with rank0_only, on other ranks: shards, and pieces of
                    two tensors, as gloo lets the last one go late
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp2
from benchmarks import stats, workers

MIB = 2**20
SLACK = 0.02
"""By how much of the bound small tensors may exceed it: buffers, norms, indices, padding."""


class Block(nn.Module):
    """Three matrices, a norm and a buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList([nn.Linear(dim, dim, bias=False) for _ in range(3)])
        self.register_buffer("scale", torch.ones(1))


class Model(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self, blocks: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(dim, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(blocks)])
        self.head = nn.Linear(dim, dim, bias=False)
        self.head.weight = self.embed.weight


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators return, until they are gone.

    Attributes:
        live: now.
        peak: the most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._ranges: dict[int, int] = {}  # begin and end of each storage's memory

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, if its memory is not counted already.

        Shards are storages over parts of a group's: the same memory.
        """
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
        if not size or any(b <= begin < end for b, end in self._ranges.items()):
            return
        self._ranges[begin] = begin + size
        weakref.finalize(storage, self._gone, begin)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, begin: int) -> None:
        self.live -= self._ranges.pop(begin) - begin

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is torch.Tensor:
                self.add(leaf)
        return result


# ---- in a worker


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    ranks = spec["ranks"]
    rank = workers.join_ranks(spec, ranks, datetime.timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (ranks,))
    blocks, dim = spec["blocks"], spec["dim"]

    def sharded(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            fsdp2.fully_shard(block, mesh=mesh)
        return fsdp2.fully_shard(model, mesh=mesh)

    def whole(_: LiveBytes) -> Any:
        return sharded(Model(blocks, dim))

    def deferred(_: LiveBytes) -> Any:
        with fsdp2.deferred(mesh, {Block}):
            return Model(blocks, dim)

    def load(count: LiveBytes) -> Any:
        with torch.device("meta"):
            model = Model(blocks, dim)
        weights = Model(blocks, dim).state_dict() if rank == 0 else None
        fsdp2.load_from_rank0(sharded(model), weights)
        return model

    def stream(rank0_only: bool) -> Callable[[LiveBytes], Any]:
        def run(count: LiveBytes) -> Any:
            model = deferred(count)
            count.peak = count.live
            for _ in fsdp2.full_parameters(model, rank0_only=rank0_only):
                pass
            return model

        return run

    def gather(rank0_only: bool) -> Callable[[LiveBytes], Any]:
        def run(count: LiveBytes) -> Any:
            model = deferred(count)
            count.peak = count.live
            with fsdp2.gathered(model, rank0_only=rank0_only):
                pass
            return model

        return run

    cases: dict[str, Callable[[LiveBytes], Any]] = {
        "whole": whole,
        "deferred": deferred,
        "load_from_rank0": load,
        "full_parameters": stream(False),
        "full_parameters rank0_only": stream(True),
        "gathered": gather(False),
        "gathered rank0_only": gather(True),
    }

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        count = LiveBytes()
        with count:
            model = cases[request["case"]](count)
        del model
        return {"peak": count.peak}

    return handle


# ---- in the parent


def bounds(ranks: int, blocks: int, dim: int) -> dict[str, Callable[[int], int]]:
    """Bytes that each function may hold on a rank."""
    tensor = dim * dim * 4
    block = 3 * tensor + 2 * dim * 4
    model = blocks * block + tensor
    shards, unit, piece = model // ranks, max(block, tensor), tensor // ranks

    def first(rank: int, there: int, elsewhere: int) -> int:
        return shards + (there if rank == 0 else elsewhere)

    return {
        "whole": lambda rank: model + block,
        # While a block is sharded, it and its shards are there; the root's parameter is whole.
        "deferred": lambda rank: shards + block + tensor,
        "load_from_rank0": lambda rank: tensor + first(rank, model, 0),
        "full_parameters": lambda rank: shards + unit + tensor,
        "full_parameters rank0_only": lambda rank: first(rank, unit + tensor, piece),
        "gathered": lambda rank: shards + model,
        "gathered rank0_only": lambda rank: 2 * piece + first(rank, model, 0),
    }


def measure(ranks: int, blocks: int, dim: int) -> list[dict[str, Any]]:
    """A row for each function: the peak of each rank beside its bound, in bytes."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="fsdp2-full-") as folder:
        common = {"ranks": ranks, "blocks": blocks, "dim": dim, "store": f"{folder}/store"}
        specs = {f"rank {rank}": {**common, "rank": rank} for rank in range(ranks)}
        with workers.pool("full_memory", specs, at_once=True) as pool:
            for case, bound in bounds(ranks, blocks, dim).items():
                for worker in pool.values():
                    worker.send(case=case)
                peaks = [worker.receive(timeout=120)["peak"] for worker in pool.values()]
                rows.append(
                    {"case": case, "peaks": peaks, "bounds": [bound(r) for r in range(ranks)]}
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--dim", type=int, default=512, help="matrices are [dim, dim], in fp32")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    rows = measure(options.ranks, options.blocks, options.dim)
    print(f"{options.ranks} ranks, {options.blocks} blocks, dim {options.dim}; MiB, peak / bound")
    over = False
    for row in rows:
        pairs = list(zip(row["peaks"], row["bounds"], strict=True))
        shown = "   ".join(f"{peak / MIB:7.2f} / {bound / MIB:7.2f}" for peak, bound in pairs)
        beyond = any(peak > bound * (1 + SLACK) for peak, bound in pairs)
        over = over or beyond
        print(f"{row['case']:28s} {shown}{'   OVER' if beyond else ''}")
    if options.json is not None:
        found = {"environment": stats.environment("cpu"), "options": vars(options), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1, default=str) + "\n")
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
