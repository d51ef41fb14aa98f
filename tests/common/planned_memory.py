"""A program: random models and settings, planned, and run on the stand-in; one JSON line a case.

    python -m tests.common.planned_memory 0 10      # cases 0 to 9

Each line has what each collective was, its bytes, and all bytes that were allocated then, as the
plan says and as the stand-in's allocator counts.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.paper.recording import Operation
from fsdp2.plan import Settings, plan
from fsdp2.plan.memory import Ledger
from fsdp2.plan.planner import Plan
from fsdp2.plan.rehearsal import shard_as_planned
from fsdp2.testing.null_group import null_world
from fsdp2.testing.stand_in import device

ODD_AND_EVEN = (8, 16, 24, 31, 40, 64, 96)
PRECISIONS = (
    None,
    fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
)
Collective = tuple[str, int, int]  # its kind, its bytes, and what was allocated


class Layer(nn.Module):
    """A residual block of some width, with or without bias and norm."""

    def __init__(self, dim: int, hidden: int, bias: bool, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim) if norm else nn.Identity()
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

    Not low precision with accumulation: the stand-in adds with the CPU's kernels, which cast bf16
    to a temporary tensor first. A GPU's do not.
    """
    precision = rng.choice(PRECISIONS)
    low = precision is not None and precision.param_dtype is not None
    return Settings(
        mesh=rng.choice([(2,), (4,), (8,), (2, 2), (2, 4)]),
        batch=rng.choice([1, 4, 33]),
        accumulate=1 if low else rng.choice([1, 1, 2, 3]),
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


def run(make: Callable[[], Model], settings: Settings) -> tuple[list[Collective], int]:
    """What the stand-in does: collectives of its third step, and the peak of that."""
    found: list[Collective] = []
    noting = False

    def observe(name: str, tensors: list[Tensor]) -> None:
        if not noting or tensors[0].device.type != device.NAME:
            return
        half, many = len(tensors) // 2, tensors
        if name.startswith("all_gather"):
            many, name = tensors[:half], "all-gather"
        elif name.startswith("reduce_scatter"):
            many, name = tensors[half:], "reduce-scatter"
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
            for micro in range(settings.accumulate):
                last = micro == settings.accumulate - 1
                model.set_requires_gradient_sync(last)  # type: ignore[operator]  # sharded now
                model.set_is_last_backward(last)  # type: ignore[operator]
                model(x).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return found, device.peak_bytes() - empty


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
    main(int(sys.argv[1]), int(sys.argv[2]))
