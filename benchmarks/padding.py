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
    packed     of ours: bytes that cannot be gathered straight into their place, so are copied
    two dims   ours and packed, where `shard_placement_fn` returns (Shard(0), Shard(1))
    torch      torch's FSDP2, shards and collectives alike
    16 bytes   whether every collective moves a multiple of 16 bytes a rank: all of ours (gathers in
               bf16, reductions in fp32, observed on simulated streams), torch's (gathers in bf16)
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
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
from fsdp2.core.layout.layout import (
    COLLECTIVE_ALIGN_BYTES,
    ROWS,
    Cut,
    GroupLayout,
    ParamShape,
    Transport,
    build_layout,
    default_cut,
)
from fsdp2.testing.simulation import Node, Simulation
from fsdp2.testing.virtual import VirtualDevice

WORLD_SIZES = (3, 24, 72, 96, 256, 768, 1024)
SHARD_BYTES, FULL_BYTES = 4, 2  # an element of an fp32 shard, of a bf16 gathered parameter


# ---------------------------------------------------------------------------------------------
# The rules


def torch_padded(shapes: Iterable[Shape], ranks: int) -> int:
    """Elements that torch's FSDP2 holds, over all ranks."""
    return sum(ROWS.padded(shape, ranks) for shape in shapes)


def torch_aligned(shapes: Iterable[Shape], ranks: int) -> bool:
    """Whether torch's all-gather of a unit, one tensor, moves a multiple of 16 bytes a rank."""
    return torch_padded(shapes, ranks) // ranks * FULL_BYTES % COLLECTIVE_ALIGN_BYTES == 0


CutFn = Callable[[Shape, int], Cut]


def one_dim(shape: Shape, ranks: int) -> Cut:
    """What `fully_shard` chooses."""
    return default_cut(shape, ranks, SHARD_BYTES)


def two_dims(shape: Shape, ranks: int) -> Cut:
    """What it chooses where it may cut a parameter on its first two dims."""
    return default_cut(shape, ranks, SHARD_BYTES, tuple(range(len(shape)))[:2])


def layout(params: dict[str, Shape], ranks: int, cut: CutFn) -> GroupLayout:
    """fsdp2's layout of one unit."""
    return build_layout(
        [
            ParamShape(
                name,
                shape,
                cut(shape, ranks),
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


def collective_bytes(params: dict[str, Shape], ranks: int, cut: CutFn) -> list[int]:
    """Bytes a rank of every tensor in a collective of one unit's step, on simulated streams."""
    device = _Sizes()
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    node = Node("unit", shapes=tuple(params.values()), cut=cut)
    Simulation(node, device, world_size=ranks, precision=precision).iteration()
    assert device.races == []
    return device.nbytes


# ---------------------------------------------------------------------------------------------
# Sums over a model


@dataclass(frozen=True)
class Padding:
    """One model, or one of its units, at one world size; shares of the parameters' own bytes.

    Attributes:
        ours, gathered: padding, as in the module's docstring (0.01: one per cent).
        packed: share of the parameters' bytes that travel packed.
        two_dims, two_dims_packed: padding and packed, where it may cut on two dims.
        torch: padding.
        aligned: whether all our collectives move a multiple of 16 bytes a rank.
        torch_aligned: whether torch's all-gathers do.
    """

    ours: float
    gathered: float
    packed: float
    two_dims: float
    two_dims_packed: float
    torch: float
    aligned: bool
    torch_aligned: bool


def padding(units: Sequence[UnitShapes], ranks: int) -> Padding:
    """What ``units`` pad, together."""
    shapes = [(unit.times, list(unit.params.values())) for unit in units]
    numel = sum(times * sum(map(math.prod, own)) for times, own in shapes)
    torchs = sum(times * torch_padded(own, ranks) for times, own in shapes)
    ours, gathered, packed, aligned = _ours(units, ranks, one_dim)
    both, _, both_packed, both_aligned = _ours(units, ranks, two_dims)
    return Padding(
        ours / numel - 1,
        gathered / numel - 1,
        packed / numel,
        both / numel - 1,
        both_packed / numel,
        torchs / numel - 1,
        aligned and both_aligned,
        all(torch_aligned(own, ranks) for _, own in shapes),
    )


def _ours(units: Sequence[UnitShapes], ranks: int, cut: CutFn) -> tuple[float, float, int, bool]:
    """Elements of all shards, of the gathered buffers, and packed; whether all is aligned."""
    shards = gathered = 0.0
    packed, aligned = 0, True
    for unit in units:
        plan = layout(unit.params, ranks, cut)
        shards += unit.times * ranks * plan.shard_bytes / SHARD_BYTES
        gathered += unit.times * plan.full_bytes / FULL_BYTES
        packed += unit.times * sum(
            slot.numel
            for segment in plan.segments
            if segment.transport is Transport.PACKED
            for slot in segment.slots
        )
        moved = collective_bytes(unit.params, ranks, cut)
        aligned = aligned and not any(nbytes % COLLECTIVE_ALIGN_BYTES for nbytes in moved)
    return shards, gathered, packed, aligned


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
    shares = ("ours", "gathered", "packed", "two_dims", "two_dims_packed", "torch")
    header = ("model", "ranks", "ours %", "gathered %", "packed %", "two dims %", "packed %")
    header += ("torch %", "16 bytes ours", "torch")
    rows = [
        (
            each["model"],
            each["ranks"],
            *(f"{each[kind] * 100:.2f}" for kind in shares),
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
