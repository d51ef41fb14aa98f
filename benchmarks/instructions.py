"""Instructions that a sharding runtime adds to a step: the same in a quiet hour and a busy one.

    python benchmarks/instructions.py --shrink 4               # seven models, five variants
    python benchmarks/instructions.py --cases 32x9 --variants none,torch,fsdp2,kept

The models and steps of `benchmarks/scaling.py` (and, for `benchmarks/optimizer.py --instructions`,
the optimizers and steps of that), under valgrind's cachegrind, which counts the instructions that
the processor executes. What they cost in time depends on caches and on who else
uses the machine; how many there are does not, so that one run is enough and a change of a per cent
shows. The garbage collector sees what the steps make and nothing older. valgrind
(https://valgrind.org) is not a Python package: install it with the system's.

One process imports everything and forks two for each model and runtime, which differ in the number
of steps alone:

    parent   import torch, fsdp2
      ├─ child   build, warm up                    ──> instructions a
      └─ child   build, warm up, ``steps`` steps   ──> instructions b      (b - a) / steps
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import scaling, stats

WARMUP_STEPS, STEPS = 3, 2
CACHEGRIND = ("--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
INSIDE = "--inside"  # what the counted process is told: the specs of its children
COUNTED = re.compile(r"==(\d+)== I\s+refs:\s+([\d,]+)")

Counts = dict[str, dict[str, float]]
"""Instructions of a step, by case and variant."""


# ---------------------------------------------------------------------------------------------
# Inside valgrind


def run_children(specs: list[dict[str, Any]]) -> None:
    """Fork a child for each, one after the other, and print its process id."""
    import torch.distributed.fsdp  # noqa: F401  # once for all children

    import fsdp2  # noqa: F401

    for spec in specs:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            run_child(spec)
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"{spec['label']} ended with status {status}")
        print(json.dumps({"pid": pid, "label": spec["label"], "steps": spec["steps"]}))


def run_child(spec: dict[str, Any]) -> None:
    """Build, warm up, run the steps, and leave without any clean-up."""
    status = 1
    try:
        benchmark = importlib.import_module(f"benchmarks.{spec['benchmark']}")
        step, _ = benchmark.make_step(spec)
        for _ in range(WARMUP_STEPS):
            step()
        gc.collect()
        gc.freeze()
        for _ in range(spec["steps"]):
            step()
        status = 0
    finally:
        os._exit(status)


# ---------------------------------------------------------------------------------------------
# Outside


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Instructions of a step of every case and variant, and the ratios of what is added."""
    cases = {name: scaling.CASES[name].shrunk(options.shrink) for name in options.cases}
    specs = [
        {
            **scaling.make_spec(options, cases[name], variant),
            "benchmark": "host_cost",
            "label": f"{name} {variant}",
            "steps": steps,
        }
        for name in cases
        for variant in options.variants
        for steps in (0, options.steps)
    ]
    counted = count(specs)
    found: Counts = {}
    for name in cases:
        for variant in options.variants:
            first, second = (counted[f"{name} {variant}", steps] for steps in (0, options.steps))
            found.setdefault(name, {})[variant] = (second - first) / options.steps
    sizes = scaling.sizes_of(cases)
    rounds = {
        name: {variant: [value] for variant, value in by_variant.items()}
        for name, by_variant in found.items()
    }
    return {
        "precision": options.precision,
        "cases": sizes,
        "counts": found,
        "ratios": {
            label: summary.median for label, summary in scaling.ratios(rounds, sizes).items()
        },
    }


def count(specs: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """Run all specs under valgrind; instructions by label and steps.

    Args:
        specs: what ``make_step`` of ``benchmarks.<spec["benchmark"]>`` builds a step of, with
            "label" and "steps".
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise SystemExit("valgrind was not found; install it with the system's packages")
    done = subprocess.run(
        [valgrind, *CACHEGRIND, sys.executable, __file__, INSIDE, json.dumps(specs)],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the counted process failed:\n{done.stdout}\n{done.stderr}")
    return parsed(done.stdout, done.stderr)


def parsed(stdout: str, stderr: str) -> dict[tuple[str, int], int]:
    """Instructions by label and steps, from what the children and valgrind printed."""
    by_pid = {int(pid): int(refs.replace(",", "")) for pid, refs in COUNTED.findall(stderr)}
    children = [json.loads(line) for line in stdout.splitlines() if line.startswith('{"pid"')]
    return {(child["label"], child["steps"]): by_pid[child["pid"]] for child in children}


def table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Header and rows, in thousands of instructions."""
    header = ("case", "variant", "a step, k", "added a block, k", "added a parameter, k")
    rows: list[tuple[object, ...]] = []
    for name, by_variant in result["counts"].items():
        size = result["cases"][name]
        for variant, value in by_variant.items():
            more = ("", "")
            if variant != "none" and "none" in by_variant:
                added = (value - by_variant["none"]) / 1e3
                more = (f"{added / size['blocks']:.1f}", f"{added / size['parameters']:.2f}")
            rows.append((name, variant, f"{value / 1e3:.0f}", *more))
    return header, rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Instructions that a runtime adds to a step.")
    scaling.add_models(parser)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", metavar="FILE", help="write results there as well")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print(stats.describe(stats.environment("cpu")))
    result = measure(options)
    print(f"\n{result['precision']}, thousands of instructions")
    print(stats.table(*table(result)))
    for label, value in result["ratios"].items():
        print(f"{label}: {value:.3f}")
    stats.write_json(options.json, "cpu", result)


if __name__ == "__main__":
    if sys.argv[1:2] == [INSIDE]:
        run_children(json.loads(sys.argv[2]))
    else:
        main()
