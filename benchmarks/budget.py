"""What one unit of 9 parameters does in a step, counted; and what that would take at least.

    python benchmarks/budget.py                       # counts alone: exact, on any machine
    python benchmarks/budget.py --precision mixed
    python benchmarks/budget.py --paths               # a Llama block, coalesced and packed
    python benchmarks/budget.py --time                # and microseconds, on a quiet machine
    python benchmarks/budget.py --time --device cuda

A unit is half of the difference between models of 4 and of 2 such units: the root's share is left
out. Calls, memory and tensors are those of a real step on the null process group; records and waits
of events and switches of streams are those of the same scheduler on simulated streams.

With --time each kind of operation is timed alone, in a loop: `us` is the floor, count times that.
Beside it stands what fsdp2 adds to the unsharded step for each unit (`host_cost.py`), and what
remains above the floor: fsdp2's own Python. The collectives' floor is the null group's; what a real
backend adds is in `collective_cost.py`, and the same for every runtime that makes the call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import host_cost, stats, variants
from fsdp2 import MixedPrecisionPolicy
from fsdp2.core.device.collectives import GroupCollectives
from fsdp2.core.device.streams import DeviceStreams, InlineStreams, Lane, Streams
from fsdp2.core.layout.mesh import wrap_local
from fsdp2.core.modules.registry import record_of
from fsdp2.core.params.param import ShardedParam
from fsdp2.record.notes import Await, Signal
from fsdp2.testing import counting
from fsdp2.testing.blocks import BlockStack, llama_blocks, tiny_blocks
from fsdp2.testing.null_group import CallLog, NullGroup, init_null_group
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.virtual import VirtualDevice

NOT_A_STEPS = ("fsdp2.testing.", "fsdp2.paper.")  # where the null process group is
PARAMS = 9
DIM = 16
WORLD_SIZE = 8
FEW, MANY = 2, 4  # units; a unit is half of the difference
REPEATS, LOOPS = 9, 2000

# Python functions that the engine or nn.Module enters fsdp2 by
ENTRIES = (
    "modules.hooks.pre_forward",
    "modules.hooks.post_forward",
    "modules.hooks._on_output_grad",
    "schedule.scheduler.exit_backward",
)

COPIES = ("aten.copy_", "aten._foreach_copy_", "aten._to_copy", "aten._chunk_cat")
PATHS = {"coalesced": "fsdp2", "packed": "packed"}  # a unit's way over the wire, by variant

# What is counted, in the order of the table. The second column says when it happens.
OPERATIONS = {
    "hook entered": "forward, its end, first gradient, last gradient",
    "all-gather": "before forward and before backward",
    "reduce-scatter": "after backward",
    "storage allocated": "gathered parameters twice; in mixed precision cast gradients",
    "storage freed": "the same",
    "tensor allocated": "reduced gradients, one flat tensor",
    "module slot stored": "gathered and sharded parameters, twice",
    "tensor view": "of an input that may have older uses: of none here",
    "views by a split": "of the reduced gradients that are equal except dim 0",
    "DTensor made": ".grad of the last parameter; those of the others are used again",
    "copy or cast": "shards before each gather, gradients before the reduction",
    "event recorded": "behind allocations, casts, collectives",
    "event waited for": "side lanes for COMPUTE, COMPUTE for side lanes",
    "stream switched to": "around casts and collectives",
    "Python function called": "in fsdp2, everything above included",
}


# ---------------------------------------------------------------------------------------------
# Counting


def _tiny(blocks: int) -> BlockStack:
    return tiny_blocks(blocks, PARAMS, DIM)


def _count_step(
    precision: str,
    blocks: int,
    variant: str = "fsdp2",
    build: Callable[[int], BlockStack] = _tiny,
) -> Counter[str]:
    """The operations of a whole step of a model of ``blocks`` units and a root without any."""
    log = CallLog()
    init_null_group(WORLD_SIZE, observer=log)
    try:
        model, step = variants.steady_step(build(blocks), variant, precision, WORLD_SIZE)
        log.clear()
        python, built_in = counting.called(step)
        collectives = log.counts()
        sharded = counting.operators(step)
        plain = variants.steady_step(build(blocks), "none", precision, WORLD_SIZE)[1]
        unsharded = counting.operators(plain)
        stores = 0
        for block in model.blocks:
            for group in record_of(block).unit.own_groups:  # type: ignore[union-attr]  # it is sharded
                # gathered twice and freed twice a step
                stores += 2 * (len(group.bound.to_unsharded) + len(group.bound.to_sharded))
    finally:
        dist.destroy_process_group()
    beyond = sharded - unsharded
    resizes = built_in["UntypedStorage.resize_"]
    return Counter(
        {
            "hook entered": sum(python[f"fsdp2.core.{entry}"] for entry in ENTRIES),
            "all-gather": _like(collectives, "all_gather"),
            "reduce-scatter": _like(collectives, "reduce_scatter"),
            "storage allocated": resizes // 2,
            "storage freed": resizes // 2,
            "tensor allocated": _like(beyond, "aten.empty"),
            "module slot stored": stores,
            "tensor view": _like(beyond, "aten.alias", "aten.as_strided"),
            "views by a split": _like(beyond, "aten.split_with_sizes"),
            "DTensor made": built_in["TensorBase._dtensor__new__"],
            "copy or cast": _like(beyond, *COPIES),
            "Python function called": sum(
                count
                for name, count in python.items()
                if name.startswith("fsdp2.") and not name.startswith(NOT_A_STEPS)
            ),
        }
    )


def _like(counts: dict[str, int], *starts: str) -> int:
    return sum(count for name, count in counts.items() if name.startswith(starts))


class _Lanes(VirtualDevice):
    """Simulated streams that also count switches of the current stream."""

    switches = 0

    def on(self, lane: Any) -> Any:
        self.switches += 1
        return super().on(lane)


def _count_streams(precision: str, blocks: int) -> Counter[str]:
    """Events and switches of a step, on simulated streams."""
    device = _Lanes()
    policy = MixedPrecisionPolicy()
    if precision == "mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    shapes = ((DIM, DIM),) * PARAMS
    children = [Node(f"block {i}", shapes=shapes) for i in range(blocks)]
    root = Node("root", children, list(range(blocks)), shapes=())
    simulation = Simulation(root, device, world_size=WORLD_SIZE, precision=policy)
    for _ in range(variants.STEADY):
        simulation.iteration()
    start, switches = len(device.trace), device.switches
    simulation.forward()
    simulation.backward()
    kinds = Counter(type(note) for note in device.trace[start:])
    return Counter(
        {
            "event recorded": kinds[Signal],
            "event waited for": kinds[Await],
            "stream switched to": device.switches - switches,
        }
    )


def count(precision: str) -> dict[str, float]:
    """Operations of one unit in a step, in the order of `OPERATIONS`."""
    found = {}
    few = _count_step(precision, FEW) + _count_streams(precision, FEW)
    many = _count_step(precision, MANY) + _count_streams(precision, MANY)
    for name in OPERATIONS:
        found[name] = (many[name] - few[name]) / (MANY - FEW)
    return found


def count_paths() -> dict[str, dict[str, float]]:
    """Operations of a Llama block in a step, by path and precision; those of streams left out."""
    found: dict[str, dict[str, float]] = {}
    for path, variant in PATHS.items():
        for precision in variants.PRECISIONS:
            few, many = (_count_step(precision, n, variant, llama_blocks) for n in (FEW, MANY))
            found[f"{path}, {precision}"] = {
                name: (many[name] - few[name]) / (MANY - FEW) for name in OPERATIONS if name in many
            }
    return found


def paths_table(counts: dict[str, dict[str, float]]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Header and rows: an operation each, a column for each path and precision."""
    names = [name for name in OPERATIONS if any(name in each for each in counts.values())]
    rows = [[name, *(f"{each.get(name, 0):g}" for each in counts.values())] for name in names]
    return ("operation", *counts), rows


# ---------------------------------------------------------------------------------------------
# Timing


def _microseconds(call: Callable[[], object], times: int = 1) -> float:
    """Median over repeats of the host time of a call that does the operation ``times`` times."""
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(LOOPS):
            call()
        found.append((time.perf_counter() - start) / LOOPS / times * 1e6)
    return statistics.median(found)


def _hooked(hooks: bool) -> Callable[[], object]:
    module = nn.Identity()
    if hooks:
        module.register_forward_pre_hook(lambda m, args, kwargs: (args, kwargs), with_kwargs=True)
        module.register_forward_hook(lambda m, args, output: None, always_call=True)
    return lambda: module(None)


def time_operations(device: torch.device, precision: str) -> dict[str, float]:
    """Microseconds of host time of each kind of operation, alone."""
    init_null_group(WORLD_SIZE)
    try:
        return _time_operations(device, precision)
    finally:
        dist.destroy_process_group()


def _time_operations(device: torch.device, precision: str) -> dict[str, float]:
    streams: Streams = DeviceStreams(device) if device.type == "cuda" else InlineStreams()
    mixed = precision == "mixed"
    numel = DIM * DIM // WORLD_SIZE
    full = torch.empty(PARAMS * DIM * DIM, device=device)
    shard = torch.empty(PARAMS * numel, device=device)
    half = torch.empty(PARAMS * numel, device=device, dtype=torch.bfloat16)
    outputs, inputs = list(full.split(DIM * DIM)), list(shard.split(numel))
    group = dist.group.WORLD
    assert isinstance(group, NullGroup)
    collectives = GroupCollectives(group, device, device.type == "cuda")
    model = variants.place(tiny_blocks(1, PARAMS, DIM), "fsdp2", "fp32", WORLD_SIZE, device)
    param: ShardedParam = record_of(model.blocks[0]).unit.own_groups[0].params[0]  # type: ignore[union-attr]
    spec, rows = param.sharded._spec, param.local
    storage = torch.empty(full.nbytes, dtype=torch.uint8, device=device).untyped_storage()
    nbytes = storage.size()
    store: dict[str, object] = {}
    swaps = [(store, str(i), param.sharded) for i in range(PARAMS)]
    event = streams.record(Lane.COMPUTE, "")

    def store_all() -> None:
        for target, name, value in swaps:
            target[name] = value

    def resize() -> None:
        storage.resize_(0)
        storage.resize_(nbytes)

    def switch() -> None:
        with streams.on(Lane.ALL_GATHER):
            pass

    def cast() -> None:
        torch._foreach_copy_(halves, shards)

    halves, shards = half.chunk(PARAMS), shard.chunk(PARAMS)
    flat = torch.empty(2 * PARAMS, DIM, device=device)
    hook = (_microseconds(_hooked(True)) - _microseconds(_hooked(False))) / 2
    found = {
        "hook entered": max(hook, 0.0),
        "all-gather": _microseconds(collectives.bind_all_gather_many(outputs, inputs)),
        "storage allocated": _microseconds(resize, 2),
        "tensor allocated": _microseconds(lambda: torch.empty(PARAMS * numel, device=device)),
        "module slot stored": _microseconds(store_all, PARAMS),
        "tensor view": _microseconds(lambda: shard[...]),
        "views by a split": _microseconds(lambda: flat.split_with_sizes([2] * PARAMS)),
        "DTensor made": _microseconds(lambda: wrap_local(rows, spec)),
        "copy or cast": _microseconds(cast) if mixed else 0.0,
        "event recorded": _microseconds(lambda: streams.record(Lane.COMPUTE, "")),
        "event waited for": _microseconds(lambda: streams.wait(Lane.ALL_GATHER, event, "")),
        "stream switched to": _microseconds(switch),
    }
    found["reduce-scatter"] = found["all-gather"]
    found["storage freed"] = found["storage allocated"]
    return found


def measure_added(options: argparse.Namespace) -> float:
    """Microseconds that fsdp2 adds to the unsharded step, a unit (`host_cost.py`)."""
    arguments = ["--variants", "none,fsdp2", "--precision", options.precision]
    arguments += ["--blocks", str(options.blocks), "--params-per-block", str(PARAMS)]
    arguments += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    arguments += ["--device", options.device]
    result = host_cost.measure(host_cost.parse(arguments), options.precision)
    host = {label: values["host"] for label, values in result["rounds"].items()}
    added = stats.added(host[f"fsdp2@{WORLD_SIZE}"], host["none"])
    return statistics.median(added) / options.blocks * 1e3


# ---------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"precision": options.precision, "counts": count(options.precision)}
    if options.time:
        result["us"] = time_operations(torch.device(options.device), options.precision)
        result["added"] = measure_added(options)
    return result


def report(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the table."""
    each, missing = result.get("us", {}), "not measured"
    rows = []
    floor = 0.0
    for name, when in OPERATIONS.items():
        number = result["counts"][name]
        us, total = missing, missing
        if name in each:
            us, total = f"{each[name]:.2f}", f"{number * each[name]:.1f}"
            floor += number * each[name]
        elif each:
            us = total = ""
        rows.append((name, f"{number:g}", us, total, when))
    if each:
        added = result["added"]
        rows.append(("floor: the sum", "", "", f"{floor:.1f}", ""))
        rows.append(("fsdp2 - none, measured", "", "", f"{added:.1f}", "a unit's share of a step"))
        rows.append(("above the floor", "", "", f"{added - floor:.1f}", "fsdp2's own Python"))
    return ("operation", "count", "us each", "us", "when"), rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What one unit does in a step, counted.")
    parser.add_argument("--precision", choices=variants.PRECISIONS, default="fp32")
    parser.add_argument("--paths", action="store_true", help="coalesced beside packed")
    parser.add_argument("--time", action="store_true", help="microseconds, too")
    parser.add_argument("--blocks", type=int, default=32, help="of the step that is timed")
    parser.add_argument("--rounds", type=int, default=7, help="of the step that is timed")
    parser.add_argument("--steps", type=int, default=20, help="of the step that is timed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="to time on")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.paths:
        counts = count_paths()
        print(f"a Llama block of width 64 as a unit, world size {WORLD_SIZE}\n")
        print(stats.table(*paths_table(counts)))
        stats.write_json(options.json, options.device, {"paths": counts})
        return
    print(
        f"one unit of {PARAMS} parameters of [{DIM}, {DIM}], world size {WORLD_SIZE}, "
        f"{options.precision}\n{stats.describe(stats.environment(options.device))}\n"
    )
    result = measure(options)
    print(stats.table(*report(result)))
    stats.write_json(options.json, options.device, result)


if __name__ == "__main__":
    main()
