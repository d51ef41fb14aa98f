"""Time from an import to a second step: unsharded, torch's FSDP2, fsdp2.

    python -m benchmarks.startup                      # 100 blocks of 10 parameters, 8 ranks
    python -m benchmarks.startup --model llama --precision mixed --rounds 3

A process starts up once, so each round starts a fresh one for every variant, one after another. The
model is on the meta device and the process group is null (collectives return at once). The parts,
each with a synchronization at its end on a GPU:

    import       CPU time of ``from fsdp2 import fully_shard`` (or torch's), after torch, DTensor
                 and DCP; without bytecode, which a first import after an installation has to write
    first use    all of the following on a throwaway model of one block: mostly what torch imports
                 when DTensors are first used, the same for every runtime
    shard        `fully_shard` on every block and on the root
    materialise  `to_empty` and `reset_parameters`
    first        the first step: forward, backward and ``zero_grad(set_to_none=True)``
    second       the step after it, for comparison

The figure to watch is fsdp2 / torch of "shard + first", the median over rounds of the ratio in each
round. A full collection of garbage takes as long as a first step, so it is kept from the parts.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import harness, step, variants

PARTS = ("first use", "shard", "materialise", "first", "second")
TOTAL = "shard + first"
VARIANTS = ("none", "torch", "fsdp2")


def make_worker(spec: dict[str, Any]) -> harness.Handler:
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # what an import of fsdp2 is measured after

    variant, precision, world_size = spec["variant"], spec["precision"], 8

    def make_parts(shrink: int) -> dict[str, Callable[[], object]]:
        with torch.device("meta"):
            model = step.make_stack(spec["model"], shrink)
        dtype = variants.input_dtype(variant, precision)
        x = torch.randn(4, model.width, device=device, dtype=dtype, requires_grad=True)
        run = variants.step_of(model, x)
        return {
            "shard": lambda: variants.shard(model, variant, precision, world_size, device),
            "materialise": lambda: variants.materialise(model, variant, precision, device),
            "first": run,
            "second": run,
        }

    device = variants.prepare_process(spec["device"], world_size)
    variants.fsdp2_api(variant)

    def use_once() -> None:
        for part in make_parts(10**6).values():
            part()

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        """Start up: once in this process's life."""
        synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
        parts = {"first use": use_once, **make_parts(spec["shrink"])}
        gc.collect()
        gc.freeze()
        found = {}
        for name in PARTS:
            start = time.perf_counter()
            parts[name]()
            synchronize()
            found[name] = (time.perf_counter() - start) * 1e3
        return {**found, TOTAL: found["shard"] + found["first"]}

    return handle


_IMPORT = """
import sys, time, torch, torch.distributed.checkpoint, torch.distributed.tensor
sys.dont_write_bytecode, sys.pycache_prefix = True, sys.argv[1]
start = time.process_time()
from fsdp2 import fully_shard
print((time.process_time() - start) * 1e3)
"""


def measure_imports(rounds: int) -> list[float]:
    """CPU milliseconds of fsdp2's import, each in a fresh process."""
    found = []
    with tempfile.TemporaryDirectory() as folder:  # no bytecode is there
        for _ in range(rounds):
            command = [sys.executable, "-c", _IMPORT, folder]
            done = subprocess.run(command, cwd=harness.ROOT, stdout=subprocess.PIPE, check=True)
            found.append(float(done.stdout))
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rounds: harness.Rounds = {}
    for _ in range(options.rounds):
        for variant in options.variants:
            given = {name: getattr(options, name) for name in ("model", "precision", "device")}
            spec = {**given, "variant": variant, "shrink": options.shrink}
            own = harness.measure("startup", {variant: spec}, 1)[variant]
            for part, values in own.items():
                rounds.setdefault(variant, {}).setdefault(part, []).extend(values)
    ratios = {}
    for part in (TOTAL, *PARTS):
        if {"torch", "fsdp2"} <= rounds.keys():
            found = harness.ratio(rounds["fsdp2"][part], rounds["torch"][part])
            ratios[f"fsdp2 / torch, {part}"] = found
    return {
        "options": vars(options),
        "rounds": rounds,
        "ratios": ratios,
        "import": measure_imports(options.rounds),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__, variants=VARIANTS, devices=("cpu", "cuda"))
    parser.add_argument("--model", choices=step.STACKS, default="100x10")
    parser.add_argument("--shrink", type=int, default=1, help="divides the number of blocks")
    parser.add_argument("--precision", choices=variants.PRECISIONS, default="fp32")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print(harness.describe(harness.environment(options.device)))
    result = measure(options)
    harness.print_rounds(result["rounds"])
    harness.print_ratios(result["ratios"])
    print(f"import of fsdp2, CPU ms: {harness.summarize(result['import'])}")
    harness.write_json(options.json, result, options.device)


if __name__ == "__main__":
    main()
