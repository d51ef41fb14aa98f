"""Planned and measured steps of the models of `step.py`, side by side: time, and peak memory.

    python -m benchmarks.planned_steps                                    # one GPU
    python -m benchmarks.planned_steps --presets 1.1b,moe --ranks 2       # two, over NCCL
    python -m benchmarks.planned_steps --presets tiny,tiny-moe --device cpu --rounds 2

First this machine is measured (`fsdp2 calibrate`), unless `--machine` names a
file. Then the steps of fsdp2 that `step.py` times take turns, and each is planned from the same
model, loss and calls of `fully_shard`. Nothing of the plan is fitted to the steps.

Without `--ranks` the collectives are the null group's, and cost nothing in the plan, either: what
is compared is compute, the engine's copies, the host, and memory. With `--ranks` they are real, and
the plan prices them as calibrated. On a CPU a rank computes with one thread.

A GPU's memory is what its allocator gave out at the peak of a burst. It includes the workspaces of
libraries (cuBLAS), which a plan does not know. The stand-in counts tensors; a CPU counts nothing.

A step that fails or runs out of memory is left out; the others go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import options as common
from benchmarks import stats, step, variants, workers
from benchmarks.models import PRESETS, Llama, LlamaBlock, LlamaConfig, MoEBlock
from fsdp2 import MixedPrecisionPolicy
from fsdp2.planning import Hardware, Plan, plan
from fsdp2.planning.hardware import load
from fsdp2.testing.stand_in import device as stand_in

RECOMPUTED = ", recomputed"


# ---------------------------------------------------------------------------------------------
# The machine


def calibrated(device: str, ranks: int) -> Hardware:
    """This machine's figures, by processes that end before anything else runs."""
    kind = "cuda" if device == "cuda" else "cpu"
    threads = {} if ranks or kind == "cuda" else {"OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(workers.ROOT)]))
    command = [sys.executable, "-m", "fsdp2", "calibrate", "--device", kind]
    if ranks:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[2:2] = [*launcher, "-m"]
    with tempfile.TemporaryDirectory(prefix="fsdp2-machine-") as folder:
        file = Path(folder, "machine.json")
        done = subprocess.run(
            [*command, "-o", str(file)],
            env={**os.environ, "PYTHONPATH": path, **threads},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"this machine cannot be measured:\n{done.stdout}{done.stderr}")
        return load(file)


def as_measured(machine: Hardware, device: str, ranks: int, coalesces: bool) -> Hardware:
    """The machine as the steps find it: its collectives and its allocator.

    The null group's collectives take a call of the host, and no time of the device's; its process
    shares the cores with no other.

    Args:
        machine: as it was calibrated.
        device: of the steps.
        ranks: real ones; 0: the null group's.
        coalesces: whether the steps' backend does; plans know legacy NCCL, which does, and others.
    """
    changes: dict[str, Any] = {"backend": "nccl" if coalesces else "nccl2"}
    if device == "cpu" and ranks:
        changes["backend"] = "gloo"
    if device == stand_in.NAME:
        changes |= {"device": "cuda", "rounding": 1}
    if not ranks:
        changes |= {"link": math.inf, "network": math.inf, "shared": False}
        changes |= {"link_latency": 0.0, "network_latency": 0.0}
        changes |= {"host_collective": machine.host_op}
    return dataclasses.replace(machine, **changes)


# ---------------------------------------------------------------------------------------------
# The plan


class _None(torch.optim.Optimizer):
    """The steps have no optimizer."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: object = None) -> None:
        pass


def planned(config: LlamaConfig, options: argparse.Namespace, machine: Hardware) -> Plan:
    """The step of `step.make_step`, on paper."""
    logits: list[Tensor] = []  # the step's, which has them until it ends

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        tokens, targets = batch
        logits[:] = []
        logits.append(model(tokens))
        return F.cross_entropy(logits[0].flatten(0, 1), targets.flatten())

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return plan(
        lambda: Llama(config),
        lambda: torch.zeros(2, config.batch, config.seq, dtype=torch.long),
        units={MoEBlock if config.experts else LlamaBlock},
        mesh=options.ranks or options.world_size,
        hardware=machine,
        loss=loss,
        optimizer=_None,
        tokens=config.batch * config.seq,
        checkpointing=options.recompute,
        precision=mixed if options.precision == "mixed" else None,
    )


# ---------------------------------------------------------------------------------------------
# Side by side


def cases_of(options: argparse.Namespace) -> dict[str, tuple[LlamaConfig, argparse.Namespace]]:
    """What is planned and measured, by name: a configuration, and the options of its step."""
    found = {}
    for presets, recompute in ((options.presets, False), (options.recomputed, True)):
        for preset in presets:
            given = argparse.Namespace(**{**vars(options), "recompute": recompute, "fill": False})
            found[preset + RECOMPUTED * recompute] = (PRESETS[preset], given)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.device == stand_in.NAME:
        stand_in.build()
    machine = load(options.machine) if options.machine else None
    machine = machine or calibrated(options.device, options.ranks)
    cases = cases_of(options)
    specs = {
        name: {**step.spec_of(given, config), "variant": "fsdp2"}
        for name, (config, given) in cases.items()
    }
    lost: dict[str, str] = {}
    if options.ranks:
        ready: Any = workers.rank_pools("step", specs, options.ranks, lost)
    else:
        ready = workers.pool("step", specs, lost=lost)
    with ready as pool:
        answers = workers.take_turns(pool, options.rounds, lost, steps=options.steps)
        backends = workers.take_turns(pool, 1, lost, coalesces=True)
    if not answers:
        raise SystemExit("no step is left: " + "; ".join(lost.values()))
    rows = {}
    for name, each in answers.items():
        if name in lost:
            continue
        coalesces = bool(backends[name][0]["coalesces"])
        there = as_measured(machine, options.device, options.ranks, coalesces)
        made = planned(*cases[name], there)
        rows[name] = {
            "planned": {"ms": made.time.step * 1e3, "GB": made.memory.peak.rounded / 1e9},
            "measured": _measured(each),
        }
    result = {"options": vars(options), "machine": machine, "rows": rows, "lost": lost}
    return {**result, "ratios": ratios(rows)}


def _measured(answers: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """A figure a round, of what there is."""
    duration = "device" if "device" in answers[0] else "wall"
    found = {"ms": [answer[duration] for answer in answers]}
    if "allocated" in answers[0]:
        found["GB"] = [answer["allocated"] for answer in answers]
    return found


def ratios(rows: Mapping[str, Any]) -> dict[str, stats.Summary]:
    """Planned over measured, of each round."""
    return {
        f"{name}, planned / measured, {unit}": stats.ratio(
            [row["planned"][unit]] * len(values), values
        )
        for name, row in rows.items()
        for unit, values in row["measured"].items()
    }


def table(result: Mapping[str, Any]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Header and rows."""
    rows: list[Sequence[str]] = []
    for name, row in result["rows"].items():
        cells = [name]
        for unit, digits in (("ms", 2), ("GB", 4)):
            expected, seen = row["planned"][unit], row["measured"].get(unit)
            found = statistics.median(seen) if seen else None
            cells.append(f"{expected:.{digits}f}")
            cells.append("" if found is None else f"{found:.{digits}f}")
            cells.append("" if found is None else f"{expected / found - 1:+.1%}")
        rows.append(cells)
    units = [f"{what}, {unit}" for unit in ("ms", "GB") for what in ("planned", "measured", "off")]
    return ("step", *units), rows


def report(result: Mapping[str, Any]) -> None:
    print(stats.table(*table(result)))
    stats.print_ratios(result["ratios"])
    for name, why in result["lost"].items():
        print(f"{name}: {why}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Planned and measured steps of Llama-like models, side by side."
    )
    known = common.among(PRESETS)
    parser.add_argument("--presets", type=known, default="1.1b,2.8b,moe", help="comma list")
    parser.add_argument(
        "--recomputed", type=known, default=[], help="presets with activation checkpointing, too"
    )
    parser.add_argument("--machine", help="a file of `fsdp2 calibrate`")
    step.add_sharding(parser)
    common.add_timing(parser, 8, rounds=5, device="cuda", devices=variants.DEVICES, clock=False)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print("Steps of fsdp2, planned and measured")
    print(stats.describe(stats.environment(options.device)) + "\n")
    result = measure(options)
    report(result)
    step.conclude(options, result)


if __name__ == "__main__":
    main()
