"""Plans of `fsdp2.plan` beside what was measured: time of steps, and memory at the peak.

    python -m benchmarks.planned                                    # decoders, one GPU
    python -m benchmarks.planned --presets 1.1b,1.9b-moe --ranks 2  # two GPUs, over NCCL
    python -m benchmarks.planned --memory                           # peaks on two ranks of a CPU

**Decoders** are those of `benchmarks.step`. This machine is measured first (`fsdp2 calibrate`),
unless ``--machine`` names a file. Then steps of fsdp2 take turns, and each is planned from the same
model, loss and calls of `fully_shard`; nothing is fitted. Without ``--ranks`` the collectives are
the null group's, which cost nothing in the plan, either: compute, the engine's copies, the host and
memory are compared. A GPU's memory has the workspaces of libraries, which a plan does not know.

**Peaks** (``--memory``): models train with AdamW, of one thread per rank. The peak is the most
bytes that torch's CPU allocator has given out at once in eight steps, on both ranks. Gloo gathers
into a copy of its own, at some time between the launch and the wait; a plan counts it for all of
that time. "outside" compares with all peaks that this timing allows. It needs c++ and ninja.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.cpp_extension
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import harness, models, variants
from fsdp2 import MixedPrecisionPolicy
from fsdp2.planning import Hardware, Plan, Settings, plan
from fsdp2.planning.hardware import load
from fsdp2.planning.presets import Block, Shape
from fsdp2.planning.rehearsal import policy_of, shard_as_planned
from fsdp2.testing.stand_in import device as stand_in
from fsdp2.tracing.record.notes import Operation

RECOMPUTED = ", recomputed"


def error(expected: float, seen: float) -> str:
    return f"{expected / seen - 1:+.1%}"


# ---------------------------------------------------------------------------------------------
# Decoders


def calibrated(device: str, ranks: int) -> Hardware:
    """This machine's figures, by processes that end before anything else runs."""
    kind = "cuda" if device == "cuda" else "cpu"
    threads = {} if ranks or kind == "cuda" else {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fsdp2", "calibrate", "--device", kind]
    if ranks:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[2:2] = [*launcher, "-m"]
    with tempfile.TemporaryDirectory(prefix="fsdp2-machine-") as folder:
        file = Path(folder, "machine.json")
        command += ["-o", str(file)]
        subprocess.run(command, cwd=harness.ROOT, env={**os.environ, **threads}, check=True)
        return load(file)


def as_measured(machine: Hardware, device: str, ranks: int) -> Hardware:
    """The machine as the steps find it: its collectives and its allocator.

    The null group's collectives take a call of the host, and no time of the device's; its process
    shares the cores with no other.
    """
    changes: dict[str, Any] = {"backend": "gloo" if device == "cpu" and ranks else "nccl"}
    if device == stand_in.NAME:
        changes |= {"device": "cuda", "rounding": 1}
    if not ranks:
        changes |= {"link": math.inf, "network": math.inf, "shared": False}
        changes |= {"link_latency": 0.0, "network_latency": 0.0}
        changes |= {"host_collective": machine.host_op}
    return dataclasses.replace(machine, **changes)


class _None(torch.optim.Optimizer):
    """The steps have no optimizer."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: object = None) -> None:
        pass


def planned_step(shape: Shape, spec: dict[str, Any], machine: Hardware) -> Plan:
    """The step of `step.decoder_step`, on paper."""
    logits: list[Tensor] = []  # the step's, which has them until it ends

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        tokens, targets = batch
        logits[:] = []
        logits.append(model(tokens).float())
        return F.cross_entropy(logits[0].flatten(0, 1), targets.flatten())

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return plan(
        lambda: models.Decoder(shape),
        lambda: torch.zeros(2, 1, shape.seq, dtype=torch.long),
        units={Block},
        mesh=spec["ranks"] or spec["world_size"],
        hardware=machine,
        loss=loss,
        optimizer=_None,
        tokens=shape.seq,
        checkpointing=spec["recompute"],
        precision=mixed if spec["precision"] == "mixed" else None,
    )


def measure_decoders(options: argparse.Namespace) -> dict[str, Any]:
    if options.device == stand_in.NAME:
        stand_in.build()
    machine = load(options.machine) if options.machine else None
    machine = machine or calibrated(options.device, options.ranks)
    specs = {}
    for presets, recompute in ((options.presets, False), (options.recomputed, True)):
        for preset in presets:
            specs[preset + RECOMPUTED * recompute] = {
                **{"model": preset, "variant": "fsdp2", "precision": options.precision},
                **{"world_size": 8, "ranks": options.ranks, "device": options.device},
                **{"shape": asdict(models.PRESETS[preset]), "recompute": recompute},
            }
    lost: dict[str, str] = {}
    request = {"steps": options.steps, "clock": "wall"}
    found = harness.measure("step", specs, options.rounds, options.ranks, lost, **request)
    rows: dict[str, dict[str, float]] = {}
    there = as_measured(machine, options.device, options.ranks)
    for name, each in found.items():
        made = planned_step(Shape(**specs[name]["shape"]), specs[name], there)
        duration = "device" if "device" in each else "wall"
        row = {"planned ms": made.time.step * 1e3, "ms": statistics.median(each[duration])}
        if "allocated" in each:
            row["planned GB"] = made.memory.peak.rounded / 1e9
            row["GB"] = statistics.median(each["allocated"])
        rows[name] = row
        said = [f"{name}: {row['planned ms']:.2f} ms planned, {row['ms']:.2f} measured"]
        said.append(error(row["planned ms"], row["ms"]))
        if "GB" in row:
            said.append(f"{row['planned GB']:.4f} GB planned, {row['GB']:.4f} measured")
            said.append(error(row["planned GB"], row["GB"]))
        print(", ".join(said))
    for name, why in lost.items():
        print(f"{name}: {why}")
    return {"options": vars(options), "machine": machine, "rows": rows, "lost": lost}


# ---------------------------------------------------------------------------------------------
# Peaks

RANKS, WARMUP, COUNTED = 2, 2, 8


@cache
def allocator() -> Any:
    """An allocator around torch's own, which counts bytes of all threads; of C++, and compiled.

    torch's profiler does not see what gloo's threads free.
    """
    source = Path(__file__).with_name("cpu_memory.cpp")
    options: Any = {"is_python_module": False}
    library = ctypes.CDLL(
        torch.utils.cpp_extension.load("fsdp2_cpu_memory", [str(source)], **options)
    )
    library.fsdp2_peak.restype = ctypes.c_int64
    return library


@dataclass(frozen=True)
class Subject:
    """A model that is planned and trained: how to make it and a batch, its units, its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    unit: type[nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]


class Residual(nn.Module):
    """Two linear layers behind a norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        layers = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = x + self.layers(x)
        return done


class Convolution(nn.Sequential):
    """A convolution, a batch norm and a ReLU."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


def _squared(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).float().square().mean()
    return found


def _predicted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def subjects() -> dict[str, Subject]:
    """The models, by name."""

    def decoder(ffn: int, experts: int) -> Subject:
        shape = Shape(256, 4, ffn, 8, 4, 2048, 128, experts, 2)
        tokens = (torch.arange(4 * 128) % 2048).view(4, 128)
        make = lambda: models.Decoder(shape)  # noqa: E731  # as the others
        return Subject(make, lambda: (tokens, tokens.clone()), Block, _predicted)

    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def images() -> nn.Module:
        blocks = [Convolution(3, 16), Convolution(16, 32), Convolution(32, 64)]
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
        return nn.Sequential(*blocks, *head)

    return {
        "MLP": Subject(
            lambda: nn.Sequential(*(Residual(256) for _ in range(6))),
            *(lambda: torch.zeros(512, 256), Residual, _squared),
        ),
        "Llama": decoder(704, 0),
        "mixture of experts": decoder(256, 8),
        "transformer encoder": Subject(
            encoder, lambda: torch.zeros(8, 128, 128), nn.TransformerEncoderLayer, _squared
        ),
        "conv net": Subject(
            images,
            lambda: (torch.zeros(16, 3, 32, 32), torch.arange(16) % 10),
            *(Convolution, _predicted),
        ),
    }


def make_worker(spec: dict[str, Any]) -> harness.Handler:
    harness.join_ranks(spec, RANKS)
    memory, known = allocator(), subjects()
    memory.fsdp2_count()
    mesh = init_device_mesh("cpu", (RANKS,))

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        gc.collect()
        subject = known[request["subject"]]
        model = subject.make()
        settings = Settings(mesh=(RANKS,), checkpointing=request["recompute"])
        shard_as_planned(model, mesh, settings, policy_of((subject.unit,)))
        optimizer = torch.optim.AdamW(model.parameters())
        batch = subject.batch()
        for number in range(WARMUP + COUNTED):
            if number == WARMUP:
                memory.fsdp2_peak()
            subject.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"peak": memory.fsdp2_peak()}

    return handle


def measure_memory(only: str, rounds: int) -> list[dict[str, Any]]:
    """A row of bytes for each model that has some words in its name, and recomputed."""
    machine = dataclasses.replace(load("epyc-2core"), memory=2**40, reserved=0)
    allocator()  # compiled once
    rows = []
    with harness.pool("planned", {"ranks": {}}, RANKS, at_once=True) as pool:
        for name, subject in subjects().items():
            for recompute in (False, True) if only in name else ():
                made = plan(
                    *(subject.make, subject.batch),
                    units={subject.unit},
                    mesh=RANKS,
                    hardware=machine,
                    loss=subject.loss,
                    checkpointing=recompute,
                )
                asked = {"subject": name, "recompute": recompute}
                found = [pool["ranks"].ask(**asked)["peak"] for _ in range(rounds)]
                expected, seen = made.memory.peak.live, statistics.median(found)
                row = {"model": name + RECOMPUTED * recompute, "planned": expected}
                row |= {"measured": seen, "rounds": found, "error": expected / seen - 1}
                rows.append({**row, "outside": outside(expected, _largest_gather(made), seen)})
    return rows


def outside(expected: float, copy: float, seen: float) -> float:
    """How far a peak is from all that timing allows: with gloo's copy, and without it."""
    return abs(min(max(seen, expected - copy), expected) / seen - 1)


def _largest_gather(made: Plan) -> int:
    notes = made.rehearsal.recording.notes
    gathers = (n for n in notes if isinstance(n, Operation) and n.name == "all-gather")
    return max(note.nbytes for note in gathers)


def print_rows(rows: list[dict[str, Any]], label: str, unit: str, scale: float) -> None:
    """A table, and how many are how near."""
    shown = [
        (row[label], *(f"{row[k] * scale:.2f}" for k in ("planned", "measured")), row["error"])
        for row in rows
    ]
    cells = [(*row[:-1], f"{row[-1]:+.1%}") for row in shown]
    print(harness.markdown((label, f"planned, {unit}", f"measured, {unit}", "error"), cells))
    for limit in (0.03, 0.10):
        within = sum(abs(row["error"]) <= limit for row in rows)
        print(f"{within} of {len(rows)} within {limit:.0%}")


# ---------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    devices = ("cuda", "cpu", stand_in.NAME)
    parser = harness.make_parser(__doc__, rounds=5, steps=8, devices=devices)
    known = harness.among(models.PRESETS)
    parser.add_argument("--presets", type=known, default="1.1b,2.8b,1.9b-moe", help="comma list")
    parser.add_argument("--recomputed", type=known, default=[], help="presets, recomputed, too")
    parser.add_argument("--ranks", type=int, default=0, help="real ones; default: none are")
    parser.add_argument("--precision", choices=variants.PRECISIONS, default="mixed")
    parser.add_argument("--machine", help="a file of `fsdp2 calibrate`; default: calibrates")
    parser.add_argument("--memory", action="store_true", help="peaks of CPU models instead")
    parser.add_argument("--only", default="", help="with --memory: those with these words")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print(harness.describe(harness.environment(options.device)))
    results: Any
    if options.memory:
        results = measure_memory(options.only, options.rounds)
        print_rows(results, "model", "MB", 1e-6)
    else:
        results = measure_decoders(options)
    harness.write_json(options.json, results, options.device)
    if isinstance(results, dict) and results["lost"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
