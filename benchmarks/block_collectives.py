"""The collectives of one Llama block, by how its nine parameters are put into calls.

    python benchmarks/block_collectives.py                      # NCCL, all GPUs; without one gloo
    python benchmarks/block_collectives.py --widths 2048,4096 --kernels
    python benchmarks/block_collectives.py --device cpu --widths 64,128 --rounds 2 --steps 2

A block has four weights of attention, three of its feed-forward and two norms: from megabytes down
to kilobytes. Its parameters are gathered in bf16 and its gradients, bf16 too, reduced in fp32:

    one tensor  one flat collective of all, and no copy: what packing would cost if copies were free
    coalesced   a pair of tensors a parameter in one call; gradients are cast first, in place
    packed      one flat collective, and one copy from ranks' rows to parameters, or back
    hybrid      a pair for each large parameter, and one for the small ones, which are packed

Copies are those kernels that fsdp2 has for them. This calls the process group directly: no
scheduler, no model. Where torch has two backends for NCCL, both are measured: legacy and nccl2
(`TORCH_DIST_USE_NCCL2`). Each backend's ranks are processes of their own; backends and layouts take
turns in each round.

    time   ms a call: between two CUDA events, or on a CPU by the clock; the slowest rank's
    host   us until a call returns
    GB/s   bytes of the gathered parameters (of the gradients in fp32) over the time: with N ranks
           (N - 1) / N of them come from others. One rank alone copies: it says nothing of a network
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from benchmarks import kernels, stats, variants, workers
from benchmarks import options as common
from benchmarks.collective_cost import method
from benchmarks.models import LlamaBlock, LlamaConfig
from fsdp2.core.device.kernels import TorchKernels
from fsdp2.testing.stand_in import device as stand_in

LAYOUTS = ("one tensor", "coalesced", "packed", "hybrid")
COLLECTIVES = ("all-gather", "reduce-scatter")
FFN = {2048: 8192, 4096: 14336, 8192: 28672}  # as in Llama 3's 1 B, 8 B and 70 B
HEAD_DIM = 64
SMALL = 2**20  # gathered bytes below which hybrid packs a parameter
PIECE = 64  # elements: shards are whole numbers of them, so that addresses are aligned
PROFILED = 3

Launch = Callable[[], object]


# ---------------------------------------------------------------------------------------------
# In a worker


def sizes(width: int) -> list[int]:
    """Elements of a block's parameters, the largest first."""
    heads = max(1, width // HEAD_DIM)
    ffn = FFN.get(width, 4 * width)
    with torch.device("meta"):
        config = LlamaConfig(width, 1, ffn, 1, heads, max(1, heads // 4))
        block = LlamaBlock(config)
    return sorted((param.numel() for param in block.parameters()), reverse=True)


class Block:
    """A block's parameters, shards and gradients on this rank, and what runs its collectives.

    Attributes:
        shards: this rank's parts, bf16, one behind the other.
        params: what they are gathered into, bf16.
        grads: of the whole parameters, bf16.
        reduced: this rank's parts of their sums, fp32.

    Args:
        width: of the model.
        device: where tensors are.
        small: gathered bytes below which hybrid packs a parameter.
        group: runs the collectives; the default group unless told.
    """

    def __init__(self, width: int, device: torch.device, small: int, group: Any = None) -> None:
        self.group = group or dist.group.WORLD
        ranks = self.ranks = self.group.size()
        per_rank = [-(-numel // ranks // PIECE) * PIECE for numel in sizes(width)]
        self.large = sum(n * ranks * 2 >= small for n in per_rank)
        self.per_rank, total = per_rank, sum(per_rank)
        self._kernels = TorchKernels(device)
        half, full = torch.bfloat16, torch.float32
        self._shards = torch.zeros(total, dtype=half, device=device)
        self._grads = torch.zeros(total * ranks, dtype=half, device=device)
        self._params = torch.zeros(total * ranks, dtype=half, device=device)
        self._reduced = torch.zeros(total, dtype=full, device=device)
        self._gathered = torch.empty(total * ranks, dtype=half, device=device)
        self._staged = torch.empty(total * ranks, dtype=full, device=device)
        whole = [n * ranks for n in per_rank]
        self.shards = self._shards.split_with_sizes(per_rank)
        self.reduced = self._reduced.split_with_sizes(per_rank)
        self.params = self._params.split_with_sizes(whole)
        self.grads = self._grads.split_with_sizes(whole)
        self._cast = self._staged.split_with_sizes(whole)

    def launches(self) -> dict[str, dict[str, Launch]]:
        """By collective and layout."""
        return {"all-gather": self._gathers(), "reduce-scatter": self._reductions()}

    def _gathers(self) -> dict[str, Launch]:
        options = AllgatherOptions()
        options.asyncOp = False
        one = method(self.group, "all_gather_single", "_allgather_base")
        many = method(self.group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
        at, (behind, rest) = self.large, self._rest(self._gathered)
        small_shards = self._shards[sum(self.per_rank[:at]) :]
        tensors = (*self.params[:at], *behind), (*self.shards[:at], *rest(small_shards))

        def packed() -> None:
            _wait(one(self._gathered, self._shards, options))
            self._copy_out(self._gathered, self.per_rank, self.params)

        def hybrid() -> None:
            _wait(many(*map(list, tensors), options))
            if behind:
                self._copy_out(behind[0], self.per_rank[at:], self.params[at:])

        return {
            "one tensor": lambda: _wait(one(self._gathered, self._shards, options)),
            "coalesced": lambda: _wait(many(list(self.params), list(self.shards), options)),
            "packed": packed,
            "hybrid": hybrid,
        }

    def _reductions(self) -> dict[str, Launch]:
        options = ReduceScatterOptions()
        options.asyncOp = False
        one = method(self.group, "reduce_scatter_single", "_reduce_scatter_base")
        many = method(
            self.group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
        )
        at, (behind, rest) = self.large, self._rest(self._staged)
        small_reduced = self._reduced[sum(self.per_rank[:at]) :]
        outputs = [*self.reduced[:at], *rest(small_reduced)]
        inputs = [*self._cast[:at], *behind]

        def coalesced() -> None:
            self._kernels.copy_many(self._cast, self.grads)
            _wait(many(list(self.reduced), list(self._cast), options))

        def packed() -> None:
            self._copy_in(self.grads, self._staged)
            _wait(one(self._reduced, self._staged, options))

        def hybrid() -> None:
            if at:
                self._kernels.copy_many(self._cast[:at], self.grads[:at])
            if behind:
                self._copy_in(self.grads[at:], behind[0])
            _wait(many(outputs, inputs, options))

        return {
            "one tensor": lambda: _wait(one(self._reduced, self._staged, options)),
            "coalesced": coalesced,
            "packed": packed,
            "hybrid": hybrid,
        }

    def _rest(self, staging: Tensor) -> tuple[list[Tensor], Callable[[Tensor], list[Tensor]]]:
        """Where the small parameters travel packed: the end of ``staging``, if there are any.

        And what makes the same of their flat shard: a list of one or of none.
        """
        if self.large == len(self.per_rank):
            return [], lambda flat: []
        return [staging[self.ranks * sum(self.per_rank[: self.large]) :]], lambda flat: [flat]

    def _copy_out(self, staging: Tensor, per_rank: list[int], params: Any) -> None:
        rows = [param.view(self.ranks, -1) for param in params]
        self._kernels.split_copy(staging.view(self.ranks, -1), per_rank, rows)

    def _copy_in(self, grads: Any, staging: Tensor) -> None:
        rows = [grad.view(self.ranks, -1) for grad in grads]
        self._kernels.chunk_cat(rows, 0, self.ranks, out=staging.view(self.ranks, -1))


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    device = variants.prepare_rank(spec, spec["ranks"])
    held: dict[int, dict[str, dict[str, Launch]]] = {}  # of one width at a time

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        width = request["width"]
        if width not in held:
            held.clear()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            held[width] = Block(width, device, spec["small"]).launches()
        launch = held[width][request["collective"]][request["layout"]]
        try:
            launch()  # the first of a process makes what the backend needs
        except RuntimeError as error:  # gloo: not every collective is there
            return {"absent": str(error).splitlines()[0]}
        if request.get("kernels"):
            found = kernels.profile(launch, PROFILED)
            return {"kernels": sum(kernel["count"] for kernel in found.values())}
        return {**time_burst(launch, request["steps"], device), "class": _class(device)}

    return handle


def _class(device: torch.device) -> str:
    """What torch made of the backend's name."""
    group: Any = dist.group.WORLD
    try:
        return type(group._get_backend(device)).__name__
    except RuntimeError:  # one that is written in Python
        return type(group).__name__


def time_burst(launch: Launch, steps: int, device: torch.device) -> dict[str, float]:
    """ms a call, and us of the host, once all ranks are here."""
    dist.barrier()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            launch()
        each = (time.perf_counter() - start) / steps
        return {"time": each * 1e3, "host": each * 1e6}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    start = time.perf_counter()
    for _ in range(steps):
        launch()
    host = (time.perf_counter() - start) / steps * 1e6
    end.record()
    torch.cuda.synchronize()
    return {"time": begin.elapsed_time(end) / steps, "host": host}


# ---------------------------------------------------------------------------------------------
# In the parent


def backends(device: str) -> dict[str, dict[str, str]]:
    """The backends to compare, and the variables that choose each."""
    if device == "cuda" and "nccl2" in variants.nccl_backends():
        chosen = {"nccl2": "1", "legacy": "0"}
        return {name: {"TORCH_DIST_USE_NCCL2": value} for name, value in chosen.items()}
    return {variants.backend_of(device): {}}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.device == stand_in.NAME:
        stand_in.build()
    keys = ("ranks", "device", "small")
    spec = {key: getattr(options, key) for key in keys}
    specs = {
        name: {**spec, "environment": chosen} for name, chosen in backends(options.device).items()
    }
    with workers.rank_pools("block_collectives", specs, options.ranks) as pools:
        rows = [
            row
            for width in options.widths
            for collective in COLLECTIVES
            for row in _measure_one(pools, options, width, collective)
        ]
    return {"options": vars(options), "rows": rows, "ratios": ratios(rows)}


def _measure_one(
    pools: dict[str, workers.Ranks], options: argparse.Namespace, width: int, collective: str
) -> Iterator[dict[str, Any]]:
    """A row for each backend; in each round all backends' layouts take turns."""
    request = {"width": width, "collective": collective}
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {layout: [] for layout in LAYOUTS} for name in pools
    }
    for _ in range(options.rounds):
        for name, ranks in pools.items():
            for layout in LAYOUTS:
                answer = ranks.ask(**request, layout=layout, steps=options.steps)
                rounds[name][layout].append(answer)
    itemsize = 2 if collective == "all-gather" else 4
    for name, ranks in pools.items():
        found = {
            layout: {kind: [each[kind] for each in answers] for kind in ("time", "host")}
            for layout, answers in rounds[name].items()
            if "absent" not in answers[0]
        }
        counts = {}
        if options.kernels and options.device == "cuda":
            for layout in found:
                counts[layout] = ranks.ask(**request, layout=layout, kernels=True)["kernels"]
        first = [answers[0] for answers in rounds[name].values()]
        yield {
            "backend": name,
            "class": next((each["class"] for each in first if "class" in each), ""),
            "ranks": options.ranks,
            **request,
            "nbytes": sum(sizes(width)) * itemsize,
            "rounds": found,
            "kernels": counts,
            "absent": {
                layout: answers[0]["absent"]
                for layout, answers in rounds[name].items()
                if "absent" in answers[0]
            },
        }


def ratios(rows: list[dict[str, Any]]) -> dict[str, stats.Summary]:
    """Times over packed ones, and of two backends the first's over the second's."""
    found = {}
    for row in rows:
        where = f"{row['collective']}, width {row['width']}, {row['backend']}"
        packed = row["rounds"].get("packed")
        for layout in ("coalesced", "hybrid"):
            if packed and layout in row["rounds"]:
                times = row["rounds"][layout]["time"]
                found[f"{where}: {layout} / packed"] = stats.ratio(times, packed["time"])
    for row in rows:
        for other in rows:
            same = all(row[key] == other[key] for key in ("collective", "width"))
            if not same or (row["backend"], other["backend"]) != ("nccl2", "legacy"):
                continue
            for layout in row["rounds"].keys() & other["rounds"].keys():
                times = (each["rounds"][layout]["time"] for each in (row, other))
                where = f"{row['collective']}, width {row['width']}, {layout}"
                found[f"{where}: nccl2 / legacy"] = stats.ratio(*times)
    return found


def report(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Header and rows of the table."""
    rows: list[tuple[Any, ...]] = []
    for row in result["rows"]:
        for layout in LAYOUTS:
            named = (row["collective"], row["width"], row["backend"], layout)
            values = row["rounds"].get(layout)
            if values is None:
                rows.append((*named, "not there", "", "", ""))
                continue
            ms = statistics.median(values["time"])
            host = statistics.median(values["host"])
            speed = row["nbytes"] / ms / 1e6
            count = row["kernels"].get(layout)
            shown = "" if count is None else f"{count:.0f}"
            rows.append((*named, f"{ms:.3f}", f"{speed:.1f}", f"{host:.0f}", shown))
    return ("collective", "width", "backend", "layout", "ms", "GB/s", "host us", "kernels"), rows


def notes(result: dict[str, Any]) -> list[str]:
    """What ran, and what its figures do not show."""
    rows = result["rows"]
    ran = {f"{row['backend']} is {row['class']} of {row['ranks']} rank(s)" for row in rows}
    found = sorted(ran)
    if result["options"]["ranks"] == 1:
        found.append("one rank sends nothing: figures are of calls and copies, not of a network")
    absent = {
        f"{row['backend']} has no {row['collective']}, {layout}: {why}"
        for row in rows
        for layout, why in row["absent"].items()
    }
    return found + sorted(absent)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The collectives of one Llama block, by layout.")
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--widths", type=common.integers, default="1024,2048,4096,8192")
    parser.add_argument("--ranks", type=int, help="default: one a GPU; elsewhere 2")
    parser.add_argument(
        "--small", type=int, default=SMALL, help="gathered bytes below which hybrid packs"
    )
    parser.add_argument("--kernels", action="store_true", help="count kernels, too (GPU only)")
    common.add_timing(
        parser,
        10,
        rounds=7,
        device="cuda" if on_gpu else "cpu",
        devices=variants.DEVICES,
        clock=False,
    )
    options = parser.parse_args(arguments)
    if options.ranks is None:
        options.ranks = torch.cuda.device_count() if options.device == "cuda" else 2
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print(f"{stats.describe(stats.environment(options.device))}\n")
    result = measure(options)
    print(stats.table(*report(result)))
    stats.print_ratios(result["ratios"])
    for sentence in notes(result):
        print(sentence)
    stats.write_json(options.json, options.device, result)


if __name__ == "__main__":
    main()
