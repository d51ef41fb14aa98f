"""CPU time of ``from fsdp2 import fully_shard``, and of rooms that load when they are first used.

    python benchmarks/imports.py                       # as after a first import: bytecode is there
    python benchmarks/imports.py --without-bytecode    # every module is compiled

An import happens once in a process, so each figure is of fresh processes, which have imported
torch, DTensor and DCP before. A room's row is what its first use adds to that. The least time is
the figure: others that use the machine only add to it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import options as common
from benchmarks import stats, workers

ROOMS = ("checkpoint", "fsdp1", "full", "optim", "planning", "reports", "tracing", "wrap", "xla")

SOURCE = """if True:
    import importlib, json, sys, time
    import torch, torch.distributed.checkpoint, torch.distributed.tensor
    sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], sys.argv[2] == "without"
    *before, last = sys.argv[3:]
    def load(name):  # `import fsdp2` alone loads nothing
        getattr(importlib.import_module(name), "fully_shard", None)
    for name in before:
        load(name)
    modules, start = len(sys.modules), time.process_time()
    load(last)
    print(json.dumps([(time.process_time() - start) * 1e3, len(sys.modules) - modules]))
"""

Found = dict[str, dict[str, list[float]]]
"""Milliseconds and modules of each process, by what is imported."""


def measure(rooms: Sequence[str], rounds: int, bytecode: bool) -> Found:
    names = [["fsdp2"], *(["fsdp2", f"fsdp2.{room}"] for room in rooms)]
    found: Found = {each[-1]: {"ms": [], "modules": []} for each in names}
    with tempfile.TemporaryDirectory() as folder:
        cache = [folder, "with" if bytecode else "without"]
        for turn in range(rounds + bytecode):
            for each in names:
                ms, modules = _import([*cache, *each])
                if turn or not bytecode:  # the first writes it
                    found[each[-1]]["ms"].append(ms)
                    found[each[-1]]["modules"].append(modules)
    return found


def _import(arguments: list[str]) -> tuple[float, int]:
    command = [sys.executable, "-c", SOURCE, *arguments]
    done = subprocess.run(command, cwd=workers.ROOT, stdout=subprocess.PIPE, check=True)
    ms, modules = json.loads(done.stdout)
    return ms, modules


def report(found: Found) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Header and rows of a table."""
    rows: list[Sequence[object]] = [
        (name, f"{each['modules'][0]:g}", f"{min(each['ms']):.1f}", stats.summarize(each["ms"]))
        for name, each in found.items()
    ]
    return ("import", "modules", "ms, least", "median"), rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="CPU time of imports.")
    parser.add_argument("--rooms", nargs="*", choices=ROOMS, default=ROOMS, help="default: all")
    parser.add_argument("--without-bytecode", action="store_true")
    common.add_timing(parser, device=None, clock=False)
    options = parser.parse_args(arguments)
    found = measure(options.rooms, options.rounds, not options.without_bytecode)
    print(f"CPU time of imports after torch, DTensor and DCP, {options.rounds} processes")
    print(stats.table(*report(found)))
    stats.write_json(options.json, "cpu", {"options": vars(options), "imports": found})


if __name__ == "__main__":
    main()
