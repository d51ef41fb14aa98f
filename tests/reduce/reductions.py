"""Parameters that stand alone, a configuration of their reduction, and how to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from fsdp2.core.device.kernels import Kernels
from fsdp2.core.layout.layout import Cut, ParamShape, Slot, build_layout
from fsdp2.core.reduce.binding import bind_reduction
from fsdp2.core.reduce.reduction import Reduction
from fsdp2.core.reduce.spec import ReductionSpec, is_direct
from fsdp2.testing.parameters import PaperGradients, PaperParam
from tests.common.cuts import as_cut

KERNELS = Kernels(torch.device("cpu"))
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

EMPTY = (((0, 4), 0), ((3, 0), 1), ((0,), 0))
BANDS = (((2, 8, 4), Cut(1, 2)), ((8, 8), 0), ((4, 16), Cut(0)), ((1, 16), 1))
ODD_BANDS = (((2, 5, 3), Cut(1, 2)), ((4, 3, 5), Cut(2, 2)), ((2, 4), Cut(1, 2)), ((3, 5), 1))
ALIGNED = (((8, 4), 0), ((32,), 0))
LARGE_AND_SMALL = (((16,), 0), ((32, 4), 0), ((8, 2), 0), ((3, 5), 1), ((16, 8), 0))
ODD = (((7, 3), 0), ((3, 5), 1), ((1,), 0), ((2, 3, 6), 2), ((0, 4), 0), ((4, 2), 1))
SHAPES = {
    "empty": EMPTY,
    "bands": BANDS,
    "odd-bands": ODD_BANDS,
    "joined": LARGE_AND_SMALL,
    "odd": ODD,
}


class Member(PaperParam):
    """Stands where a `ShardedParam` does: a full gradient goes in, a sharded one comes out."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.hooks_run = 0

    def run_hooks(self) -> None:
        self.hooks_run += 1


@dataclass(frozen=True)
class Setup:
    """A configuration of a reduction."""

    direct: bool = False
    grad: torch.dtype = F32
    reduce: torch.dtype = F32
    shard: torch.dtype = F32
    factor: float | None = None
    premultiplies: bool = False
    shapes: Sequence[tuple[tuple[int, ...], int | Cut]] = (((8, 4), 0), ((16,), 0))
    result: torch.dtype | None = None
    sum_only: bool = False
    hook: Callable[[torch.Tensor], None] | None = None
    to_host: bool = False
    keep: bool = False
    pack_below: int = 0
    codec: str | None = None
    rotate: bool = False
    feedback: bool = False

    def __str__(self) -> str:
        """What differs from the default, as the name of a case."""
        values = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        said = [f"{n}={getattr(v, '__name__', v)}" for n, v, usual in values if v != usual]
        shapes = next((name for name, each in SHAPES.items() if each is self.shapes), "two")
        return " ".join([shapes, *(each for each in said if not each.startswith("shapes="))])

    @property
    def spec(self) -> ReductionSpec:
        """What sets the steps."""
        return ReductionSpec(
            self.grad,
            self.reduce,
            self.result or self.shard,
            self.factor,
            self.sum_only,
            self.hook,
            self.to_host,
            keep=self.keep,
            codec=self.codec,
            rotate=self.rotate,
            feedback=self.feedback,
        )

    def slots(self, size: int) -> list[Slot]:
        """The members' slots, in their order."""
        direct, packed = self.sorted_slots(size)
        return direct + packed

    def sorted_slots(self, size: int) -> tuple[list[Slot], list[Slot]]:
        """Those of members that are reduced directly, and of the others."""
        params = [
            ParamShape(
                "p",
                shape,
                as_cut(cut),
                self.shard,
                self.grad,
            )
            for shape, cut in self.shapes
        ]
        layout = build_layout(params, size, self.direct, self.pack_below)
        sorted_slots: tuple[list[Slot], list[Slot]] = ([], [])
        for segment in layout.segments:
            for slot in segment.slots:
                sorted_slots[not is_direct(self.spec, slot, segment.transport)].append(slot)
        return sorted_slots

    def bind(self, collectives: Any, replicas: Any = None) -> Reduction:
        """The reduction, with new members."""
        direct, packed = self.sorted_slots(collectives.size)
        slots = [*direct, *packed]
        members = [Member(slot.shape, self.shard) for slot in slots]
        gradients, count = PaperGradients(members), len(direct)
        return bind_reduction(gradients, slots, count, self.spec, collectives, replicas, KERNELS)


def run(reduction: Reduction, take_missing: bool = False, all_reduce: bool = True) -> None:
    """All steps of a reduction of the members' gradients."""
    job = reduction.collect(take_missing, all_reduce)
    assert job is not None
    program = reduction.full if all_reduce else reduction.partial
    for step in ((job.seeks and program.seeking) or program).inline:
        work = step(job)
        if work is not None:
            work.wait()
