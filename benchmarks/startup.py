"""Time from a model without memory to its first step.

    python benchmarks/startup.py                      # 100 blocks of 10 parameters, 8 ranks
    python benchmarks/startup.py --blocks 20 --rounds 3
    python benchmarks/startup.py --precision mixed --world-size 1024

A process starts up once, so each round starts a fresh one for every variant, one after another. The
model is on the meta device and the process group is null (collectives return at once). The parts,
each with a synchronisation at its end on a GPU:

    first use    all of the following on a throwaway model of one block: mostly what torch imports
                 when DTensors are first used, the same for every runtime
    shard        `fully_shard` on every block and on the root
    materialise  `to_empty` and `reset_parameters`
    first        the first step: forward, backward and `zero_grad(set_to_none=True)`
    second       the step after it, for comparison

The figure to watch is fsdp2 / torch of "shard + first", the median over rounds of the ratio in each
round. "none" is the same model unsharded: what torch itself takes to start up. Times are wall time;
`--clock cpu` takes the process's CPU time instead.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks import options as common
from benchmarks import stats, variants, workers
from fsdp2.testing.blocks import tiny_blocks

PARTS = ("first use", "shard", "materialise", "first", "second")
TOTAL = "shard + first"
VARIANTS = ("none", "torch", "fsdp2")
BATCH = 4


# ---------------------------------------------------------------------------------------------
# In a worker


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    variant, precision = spec["variant"], spec["precision"]
    device = variants.prepare_process(spec["device"], spec["world_size"])
    if variant != "none":
        variants.fsdp2_api(variant)  # the import
    dtype = variants.input_dtype(variant, precision)

    def make_parts(blocks: int) -> dict[str, Callable[[], object]]:
        with torch.device("meta"):
            model = tiny_blocks(blocks, spec["params_per_block"], spec["dim"])
        x = torch.randn(BATCH, spec["dim"], device=device, dtype=dtype, requires_grad=True)
        step = variants.step_of(model, x)
        return {
            "shard": lambda: variants.shard(model, variant, precision, spec["world_size"], device),
            "materialise": lambda: variants.materialise(
                model, variant, precision, spec["world_size"], device
            ),
            "first": step,
            "second": step,
        }

    def use_once() -> None:
        for part in make_parts(1).values():
            part()

    parts = {"first use": use_once, **make_parts(spec["blocks"])}

    def handle(request: dict[str, Any]) -> dict[str, float]:
        """Start up: once in this process's life."""
        synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
        clock = stats.CLOCKS[request["clock"]]
        gc.collect()
        found = {}
        for name in PARTS:
            start = clock()
            parts[name]()
            synchronize()
            found[name] = (clock() - start) * 1e3
        return {**found, TOTAL: found["shard"] + found["first"]}

    return handle


# ---------------------------------------------------------------------------------------------
# In the parent


def measure(options: argparse.Namespace) -> dict[str, Any]:
    keys = ("blocks", "params_per_block", "dim", "world_size", "precision", "device")
    common = {key: getattr(options, key) for key in keys}
    answers: dict[str, list[dict[str, Any]]] = {variant: [] for variant in options.variants}
    for _ in range(options.rounds):
        for variant in options.variants:
            with workers.pool("startup", {variant: {**common, "variant": variant}}) as pool:
                answers[variant].append(pool[variant].ask(clock=options.clock))
    rounds = {
        variant: {part: [answer[part] for answer in each] for part in (*PARTS, TOTAL)}
        for variant, each in answers.items()
    }
    return {"options": vars(options), "rounds": rounds, "ratios": ratios(rounds)}


def ratios(rounds: dict[str, dict[str, list[float]]]) -> dict[str, stats.Summary]:
    """fsdp2 over torch, a part each."""
    if not {"torch", "fsdp2"} <= rounds.keys():
        return {}
    ours, torchs = rounds["fsdp2"], rounds["torch"]
    return {
        f"fsdp2 / torch, {part}": stats.ratio(ours[part], torchs[part]) for part in (TOTAL, *PARTS)
    }


def report(result: dict[str, Any]) -> None:
    options = result["options"]
    values = f"ms ({options['clock']} clock), median [min .. max] of {options['rounds']} processes"
    print(f"\n{options['precision']}: {values}")
    kinds = (*PARTS, TOTAL)
    rows = [
        (variant, *(stats.summarize(parts[kind]) for kind in kinds))
        for variant, parts in result["rounds"].items()
    ]
    print(stats.table(("variant", *kinds), rows))
    stats.print_ratios(result["ratios"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time from a model without memory to its first step."
    )
    common.add_tiny(parser, 100, 10)
    parser.add_argument("--precision", choices=variants.PRECISIONS, default="fp32")
    common.add_variants(parser, VARIANTS)
    common.add_timing(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    common.print_tiny(options)
    result = measure(options)
    report(result)
    stats.write_json(options.json, options.device, result)


if __name__ == "__main__":
    main()
