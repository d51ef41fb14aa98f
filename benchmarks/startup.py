"""Time from a model without memory to its first step.

    python benchmarks/startup.py                      # 100 blocks of 10 parameters, 8 ranks
    python benchmarks/startup.py --blocks 20 --rounds 3
    python benchmarks/startup.py --precision mixed --world-size 1024
    python benchmarks/startup.py --model llama        # the parameters of real blocks
    python benchmarks/startup.py --table              # and what a first step of fsdp2's does
    python benchmarks/startup.py --instructions       # counted under valgrind, in place of times

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
round. "none" is the same model unsharded: what torch itself takes to start up. A full collection of
garbage takes as long as a first step, of what torch has imported, and comes in whichever part has
made enough objects; so it is kept from those. Times are wall time; `--clock cpu` takes the
process's CPU time instead. With `--instructions` each part is counted as
`benchmarks/instructions.py` does it: the same whatever else runs, so that one round is enough.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks import first_step, host_cost, instructions, stats, variants, workers
from benchmarks import options as common

PARTS = ("first use", "shard", "materialise", "first", "second")
TOTAL = "shard + first"
VARIANTS = ("none", "torch", "fsdp2")
BATCH = 4


# ---------------------------------------------------------------------------------------------
# In a worker


def make_run(spec: dict[str, Any]) -> tuple[dict[str, Callable[[], object]], torch.device]:
    """The parts, each of which runs once in a process's life."""
    variant, precision = spec["variant"], spec["precision"]
    device = variants.prepare_process(spec["device"], spec["world_size"])
    if variant != "none":
        variants.fsdp2_api(variant)  # the import
    dtype = variants.input_dtype(variant, precision)

    def make_parts(blocks: int) -> dict[str, Callable[[], object]]:
        with torch.device("meta"):
            model, width = host_cost.make_model({**spec, "blocks": blocks})
        x = torch.randn(BATCH, width, device=device, dtype=dtype, requires_grad=True)
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

    return {"first use": use_once, **make_parts(spec["blocks"])}, device


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    if spec["table"]:
        first_step.watch()  # before hooks are registered
    parts, device = make_run(spec)

    def handle(request: dict[str, Any]) -> dict[str, float]:
        """Start up: once in this process's life."""
        synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
        clock = stats.CLOCKS[request["clock"]]
        gc.collect()
        gc.freeze()
        found = {}
        table: first_step.Rows = []
        for name in PARTS:
            start = clock()
            if spec["table"] and name == "first":
                table = first_step.taken_apart(parts[name], clock)
            else:
                parts[name]()
            synchronize()
            found[name] = (clock() - start) * 1e3
        return {**found, TOTAL: found["shard"] + found["first"], "table": table}

    return handle


def run_counted(specs: list[dict[str, Any]]) -> None:
    """Inside valgrind: a child for each spec, which says when each part begins and ends."""
    import torch.distributed.fsdp  # noqa: F401  # once for all children

    import fsdp2.api  # noqa: F401

    for spec in specs:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            _, status = os.waitpid(pid, 0)
            if status:
                raise SystemExit(f"{spec['variant']} ended with status {status}")
            continue
        status = 1
        try:
            parts, _ = make_run(spec)
            gc.collect()
            gc.freeze()
            for name in PARTS:
                instructions.mark(variant=spec["variant"], part=name, end=False)
                parts[name]()
                instructions.mark(variant=spec["variant"], part=name, end=True)
            sys.stdout.flush()
            status = 0
        finally:
            os._exit(status)


# ---------------------------------------------------------------------------------------------
# In the parent


def measure(options: argparse.Namespace) -> dict[str, Any]:
    specs = {variant: make_spec(options, variant) for variant in options.variants}
    if options.instructions:
        rounds = counted(list(specs.values()))
        return {"options": vars(options), "rounds": rounds, "ratios": ratios(rounds)}
    answers: dict[str, list[dict[str, Any]]] = {variant: [] for variant in specs}
    for _ in range(options.rounds):
        for variant, spec in specs.items():
            answers[variant].append(_start_up(spec, options.clock))
    rounds = {
        variant: {part: [answer[part] for answer in each] for part in (*PARTS, TOTAL)}
        for variant, each in answers.items()
    }
    table: first_step.Rows = []
    if options.table:
        spec = {**make_spec(options, "fsdp2"), "table": True}
        table = _start_up(spec, options.clock)["table"]
    return {
        "options": vars(options),
        "rounds": rounds,
        "ratios": ratios(rounds),
        "table": table,
    }


def make_spec(options: argparse.Namespace, variant: str) -> dict[str, Any]:
    keys = ("model", "blocks", "params_per_block", "dim", "world_size", "precision", "device")
    spec = {key: getattr(options, key) for key in keys}
    return {**spec, "variant": variant, "table": False}


def _start_up(spec: dict[str, Any], clock: str) -> dict[str, Any]:
    """One process's answer."""
    with workers.pool("startup", {spec["variant"]: spec}) as pool:
        return pool[spec["variant"]].ask(clock=clock)


def counted(specs: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Millions of instructions, by variant and part."""
    found = {
        (said["variant"], said["part"], said["end"]): counts[instructions.INSTRUCTIONS]
        for said, counts in instructions.counted(__file__, specs)
    }
    rounds: dict[str, dict[str, list[float]]] = {}
    for variant in (spec["variant"] for spec in specs):
        by_part = rounds[variant] = {}
        for part in PARTS:
            ran = found[variant, part, True] - found[variant, part, False]
            by_part[part] = [ran / 1e6]
        by_part[TOTAL] = [by_part["shard"][0] + by_part["first"][0]]
    return rounds


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
    if options["instructions"]:
        values = "millions of instructions"
    print(f"\n{options['precision']}: {values}")
    kinds = (*PARTS, TOTAL)
    rows = [
        (variant, *(_value(parts[kind]) for kind in kinds))
        for variant, parts in result["rounds"].items()
    ]
    print(stats.table(("variant", *kinds), rows))
    stats.print_ratios(result["ratios"])
    if result.get("table"):
        print(f"\nwhat the first step of fsdp2 does, ms ({options['clock']} clock)")
        print(stats.table(*first_step.table(result["table"])))


def _value(values: Sequence[float]) -> str:
    return f"{values[0]:.1f}" if len(values) == 1 else str(stats.summarize(values))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time from a model without memory to its first step."
    )
    common.add_tiny(parser, 100, 10)
    parser.add_argument(
        "--model",
        choices=("tiny", *host_cost.REAL),
        default="tiny",
        help="tiny (the default): [dim, dim] parameters; others: the parameters of real blocks, of "
        "width 64",
    )
    parser.add_argument(
        "--table", action="store_true", help="print what a first step of fsdp2's does, too"
    )
    parser.add_argument(
        "--instructions",
        action="store_true",
        help="count instructions under valgrind, in place of times",
    )
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
    if sys.argv[1:2] == [instructions.INSIDE]:
        run_counted(json.loads(sys.argv[2]))
    else:
        main()
