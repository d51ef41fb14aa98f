"""What replica groups cost in a step without faults: the step of `train_lm`, beside plain HSDP.

    python benchmarks/elastic.py                      # --preset small; needs torchft
    python benchmarks/elastic.py --preset tiny --rounds 3 --steps 5

Four gloo ranks of one thread. As HSDP they are one mesh of two copies of two shards. As replica
groups they are two groups of two shards, and torchft's manager stands between them: it asks the
lighthouse who takes part, averages units, and votes. Both all-reduce the same rows unit by unit,
and train on the same number of sequences.

"step" is the time of the slowest rank, "cpu" the processor's time of the busiest one, all threads
included: what its host has to do, whoever else uses the machine. torchft's threads are in it.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

if __package__ in (None, ""):  # run as a script
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch.distributed as dist
from torch.distributed import TCPStore

from benchmarks import gloo, stats, workers
from benchmarks import options as common
from fsdp2.elastic import attach, batch_number
from fsdp2.examples import elastic
from fsdp2.examples.model import PRESETS
from fsdp2.examples.train_lm import backward, set_rate, train_step

GROUPS, RANKS = 2, 2  # ranks of each group
WARMUP_STEPS = 5
VARIANTS = ("hsdp", "elastic")
TIMEOUT = datetime.timedelta(minutes=2)  # of a collective, should another rank have died


# ---------------------------------------------------------------------------------------------
# In a worker


def make_worker(spec: dict[str, Any]) -> workers.Handler:
    step = (_elastic if spec["variant"] == "elastic" else _hsdp)(spec)
    for number in range(WARMUP_STEPS):
        step(number)
    done = WARMUP_STEPS

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal done
        steps = request["steps"]
        gc.collect()
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step(done)
            done += 1
        figures = {"step": time.perf_counter() - start, "cpu": time.process_time() - used}
        return {name: seconds * 1e3 / steps for name, seconds in figures.items()}

    return handle


def _hsdp(spec: dict[str, Any]) -> Callable[[int], object]:
    ranks = GROUPS * RANKS
    rank = workers.join_ranks(spec, ranks, TIMEOUT)
    sequences = str(GROUPS * spec["sequences"])
    arguments = [*spec["arguments"], "--batch-size", sequences, "--replicate", str(GROUPS)]
    run = gloo.make_run("fsdp2", rank, arguments, ranks)
    return lambda number: train_step(run, number)


def _elastic(spec: dict[str, Any]) -> Callable[[int], object]:
    group, rank = divmod(spec["rank"], RANKS)
    os.environ |= {"MASTER_ADDR": elastic.HOST, "MASTER_PORT": str(spec["ports"][group])}
    store = f"{spec['store']}, group {group}"
    workers.join_ranks({"rank": rank, "store": store}, RANKS, TIMEOUT)
    arguments = [*spec["arguments"], "--batch-size", str(spec["sequences"])]
    run = gloo.make_run("fsdp2", rank, arguments, RANKS)
    manager, _ = elastic.make_manager(run.model, run.optimizer, run.options, rank, group)
    steps = attach(run.model, manager, run.optimizer)

    def step(number: int) -> None:
        steps.begin()
        set_rate(run, number)
        backward(run, batch_number(manager))
        if not (steps.commit() and manager.num_participants() == GROUPS):
            raise SystemExit(f"step {number} was not of all groups: {manager.errored()}")

    return step


# ---------------------------------------------------------------------------------------------
# In the parent


def measure(options: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=GROUPS, join_timeout_ms=60_000)
    stores = [
        TCPStore(elastic.HOST, 0, is_master=True, wait_for_workers=False) for _ in range(GROUPS)
    ]
    spec = {
        "arguments": ["--preset", options.preset, "--threads", "1"],
        "sequences": options.sequences,
        "ports": [store.port for store in stores],
        "environment": {elastic.LIGHTHOUSE: lighthouse.address()},
    }
    if options.data:
        spec["arguments"] += ["--data", options.data]
    specs = {variant: {**spec, "variant": variant} for variant in options.variants}
    with workers.rank_pools("elastic", specs, GROUPS * RANKS) as found:
        answers = workers.take_turns(found, options.rounds, steps=options.steps)
    lighthouse.shutdown()
    rounds = {
        variant: {kind: [answer[kind] for answer in each] for kind in ("step", "cpu")}
        for variant, each in answers.items()
    }
    return {"options": vars(options), "rounds": rounds, "ratios": ratios(rounds)}


def ratios(rounds: dict[str, dict[str, list[float]]]) -> dict[str, stats.Summary]:
    if {*VARIANTS} - rounds.keys():
        return {}
    return {
        f"elastic / hsdp, {kind}": stats.ratio(rounds["elastic"][kind], rounds["hsdp"][kind])
        for kind in ("step", "cpu")
    }


def table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(header, rows)."""
    rows = [
        (variant, stats.summarize(values["step"]), stats.summarize(values["cpu"]))
        for variant, values in result["rounds"].items()
    ]
    return ("variant", "step", "cpu"), rows


def page_table(result: dict[str, Any]) -> str:
    """The table in Markdown, and the ratios."""
    shown = stats.markdown(*table(result))
    return f"ms per step of `train_lm`:\n\n{shown}\n\n{stats.in_line(result['ratios'])}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The training step of train_lm in two replica groups of two ranks, and HSDP."
    )
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--sequences", type=int, default=8, help="of a group in a step")
    parser.add_argument("--data", metavar="PATH", help="text (default: Python's own)")
    common.add_variants(parser, VARIANTS)
    common.add_timing(parser, 10, device=None, clock=False)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if importlib.util.find_spec("torchft") is None:
        raise SystemExit("torchft is missing: pip install 'fsdp2[elastic]'")
    print(
        f"train_lm --preset {options.preset}, {GROUPS} copies of {RANKS} gloo ranks of one thread\n"
        f"{stats.describe(stats.environment('cpu'))}"
    )
    result = measure(options)
    print(f"\nms a step, median [min .. max] of {options.rounds} rounds")
    print(stats.table(*table(result)))
    stats.print_ratios(result["ratios"])
    stats.write_json(options.json, "cpu", result)


if __name__ == "__main__":
    main()
