"""Instructions that a sharding runtime adds to a step: the same in a quiet hour and a busy one.

    python -m benchmarks.instructions --shrink 4                     # models of benchmarks.step
    python -m benchmarks.instructions --models 32x9 --variants none,torch,fsdp2

The steps of `benchmarks.step` under valgrind's cachegrind, which counts the instructions that the
processor executes. What they cost in time depends on caches and on who else uses the machine; how
many there are does not, so that one run is enough and a change of a per cent shows. The garbage
collector sees what the steps make and nothing older. valgrind (https://valgrind.org) is not a
Python package: install it with the system's.

One process imports everything and forks two children for each model and runtime, which differ in
the number of steps alone:

    parent   import torch, fsdp2
      |- child   build, warm up                    --> instructions a
      `- child   build, warm up, ``steps`` steps   --> instructions b      (b - a) / steps
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import harness, step, variants

WARMUP, STEPS = 3, 2
CACHEGRIND = ("--tool=cachegrind", "--cachegrind-out-file=/dev/null", "--cache-sim=no")
INSIDE = "--inside"  # what the counted process is told: the specs of its children
COUNTED = re.compile(r"==(\d+)== I +refs: +([\d,]+)")


def run_children(specs: Sequence[dict[str, Any]]) -> None:
    """Inside valgrind: fork a child for each, one after the other, and print its process id."""
    import torch.distributed.fsdp  # noqa: F401  # once for all children

    import fsdp2.sharding.api  # noqa: F401

    for spec in specs:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _run_child(spec)
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"{spec['label']} ended with status {status}")
        print(json.dumps({"pid": pid, "label": spec["label"], "steps": spec["steps"]}))


def _run_child(spec: dict[str, Any]) -> None:
    """Build, warm up, run the steps, and leave without any clean-up."""
    status = 1
    try:
        run = step.make_step(spec)
        for _ in range(WARMUP):
            run()
        gc.collect()
        gc.freeze()
        for _ in range(spec["steps"]):
            run()
        status = 0
    finally:
        os._exit(status)


def counted(specs: Sequence[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """Instructions of each child, by its label and steps."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise SystemExit("valgrind was not found; install it with the system's packages")
    command = [sys.executable, "-m", "benchmarks.instructions", INSIDE, json.dumps(specs)]
    done = subprocess.run(
        [valgrind, *CACHEGRIND, *command],
        cwd=harness.ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the counted process failed:\n{done.stdout}\n{done.stderr}")
    return parsed(done.stdout, done.stderr)


def parsed(stdout: str, stderr: str) -> dict[tuple[str, int], int]:
    """As `counted`, from what the children and valgrind printed."""
    by_pid = {int(pid): int(count.replace(",", "")) for pid, count in COUNTED.findall(stderr)}
    children = [json.loads(line) for line in stdout.splitlines() if line.startswith('{"pid"')]
    return {(each["label"], each["steps"]): by_pid[each["pid"]] for each in children}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Thousands of instructions of a step, by label; and the ratios of `benchmarks.step`."""
    rounds: harness.Rounds = {}
    for precision in options.precision:
        specs = step.specs_of(options, options.models, precision)
        each = [
            {**spec, "label": label, "steps": steps}
            for label, spec in specs.items()
            for steps in (0, options.steps)
        ]
        found = counted(each)
        for label in specs:
            more = found[label, options.steps] - found[label, 0]
            rounds[label] = {"host": [more / options.steps / 1e3]}
    return {"options": vars(options), "rounds": rounds, "ratios": step.ratios_of(rounds)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    default = ("none", "torch", "fsdp2", "packed")
    parser = harness.make_parser(
        __doc__, variants=variants.VARIANTS, default=default, rounds=None, steps=STEPS
    )
    known = tuple(step.STACKS)
    parser.add_argument("--models", type=harness.among(known), default="32x9,llama,moe,lora")
    precisions = variants.PRECISIONS
    parser.add_argument("--precision", type=harness.among(precisions), default="fp32")
    parser.add_argument("--shrink", type=int, default=1, help="divides the number of blocks")
    parser.add_argument("--world-size", type=harness.integers, default="8", help="comma list")
    options = parser.parse_args(arguments)
    without = {"device": "cpu", "ranks": 0, "fill": False, "recompute": False, "compiled": False}
    return argparse.Namespace(**{**vars(options), **without})


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print(harness.describe(harness.environment()))
    result = measure(options)
    rows = [(label, f"{each['host'][0]:.0f}") for label, each in result["rounds"].items()]
    print(harness.table(("model, precision, variant", "thousands of instructions"), rows))
    for label, found in result["ratios"].items():
        print(f"{label}: {found.median:.3f}")
    harness.write_json(options.json, result, timed=False)


if __name__ == "__main__":
    if sys.argv[1:2] == [INSIDE]:
        run_children(json.loads(sys.argv[2]))
    else:
        main()
