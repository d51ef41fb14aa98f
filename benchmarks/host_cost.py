"""Host time that a sharding runtime adds to a step.

    python benchmarks/host_cost.py                       # 32 blocks of 9 parameters, 8 ranks;
                                                         # then the larger ones of scaling.py
    python benchmarks/host_cost.py --no-scaling          # without those
    python benchmarks/host_cost.py --world-size 8,1024   # ours at 1024 over ours at 8
    python benchmarks/host_cost.py --blocks 128 --params-per-block 100
    python benchmarks/host_cost.py --profile             # where our own time goes

The model is a stack of blocks with tiny parameters, the process group is null (collectives return
at once), so a step's time is the model's own host time plus the runtime's. A step is forward,
backward and `zero_grad(set_to_none=True)`. Each variant runs in a process of its own, in short
bursts that take turns. The figure to watch is

    (ours - none) / (torch - none)

the runtime's time as a fraction of that of torch's FSDP2: the median over rounds of the ratio in
each round. On a GPU a step has two times: `host`, until the Python step returns, and `full`, until
the device is done as well; there is a synchronisation before each step.

Times are wall time. On a machine that others use too, `--clock cpu` takes this process's CPU time
instead, which does not count the time that others run (on a GPU it counts busy waiting as well).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import nn

from benchmarks import options as common
from benchmarks import scaling, stats, variants, workers
from fsdp2.testing.blocks import (
    llama_blocks,
    lora_blocks,
    moe_blocks,
    tall_blocks,
    tiny_blocks,
)
from fsdp2.testing.stand_in import device as stand_in

WARMUP_STEPS = 5
BATCH = 4
REAL = {"llama": llama_blocks, "moe": moe_blocks, "lora": lora_blocks}


# ---------------------------------------------------------------------------------------------
# In a worker


def make_step(spec: dict[str, Any]) -> tuple[Callable[[], None], torch.device]:
    """Build the variant that `spec` describes: the parsed options, a world size, a precision."""
    variant, precision, world_size = spec["variant"], spec["precision"], spec["world_size"]
    device = variants.prepare_process(spec["device"], world_size, c10d=spec["c10d"])
    with torch.device("meta"):
        model, width = make_model(spec)
    model = variants.place(model, variant, precision, world_size, device)
    # Like an embedding's output, the input needs a gradient: so do all blocks' inputs.
    dtype = variants.input_dtype(variant, precision)
    x = torch.randn(BATCH, width, device=device, dtype=dtype, requires_grad=True)
    step = variants.step_of(model, x)
    return step, device


def make_model(spec: dict[str, Any]) -> tuple[nn.Module, int]:
    """The model, and the width of its input."""
    if spec["model"] in REAL:
        model = REAL[spec["model"]](spec["blocks"])
    elif spec["model"] == "tall":
        model = tall_blocks(spec["blocks"], spec["params_per_block"], rows=spec["rows"])
    else:
        model = tiny_blocks(spec["blocks"], spec["params_per_block"], spec["dim"])
    return model, model.width


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    step, device = make_step(spec)
    for _ in range(WARMUP_STEPS):
        step()

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        host, full = time_steps(step, request["steps"], device, stats.CLOCKS[request["clock"]])
        return {"host": statistics.median(host), "full": statistics.median(full)}

    return handle


def time_steps(
    step: Callable[[], None], steps: int, device: torch.device, clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Milliseconds of each step: until the host returns, and until the device is done."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    host, full = [], []
    gc.collect()
    for _ in range(steps):
        synchronize()
        start = clock()
        step()
        returned = clock()
        synchronize()
        host.append((returned - start) * 1e3)
        full.append((clock() - start) * 1e3)
    return host, full


def profile(spec: dict[str, Any], steps: int, lines: int = 40) -> None:
    """Print the functions that take most of a step's host time, by their own time.

    The profiler makes every Python call dearer, so shares are tilted towards small functions.
    """
    step, _ = make_step(spec)
    for _ in range(WARMUP_STEPS):
        step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    entries = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    by_own_time = sorted(entries, key=lambda item: item[1][2], reverse=True)
    rows = []
    for (file, line, function), (_, calls, own, cumulative, _) in by_own_time[:lines]:
        where = function if file == "~" else f"{'/'.join(file.split('/')[-2:])}:{line} {function}"
        milliseconds = (f"{seconds / steps * 1e3:.3f}" for seconds in (own, cumulative))
        rows.append((where, f"{calls / steps:.0f}", *milliseconds, f"{own / calls * 1e6:.2f}"))
    header = ("function", "calls/step", "own ms/step", "cumulative ms/step", "own us/call")
    print(stats.table(header, rows))


# ---------------------------------------------------------------------------------------------
# In the parent


def measure(options: argparse.Namespace, precision: str) -> dict[str, Any]:
    """All variants at all world sizes, in turns. Keys of "rounds" are variant@world_size."""
    if options.device == stand_in.NAME:
        stand_in.build()
    specs = {}
    for world_size in options.world_sizes:
        for variant in options.variants:
            # without sharding the world size makes no difference: measured once
            label = "none" if variant == "none" else f"{variant}@{world_size}"
            specs.setdefault(label, make_spec(options, variant, precision, world_size))
    with workers.pool("host_cost", specs) as pool:
        answers = workers.take_turns(pool, options.rounds, steps=options.steps, clock=options.clock)
    rounds = {
        label: {kind: [answer[kind] for answer in each] for kind in ("host", "full")}
        for label, each in answers.items()
    }
    return {"precision": precision, "rounds": rounds, "ratios": ratios(options, rounds)}


def ratios(
    options: argparse.Namespace, rounds: dict[str, dict[str, list[float]]]
) -> dict[str, stats.Summary]:
    """Ratios of host times, by what they say."""
    host = {label: kinds["host"] for label, kinds in rounds.items()}
    if "none" not in host:
        return {}
    over_none = {
        label: stats.added(values, host["none"])
        for label, values in host.items()
        if label != "none"
    }
    found = {}
    first, *others = options.world_sizes
    for size in options.world_sizes:
        if f"torch@{size}" not in over_none:
            continue
        for variant in options.variants:
            if variant not in ("none", "torch"):
                key = f"({variant} - none) / (torch - none), world size {size}"
                found[key] = stats.ratio(over_none[f"{variant}@{size}"], over_none[f"torch@{size}"])
    for size in others:
        for variant in options.variants:
            if variant != "none":
                big, small = f"{variant}@{size}", f"{variant}@{first}"
                found[f"{big} / {small}"] = stats.ratio(host[big], host[small])
                key = f"({big} - none) / ({small} - none)"
                found[key] = stats.ratio(over_none[big], over_none[small])
    return found


def report(options: argparse.Namespace, result: dict[str, Any]) -> None:
    values = f"ms a step ({options.clock} clock), median [min .. max] of {options.rounds} rounds"
    print(f"\n{result['precision']}: {values}")
    kinds = ("host", "full") if options.device == "cuda" else ("host",)
    rows = [
        (label, *(stats.summarize(values[kind]) for kind in kinds))
        for label, values in result["rounds"].items()
    ]
    print(stats.table(("variant", *kinds), rows))
    stats.print_ratios(result["ratios"])


def make_spec(
    options: argparse.Namespace, variant: str, precision: str, world_size: int
) -> dict[str, Any]:
    keys = ("blocks", "params_per_block", "model", "dim", "rows", "device", "c10d")
    spec = {key: getattr(options, key) for key in keys}
    return {**spec, "variant": variant, "precision": precision, "world_size": world_size}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Host time that a sharding runtime adds to a step."
    )
    parser.add_argument("--blocks", type=int, help="default 32")
    parser.add_argument("--params-per-block", type=int, help="default 9")
    parser.add_argument(
        "--model",
        choices=("auto", "tiny", "tall", *REAL),
        default="auto",
        help="tiny: [dim, dim] parameters; tall: [rows, 8], which shard evenly at every world size "
        "up to rows; auto (the default): tall where a world size does not divide dim; llama, moe, "
        "lora: the parameters of real blocks, of width 64",
    )
    parser.add_argument("--dim", type=int, default=16, help="of tiny parameters (default 16)")
    parser.add_argument("--rows", type=int, default=1024, help="of tall parameters (default 1024)")
    parser.add_argument(
        "--world-size", type=common.integers, dest="world_sizes", help="comma list (default 8)"
    )
    parser.add_argument(
        "--scaling",
        action=argparse.BooleanOptionalAction,
        help="measure the cases of scaling.py as well, in fp32 (default: where no blocks, "
        "parameters or world size are given)",
    )
    parser.add_argument("--precision", type=common.among(variants.PRECISIONS), default="fp32,mixed")
    common.add_variants(parser, variants.VARIANTS, ("none", "torch", "fsdp2", "packed"))
    common.add_timing(parser, 20, devices=variants.DEVICES)
    parser.add_argument(
        "--c10d",
        action="store_true",
        help="let every collective pay c10d's binding and dispatcher as well",
    )
    parser.add_argument(
        "--profile",
        nargs="?",
        const="fsdp2",
        choices=variants.VARIANTS,
        help="cProfile one variant (fsdp2 unless told) instead of measuring",
    )
    options = parser.parse_args(arguments)
    if options.scaling is None:
        given = (options.blocks, options.params_per_block, options.world_sizes)
        options.scaling = given == (None, None, None)
    options.blocks = options.blocks or 32
    options.params_per_block = options.params_per_block or 9
    options.world_sizes = options.world_sizes or [8]
    if options.model == "auto":
        even = all(options.dim % size == 0 for size in options.world_sizes)
        options.model = "tiny" if even else "tall"
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.profile:
        for precision in options.precision[:1]:
            spec = make_spec(options, options.profile, precision, options.world_sizes[0])
            print(f"{options.profile}, {precision}, world size {spec['world_size']}")
            profile(spec, options.steps)
        return
    print(
        f"{options.blocks} blocks {_said(options)}, "
        f"{options.device}\n{stats.describe(stats.environment(options.device))}"
    )
    results = []
    for precision in options.precision:
        results.append(measure(options, precision))
        report(options, results[-1])
    if options.scaling:
        results.append(scaling.measure_and_report(like(options)))
    stats.write_json(options.json, options.device, results)


def _said(options: argparse.Namespace) -> str:
    """What the blocks are, for people."""
    if options.model in REAL:
        return f"as of {options.model}, of width 64"
    shape = f"[{options.rows}, 8]" if options.model == "tall" else f"[{options.dim}, {options.dim}]"
    return f"of {options.params_per_block} parameters of {shape}"


def like(options: argparse.Namespace) -> argparse.Namespace:
    """Options of scaling.py that measure as these do."""
    known = [variant for variant in options.variants if variant in scaling.VARIANTS]
    clock, device, rounds = options.clock, options.device, str(options.rounds)
    arguments = ["--clock", clock, "--device", device, "--rounds", rounds]
    return scaling.parse([*arguments, "--variants", ",".join(known)])


if __name__ == "__main__":
    main()
