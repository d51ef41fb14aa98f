"""An update of `fsdp2.optim.EMA`, against a step of AdamW over the same shards.

    python benchmarks/ema.py                   # 8 units of width 512: kernels bound by memory
    python benchmarks/ema.py --units 64 --dim 32    # bound by the host

One process, a null group of two ranks: averages communicate nothing. Gradients are given, and
stay. The rows are

    every 1     `EMA.update`, which averages in each call
    every 10    `EMA(every=10).update`: a mean of ten calls, one of which averages
    dtensors    ``torch.optim.AdamW(fused=True)`` over the DTensors
    foreach     ``torch.optim.AdamW(foreach=True)`` over the DTensors, torch's default on a GPU
    flat        ``FlatOptimizer`` of fused AdamW

The figures to watch are update / step, medians over rounds of the ratio in each round.
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
from torch import nn

from benchmarks import options as common
from benchmarks import stats, variants
from fsdp2.optim import EMA, FlatOptimizer
from fsdp2.testing.blocks import tiny_blocks

EVERY = {"every 1": 1, "every 10": 10}
STEPPED = ("dtensors", "foreach", "flat")
LONGEST = max(EVERY.values())  # calls per burst are a multiple: bursts hold as many averages
PARAMS_PER_UNIT = 9


def make_calls(options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """What is timed, by row: all over the shards of one model."""
    device = variants.prepare_process("cpu", 2)
    with torch.device("meta"):
        model: nn.Module = tiny_blocks(options.units, PARAMS_PER_UNIT, options.dim)
    model = variants.place(model, "fsdp2", "fp32", 2, device)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-4)
    params = list(model.parameters())
    adamw = {
        "dtensors": torch.optim.AdamW(params, lr=1e-4, fused=True),
        "foreach": torch.optim.AdamW(params, lr=1e-4, foreach=True),
        "flat": FlatOptimizer(model, torch.optim.AdamW, lr=1e-4, fused=True),
    }
    updates = {name: EMA(model, 0.999, every=every).update for name, every in EVERY.items()}
    return updates | {name: optimizer.step for name, optimizer in adamw.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    clock = stats.CLOCKS[options.clock]
    calls = make_calls(options)
    steps = -(-options.steps // LONGEST) * LONGEST
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(options.rounds + 1):
        for name, call in calls.items():
            gc.collect()
            start = clock()
            for _ in range(steps):
                call()
            if number:  # the first round warms up
                rounds[name].append((clock() - start) * 1e3 / steps)
    ratios = {
        f"{update} / {step}": stats.ratio(rounds[update], rounds[step])
        for step in STEPPED
        for update in EVERY
    }
    return {"options": vars(options), "rounds": rounds, "ratios": ratios}


def table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Header and rows."""
    rows: list[tuple[object, ...]] = [
        (name, stats.summarize(found)) for name, found in result["rounds"].items()
    ]
    return ("call", "ms"), rows


def page_table(result: dict[str, Any]) -> str:
    """What ran, and the ratios in Markdown."""
    options = result["options"]
    rows = [
        (step, *(_shown(result["ratios"][f"{update} / {step}"]) for update in EVERY))
        for step in STEPPED
    ]
    shown = stats.markdown(("AdamW's step", *(f"EMA, {update}" for update in EVERY)), rows)
    return f"{options['units']} units of width {options['dim']}, CPU time / AdamW's:\n\n{shown}"


def _shown(found: dict[str, float]) -> str:
    return f"{found['median']:.1%} [{found['min']:.1%} .. {found['max']:.1%}]"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An update of EMA against a step of AdamW.")
    parser.add_argument("--units", type=int, default=8, help="default 8")
    parser.add_argument("--dim", type=int, default=512, help="width of a unit (default 512)")
    common.add_timing(parser, 10, rounds=7, device=None)
    parser.set_defaults(clock="cpu")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print(
        f"{options.units} units of {PARAMS_PER_UNIT} matrices of width {options.dim}, one thread\n"
        f"{stats.describe(stats.environment('cpu'))}\n"
    )
    result = measure(options)
    print(stats.table(*table(result)))
    stats.print_ratios(result["ratios"])
    stats.write_json(options.json, "cpu", result)


if __name__ == "__main__":
    main()
