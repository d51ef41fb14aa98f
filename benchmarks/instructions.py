"""Instructions that a sharding runtime adds to a step: the same in a quiet hour and a busy one.

    python benchmarks/instructions.py --shrink 4               # seven models, five variants
    python benchmarks/instructions.py --cases 32x9 --variants none,torch,fsdp2,kept
    python benchmarks/instructions.py --cases 32x9,128x9 --variants none,torch,fsdp2 --caches

The models and steps of `benchmarks/scaling.py` (and, for `benchmarks/optimizer.py --instructions`,
the optimizers and steps of that), under valgrind's cachegrind, which counts the instructions that
the processor executes. What they cost in time depends on caches and on who else
uses the machine; how many there are does not, so that one run is enough and a change of a per cent
shows. The garbage collector sees what the steps make and nothing older. valgrind
(https://valgrind.org) is not a Python package: install it with the system's.

With --caches cachegrind also counts what misses a core's second cache, of 1 MiB, and what misses a
last one, of 8 MiB; ``--caches 256,2048`` takes others, in KiB. It takes twice as long. A quarter of
the model (``--shrink 4``) in caches of a quarter shows about the same.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import scaling, stats

WARMUP_STEPS, STEPS = 3, 2
CACHEGRIND = ("--tool=cachegrind", "--cachegrind-out-file=/dev/null")
INSIDE = "--inside"  # what the counted process is told: the specs of its children
CACHES = (1024, 8192)  # KiB, of a core and of all cores
WAYS, LINE = 16, 64
INSTRUCTIONS = "I refs"
MISSES = {"second cache": "D1 misses", "last cache": "LLd misses"}  # as cachegrind calls them
"""Misses of data. Its first level of data stands for a core's second cache, its last for the last:
it simulates two. Misses of code are of the first level for all models alike."""
COUNTED = re.compile(r"==(\d+)== (I|D1|LLd) +(refs|misses): +([\d,]+)")

Counts = dict[str, dict[str, float]]
"""Instructions of a step, or misses, by case and variant."""

Children = dict[tuple[str, int], int]
"""What was counted in a child, by its label and its steps."""


# ---------------------------------------------------------------------------------------------
# Inside valgrind


def run_children(specs: list[dict[str, Any]]) -> None:
    """Fork a child for each, one after the other, and print its process id."""
    import torch.distributed.fsdp  # noqa: F401  # once for all children

    import fsdp2.api  # noqa: F401

    for spec in specs:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            run_child(spec)
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"{spec['label']} ended with status {status}")
        print(json.dumps({"pid": pid, "label": spec["label"], "steps": spec["steps"]}))


def mark(**said: Any) -> None:
    """Inside valgrind: let `counted` know how many instructions this process has run by now.

    valgrind prints what a process has run, its parent's before the fork included, when it ends. So
    a child is forked that ends at once.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    print(json.dumps({"pid": pid, **said}))


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
    counted = count(specs, options.caches)
    found = by_step(counted[INSTRUCTIONS], options)
    sizes = scaling.sizes_of(cases)
    rounds = {
        name: {variant: [value] for variant, value in by_variant.items()}
        for name, by_variant in found.items()
    }
    kinds = MISSES.items() if options.caches else ()
    return {
        "precision": options.precision,
        "cases": sizes,
        "counts": found,
        "misses": {name: by_step(counted[called], options) for name, called in kinds},
        "ratios": {
            label: summary.median for label, summary in scaling.ratios(rounds, sizes).items()
        },
    }


def by_step(counted: Children, options: argparse.Namespace) -> Counts:
    """What a step of each case and variant adds to its warm-up."""
    found: Counts = {}
    for name in options.cases:
        for variant in options.variants:
            first, second = (counted[f"{name} {variant}", steps] for steps in (0, options.steps))
            found.setdefault(name, {})[variant] = (second - first) / options.steps
    return found


def count(specs: list[dict[str, Any]], caches: Sequence[int] = ()) -> dict[str, Children]:
    """Run all specs under valgrind.

    Args:
        specs: a child each: what ``make_step`` of ``benchmarks.<spec["benchmark"]>`` builds a step
            of, with "label" and "steps".
        caches: KiB of the second cache and of the last, if their misses are counted.

    Returns:
        By what is counted, as cachegrind calls it.
    """
    found: dict[str, Children] = {}
    for said, counts in counted(__file__, specs, caches):
        for name, number in counts.items():
            found.setdefault(name, {})[said["label"], said["steps"]] = number
    return found


def counted(
    script: str, specs: object, caches: Sequence[int] = ()
) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """What children of ``script`` said, and what was counted of each until then.

    Args:
        script: run under valgrind with `INSIDE` and ``specs`` as JSON.
        specs: what it is to do.
        caches: as for `count`.
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise SystemExit("valgrind was not found; install it with the system's packages")
    done = subprocess.run(
        [valgrind, *cachegrind(caches), sys.executable, script, INSIDE, json.dumps(specs)],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the counted process failed:\n{done.stdout}\n{done.stderr}")
    return parsed(done.stdout, done.stderr)


def cachegrind(caches: Sequence[int]) -> tuple[str, ...]:
    """Arguments of valgrind; as for `count`."""
    if not caches:
        return (*CACHEGRIND, "--cache-sim=no")
    second, last = (f"{size * 1024},{WAYS},{LINE}" for size in caches)
    return (*CACHEGRIND, "--cache-sim=yes", f"--D1={second}", f"--LL={last}")


def parsed(stdout: str, stderr: str) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """As `counted`, from what the children and valgrind printed."""
    by_pid: dict[int, dict[str, int]] = {}
    for pid, level, what, number in COUNTED.findall(stderr):
        by_pid.setdefault(int(pid), {})[f"{level} {what}"] = int(number.replace(",", ""))
    children = [json.loads(line) for line in stdout.splitlines() if line.startswith('{"pid"')]
    return [(child, by_pid[child["pid"]]) for child in children]


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


def misses_table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Header and rows: misses a block of a whole step, and those that are added."""
    kinds = result["misses"]
    titles = (f"{kind}{added}" for added in (", a block", ", added a block") for kind in kinds)
    rows: list[tuple[object, ...]] = []
    for name, by_variant in result["counts"].items():
        blocks = result["cases"][name]["blocks"]
        for variant in by_variant:
            numbers = [found[name][variant] / blocks for found in kinds.values()]
            plain = [found[name].get("none") for found in kinds.values()]
            pairs = zip(numbers, plain, strict=True)
            more = ["" if few is None else f"{many - few / blocks:.0f}" for many, few in pairs]
            rows.append((name, variant, *(f"{number:.0f}" for number in numbers), *more))
    return ("case", "variant", *titles), rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Instructions that a runtime adds to a step.")
    scaling.add_models(parser)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--caches",
        nargs="?",
        type=_sizes,
        const=CACHES,
        default=(),
        metavar="KIB,KIB",
        help="count misses of a second and a last cache, too",
    )
    parser.add_argument("--json", metavar="FILE", help="write results there as well")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    return options


def _sizes(text: str) -> tuple[int, int]:
    second, last = map(int, text.split(","))
    return second, last


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print(stats.describe(stats.environment("cpu")))
    result = measure(options)
    print(f"\n{result['precision']}, thousands of instructions")
    print(stats.table(*table(result)))
    if result["misses"]:
        print(f"\nmisses of caches of {options.caches[0]} and {options.caches[1]} KiB")
        print(stats.table(*misses_table(result)))
    for label, value in result["ratios"].items():
        print(f"{label}: {value:.3f}")
    stats.write_json(options.json, "cpu", result)


if __name__ == "__main__":
    if sys.argv[1:2] == [INSIDE]:
        run_children(json.loads(sys.argv[2]))
    else:
        main()
