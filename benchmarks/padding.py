"""Bytes that sharding pads, at many world sizes, for the shapes of public models. No processes.

    python benchmarks/padding.py                            # all models, 3 to 1024 ranks
    python benchmarks/padding.py --models GPT-OSS-120B --world-size 256,1024
    python benchmarks/padding.py --by-unit                  # the root and a block apart

Plain arithmetic: ours is fsdp2's own layout (`build_layout`: fp32 shards, gathered in bf16, NCCL,
which coalesces); torch's is the rule of its FSDP2, a parameter at a time: every rank holds
ceil(rows / ranks) rows of dim 0, so that `ranks * ceil(rows / ranks) - rows` of them are padding.
The figures to watch are per cent of the model's bytes:

    ours       shards of all ranks, padding over parameters; on the dims that `fully_shard` chooses
    gathered   the same of the gathered buffers, alignment of slots to 128 bytes included
    torch      torch's FSDP2, shards and collectives alike
    packed     of ours: bytes that cannot be gathered straight into their place, so are copied
    16 bytes   whether every collective moves a multiple of 16 bytes a rank: ours (gathers in bf16,
               reductions in fp32, observed on simulated streams) and torch's (gathers in bf16)
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks import options as common
from benchmarks import stats
from benchmarks.public_models import MODELS, Shape, UnitShapes
from fsdp2 import MixedPrecisionPolicy
from fsdp2.core.layout import (
    COLLECTIVE_ALIGN_BYTES,
    GroupLayout,
    ParamShape,
    Transport,
    build_layout,
    default_dim,
    padded,
)
from fsdp2.core.simulate import Node, Simulation
from fsdp2.core.virtual import VirtualDevice

WORLD_SIZES = (3, 24, 72, 96, 256, 768, 1024)
SHARD_BYTES, FULL_BYTES = 4, 2  # an element of an fp32 shard, of a bf16 gathered parameter


# ---------------------------------------------------------------------------------------------
# The rules


def torch_padded(shapes: Iterable[Shape], ranks: int) -> int:
    """Elements that torch's FSDP2 holds, over all ranks."""
    return sum(padded(shape, 0, ranks) for shape in shapes)


def torch_aligned(shapes: Iterable[Shape], ranks: int) -> bool:
    """Whether torch's all-gather of a unit, one tensor, moves a multiple of 16 bytes a rank."""
    return torch_padded(shapes, ranks) // ranks * FULL_BYTES % COLLECTIVE_ALIGN_BYTES == 0


def layout(params: dict[str, Shape], ranks: int) -> GroupLayout:
    """fsdp2's layout of one unit."""
    return build_layout(
        [
            ParamShape(
                name,
                shape,
                default_dim(shape, ranks, SHARD_BYTES),
                torch.float32,
                SHARD_BYTES,
                torch.bfloat16,
                FULL_BYTES,
            )
            for name, shape in params.items()
        ],
        ranks,
        coalesces=True,
    )


class _Sizes(VirtualDevice):
    """Notes how many bytes of this rank every tensor of a collective has."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def run(self, kind: str, reads: Any, writes: Any) -> None:
        if kind in ("all_gather", "reduce_scatter"):
            mine = reads if kind == "all_gather" else writes
            self.nbytes += [math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in mine]
        super().run(kind, reads, writes)


def collective_bytes(params: dict[str, Shape], ranks: int) -> list[int]:
    """Bytes a rank of every tensor in a collective of one unit's step, on simulated streams."""
    device = _Sizes()
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    node = Node("unit", shapes=tuple(params.values()))
    Simulation(node, device, world_size=ranks, precision=precision).iteration()
    assert device.races == []
    return device.nbytes


# ---------------------------------------------------------------------------------------------
# Sums over a model


@dataclass(frozen=True)
class Padding:
    """One model, or one of its units, at one world size; shares of the parameters' own bytes.

    Attributes:
        ours, gathered, torch: padding, as in the module's docstring (0.01: one per cent).
        packed: share of the parameters' bytes that travel packed.
        aligned: whether all our collectives move a multiple of 16 bytes a rank.
        torch_aligned: whether torch's all-gathers do.
    """

    ours: float
    gathered: float
    torch: float
    packed: float
    aligned: bool
    torch_aligned: bool


def padding(units: Iterable[UnitShapes], ranks: int) -> Padding:
    """What ``units`` pad, together."""
    numel = ours = gathered = torchs = packed = 0
    aligned = torchs_aligned = True
    for unit in units:
        times, shapes = unit.times, list(unit.params.values())
        plan = layout(unit.params, ranks)
        numel += times * sum(map(math.prod, shapes))
        ours += times * ranks * plan.shard_bytes
        gathered += times * plan.full_bytes
        torchs += times * torch_padded(shapes, ranks)
        packed += times * sum(
            slot.numel
            for segment in plan.segments
            if segment.transport is Transport.PACKED
            for slot in segment.slots
        )
        aligned = aligned and not any(
            nbytes % COLLECTIVE_ALIGN_BYTES for nbytes in collective_bytes(unit.params, ranks)
        )
        torchs_aligned = torchs_aligned and torch_aligned(shapes, ranks)
    return Padding(
        ours / (numel * SHARD_BYTES) - 1,
        gathered / (numel * FULL_BYTES) - 1,
        torchs / numel - 1,
        packed / numel,
        aligned,
        torchs_aligned,
    )


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for model in options.models:
        parts = {model: list(MODELS[model].values())}
        if options.by_unit:
            parts = {f"{model} {name}": [unit] for name, unit in MODELS[model].items()}
        for name, units in parts.items():
            for ranks in options.world_sizes:
                found = padding(units, ranks)
                results.append({"model": name, "ranks": ranks, **vars(found)})
    return results


def report(results: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Header and rows of the table."""
    header = ("model", "ranks", "ours %", "gathered %", "torch %")
    header += ("packed %", "16 bytes ours", "torch")
    rows = [
        (
            each["model"],
            each["ranks"],
            *(f"{each[kind] * 100:.2f}" for kind in ("ours", "gathered", "torch")),
            f"{each['packed'] * 100:.2f}",
            *("yes" if each[kind] else "no" for kind in ("aligned", "torch_aligned")),
        )
        for each in results
    ]
    return header, rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bytes that sharding pads.")
    parser.add_argument(
        "--models", type=common.among(MODELS), default=",".join(MODELS), help="comma list"
    )
    parser.add_argument(
        "--world-size",
        type=common.integers,
        dest="world_sizes",
        default=",".join(map(str, WORLD_SIZES)),
        help="comma list",
    )
    parser.add_argument("--by-unit", action="store_true", help="the root and a block apart")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    results = measure(options)
    print(stats.table(*report(results)))
    stats.write_json(options.json, "cpu", results)


if __name__ == "__main__":
    main()
