"""A program: random models and settings, planned, and run on the stand-in; one JSON line a case.

    python -m tests.planning.planned_memory 0 10      # cases 0 to 9
    python -m tests.planning.planned_memory train_lm  # its presets, on a CPU

Each line has what each collective was, its bytes, and all bytes that were allocated then, as the
plan says and as the stand-in's allocator counts. Of `train_lm` it has what a step's peak is above
what is there before it: as the plan says, and as torch's profiler adds up what the CPU's allocator
reports.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import random
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.core.device.kernels import Kernels
from fsdp2.examples import train_lm
from fsdp2.examples.model import token_losses
from fsdp2.planning import Settings, plan, presets
from fsdp2.planning.memory import Ledger
from fsdp2.planning.planner import Plan
from fsdp2.planning.rehearsal import shard_as_planned
from fsdp2.testing.null_group import null_world
from fsdp2.testing.stand_in import device
from fsdp2.tracing.paper.null_group import init_null_group
from fsdp2.tracing.paper.stage import GlooOnPaper
from fsdp2.tracing.record.notes import Operation

ODD_AND_EVEN = (8, 16, 24, 31, 40, 64, 96)
PRECISIONS = (
    None,
    fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
)
Collective = tuple[str, int, int]  # its kind, its bytes, and what was allocated


class Scale(nn.Module):
    """A parameter of one dim. Not a norm: its kernel has memory of its own on a CPU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Layer(nn.Module):
    """A residual block of some width, with or without bias and scale."""

    def __init__(self, dim: int, hidden: int, bias: bool, norm: bool) -> None:
        super().__init__()
        self.norm = Scale(dim) if norm else nn.Identity()
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Layers between two projections."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        dim = rng.choice(ODD_AND_EVEN)
        self.width = rng.choice(ODD_AND_EVEN)
        self.first = nn.Linear(self.width, dim)
        self.layers = nn.ModuleList(
            Layer(dim, rng.choice(ODD_AND_EVEN), rng.random() < 0.5, rng.random() < 0.5)
            for _ in range(rng.randint(1, 5))
        )
        self.last = nn.Linear(dim, rng.choice(ODD_AND_EVEN), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def settings_of(rng: random.Random) -> Settings:
    """Anything that `plan` knows and a device can do.

    Not mixed precision with accumulation: the stand-in adds gradients of two dtypes with the CPU's
    kernels, which cast one to a temporary tensor first. A GPU's do not.
    """
    precision = rng.choice(PRECISIONS)
    return Settings(
        mesh=rng.choice([(2,), (4,), (8,), (2, 2), (2, 4)]),
        batch=rng.choice([1, 4, 33]),
        accumulate=1 if precision is not None else rng.choice([1, 1, 2, 3]),
        reshard_after_forward=rng.choice([True, False, None]),
        reshard_after_backward=rng.random() < 0.85,
        window=rng.choice([1, 1, 2, 3]),
        checkpointing=rng.choice([False, False, True, 2]),
        precision=precision,
    )


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    """One with states, whose temporary tensors are those of an accelerator."""
    return torch.optim.AdamW(params, foreach=True)


def planned(make: Callable[[], Model], settings: Settings) -> tuple[Plan, list[Collective]]:
    """What the plan says."""
    width = make().width
    made = plan(
        make,
        lambda count: torch.zeros(count, width),
        units={Layer},
        hardware="h100",
        optimizer=optimizer_of,
        **vars(settings),
    )
    recording = made.rehearsal.recording
    ledger = Ledger(recording, 1)
    found = []
    for note in recording.notes:
        ledger.take(note)
        if isinstance(note, Operation) and note.kind == "collective":
            found.append((note.name, note.nbytes, ledger.live))
    return made, found


def chunk_cat(tensors: Any, dim: int, chunks: int, *, out: Tensor) -> None:
    """As ``torch._chunk_cat``, which is one kernel on a GPU, and pads in new tensors on a CPU."""
    assert dim == 0
    out.zero_()
    start = 0
    for tensor in tensors:
        rows = -(-len(tensor) // chunks)
        for chunk in range(chunks):
            part = tensor[chunk * rows : (chunk + 1) * rows].reshape(-1)
            out[chunk, start : start + part.numel()].copy_(part)
        start += rows * tensor[0].numel()


def train(
    model: Any, settings: Settings, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]
) -> None:
    """A step: micro-batches, and the optimizer's."""
    for micro in range(settings.accumulate):
        last = micro == settings.accumulate - 1
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        loss().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(make: Callable[[], Model], settings: Settings) -> tuple[list[Collective], int]:
    """What the stand-in does: collectives of its third step, and the peak of that."""
    found: list[Collective] = []
    noting = False

    def observe(_: object, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        if not noting or outputs[0].device.type != device.NAME:
            return
        many = outputs
        if name.startswith("all_gather"):
            name = "all-gather"
        elif name.startswith("reduce_scatter"):
            many, name = inputs, "reduce-scatter"
        else:
            name = "all-reduce"
        found.append((name, sum(t.nbytes for t in many), device.live_bytes() - empty))

    empty = device.live_bytes()
    with null_world(settings.world, observer=observe):
        names = ("replicate", "shard")[-len(settings.mesh) :]
        mesh = init_device_mesh(device.NAME, settings.mesh, mesh_dim_names=names)
        model = make().to(device.NAME)
        shard_as_planned(model, mesh, settings, {Layer})
        optimizer = optimizer_of(model.parameters())
        x = torch.zeros(settings.batch, model.width, device=device.NAME)
        for step in range(3):
            noting = step == 2
            device.peak_bytes()
            train(model, settings, optimizer, lambda: model(x).float().mean())
        return found, device.peak_bytes() - empty


# ---- train_lm on a CPU


def lm_settings() -> list[tuple[str, bool, Settings]]:
    """A preset, whether its blocks are recomputed, and the rest."""
    low = PRECISIONS[1]
    return [
        ("tiny", False, Settings(mesh=(2,), batch=8)),
        ("small", False, Settings(mesh=(2,), batch=8)),
        ("small", True, Settings(mesh=(4,), batch=8)),
        ("small", False, Settings(mesh=(2, 2), batch=4, reshard_after_forward=False)),
        ("small", False, Settings(mesh=(4,), batch=4, accumulate=2, precision=low)),
    ]


def lm_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of `train_lm`."""
    return token_losses(model(batch[0]), batch[1]).mean()


def lm_model(preset: str, recomputes: bool) -> presets.Model:
    flags = ["--activation-checkpointing"] if recomputes else []
    return train_lm.unsharded_model(train_lm.parse(["--preset", preset, *flags], None))


def lm_batch(count: int) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(count, 128, dtype=torch.int64)
    return tokens, tokens.clone()


def plan_lm(preset: str, recomputes: bool, settings: Settings) -> int:
    """Bytes of a step's peak above what is there before it."""
    with mock.patch.object(GlooOnPaper, "copies", False):  # the run's null group does not
        made = plan(
            lambda: lm_model(preset, recomputes),
            lm_batch,
            units={presets.Block},
            hardware="epyc-2core",
            loss=lm_step,
            optimizer=lambda params: torch.optim.SGD(params, foreach=True),
            **vars(settings),
        )
    return made.memory.peak.live - made.memory.before.live


def run_lm(preset: str, recomputes: bool, settings: Settings) -> int:
    """The same, as the profiler adds it up."""
    init_null_group(settings.world, kind=GlooOnPaper)
    names = ("replicate", "shard")[-len(settings.mesh) :]
    mesh = init_device_mesh("cpu", settings.mesh, mesh_dim_names=names)
    model: Any = lm_model(preset, recomputes)
    shard_as_planned(model, mesh, settings, {presets.Block})
    optimizer = torch.optim.SGD(model.parameters(), foreach=True)
    batch = lm_batch(settings.batch)

    step = functools.partial(train, model, settings, optimizer, lambda: lm_step(model, batch))
    for _ in range(2):
        step()
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    dist.destroy_process_group()
    return peak_of(profiler)


def peak_of(profiler: Any) -> int:
    """The most that was allocated at a time in what was profiled, beside what was there."""
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    nbytes = (nbytes for _, nbytes in sorted(changes, key=lambda change: change[0]))
    return max(itertools.accumulate(nbytes, initial=0))


def main_of_train_lm() -> None:
    for preset, recomputes, settings in lm_settings():
        expected = plan_lm(preset, recomputes, settings)
        line = {
            "settings": f"{preset}, {recomputes}, {settings}",
            "planned_peak": expected,
            "seen_peak": run_lm(preset, recomputes, settings),
        }
        print(json.dumps(line), flush=True)
        gc.collect()


def main(first: int, last: int) -> None:
    device.build()
    device.load()
    for seed in range(first, last):
        gc.collect()  # constants of the last model would be found again, and not counted
        rng = random.Random(seed)
        settings, shape = settings_of(rng), rng.random()

        def make(shape: float = shape) -> Model:
            return Model(random.Random(shape))

        expected, said = planned(make, settings)
        with mock.patch.object(Kernels, "chunk_cat", staticmethod(chunk_cat)):
            seen, peak = run(make, settings)
        line = {
            "seed": seed,
            "settings": str(settings),
            "planned": said,
            "seen": seen,
            "planned_peak": expected.memory.peak.live,
            "seen_peak": peak,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "train_lm":
        main_of_train_lm()
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
