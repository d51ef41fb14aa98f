"""Rows of a smaller group: where they lie, and that backward's gather brings the same bits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fsdp2.core.device.kernels import Kernels
from fsdp2.core.gather.keeping import SmallerGroup, SmallerRows, smaller_segment
from fsdp2.core.layout import layout as layouts
from tests.common import thread_ranks
from tests.common.cuts import random_cut
from tests.gather.test_transport import bound, run_gather

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")
KERNELS = Kernels(CPU)
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def _divisors(size: int) -> list[int]:
    return [divisor for divisor in range(2, size) if size % divisor == 0]


def _random_params(rng: random.Random, world_size: int) -> list[layouts.ParamShape]:
    params = []
    for i in range(rng.randint(1, 6)):
        shape = tuple(rng.choice((0, 1, 2, 3, 5, 8, 16, 33, 64)) for _ in range(rng.randint(1, 3)))
        shard = rng.choice((F32, F32, BF16))
        full = rng.choice((shard, shard, BF16, F64))
        cut = random_cut(rng, shape, world_size)
        params.append(layouts.ParamShape(f"p{i}", shape, cut, shard, full))
    return params


def test_smaller_groups_gather_into_the_same_slots() -> None:
    """With pieces that a backend coalesces if they are whole 16 bytes, and none below a size."""
    transports = set()
    for seed in range(600):
        rng = random.Random(seed)
        world_size = rng.choice((4, 6, 8, 12, 16, 64))
        size = rng.choice(_divisors(world_size))
        coalesces = rng.random() < 0.7
        layout = layouts.build_layout(_random_params(rng, world_size), world_size, coalesces)
        below = rng.choice((0, 64))
        for segment in layout.segments:
            smaller = smaller_segment(segment, size, coalesces, 256, below)
            assert smaller.shard_dtype == smaller.full_dtype == segment.full_dtype
            places = {slot.index: (slot.shape, slot.full_offset) for slot in segment.slots}
            found = {slot.index: (slot.shape, slot.full_offset) for slot in smaller.slots}
            assert (smaller.shard_byte_offset, found) == (256, places)
            itemsize = smaller.full_dtype.itemsize  # type: ignore[attr-defined]  # a dtype
            small = any(slot.shard_numel * itemsize < below for slot in smaller.slots)
            if small and segment.transport is layouts.Transport.PACKED:
                assert smaller.transport is layouts.Transport.PACKED
            if smaller.transport is layouts.Transport.COALESCED:
                aligned = layouts.COLLECTIVE_ALIGN_BYTES
                assert coalesces
                assert not any(slot.shard_numel * itemsize % aligned for slot in smaller.slots)
            transports.add((segment.transport, smaller.transport))
    both = (layouts.Transport.COALESCED, layouts.Transport.PACKED)
    assert {(both[0], both[0]), (both[1], both[1]), (both[1], both[0])} <= transports


@dataclass
class Param:
    """Stands where a `ShardedParam` does."""

    name: str
    registered: list[Any] = field(default_factory=list)

    def make_smaller(self, rows: torch.Tensor, mesh: Any) -> torch.Tensor:
        return rows

    def swaps(self, param: Any) -> list[Any]:
        return [(self.registered, 0, param)]


def _values(params: list[layouts.ParamShape]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(p.shape, generator=generator, dtype=F64).to(p.shard_dtype)  # type: ignore[arg-type]  # a dtype
        for p in params
    ]


@dataclass
class RankState:
    """One rank's buffers of a group of parameters."""

    params: list[layouts.ParamShape]
    whole: thread_ranks.ThreadCollectives
    neighbours: thread_ranks.ThreadCollectives
    pack_below: int

    def round_trip(self) -> None:
        """Gather over all, keep rows, gather over few: the same bits as before."""
        values = _values(self.params)
        size, coalesces, below = self.whole.size, self.whole.coalesces, self.pack_below
        layout = layouts.build_layout(self.params, size, coalesces, below)
        gather, full = bound(layout, values, self.whole)
        members: Any = [Param(p.name) for p in self.params]
        group = SmallerGroup(self.neighbours, None)  # type: ignore[arg-type]  # no mesh
        smaller = SmallerRows(group, layout, full, members, KERNELS, None, CPU, below)
        gathered = {slot.index: tensor for slot, tensor in gather.parameters}
        for _ in range(2):
            run_gather(gather, full)
            self._check(gathered, values)
            smaller.keep()
            full.view(torch.uint8, 0, (layout.full_bytes,)).fill_(0xA5)
            full.release()
            run_gather(smaller.gather, full)
            self._check(gathered, values)
            smaller.release()
            smaller.release()  # once is enough
            full.release()

    def _check(self, gathered: dict[int, torch.Tensor], values: list[torch.Tensor]) -> None:
        for index, param in enumerate(self.params):
            wanted = values[index].to(param.full_dtype)  # type: ignore[arg-type]  # a dtype
            assert torch.equal(gathered[index], wanted), param


def _round_trip(
    params: list[layouts.ParamShape], copies: int, size: int, coalesces: bool, pack_below: int = 0
) -> None:
    everyone = thread_ranks._Meeting(copies * size)

    def body(
        neighbours: thread_ranks.ThreadCollectives, replicas: thread_ranks.ThreadReplicas
    ) -> None:
        position = replicas.rank * size + neighbours.rank
        whole = thread_ranks.ThreadCollectives(everyone, copies * size, position, coalesces, False)
        try:
            RankState(params, whole, neighbours, pack_below).round_trip()
        except BaseException:
            everyone.leave()
            raise

    thread_ranks.run_mesh(copies, size, body, coalesces=coalesces)


def _param(
    shape: tuple[int, ...],
    dim: int = 0,
    shard: torch.dtype = F32,
    full: torch.dtype = F32,
    bands: int = 1,
) -> layouts.ParamShape:
    return layouts.ParamShape(f"{shape}", shape, layouts.Cut(dim, bands), shard, full)


@pytest.mark.parametrize("coalesces", [True, False])
@pytest.mark.parametrize(("copies", "size"), [(2, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize(
    "params",
    [
        [_param((64, 4)), _param((64,))],
        [_param((64, 4), full=BF16), _param((64,), full=BF16)],
        [_param((7, 3)), _param((1,)), _param((3, 5), 1), _param((2, 3, 6), 2), _param((0, 4))],
        [_param((9, 8)), _param((16,), full=BF16), _param((5, 2), 1, BF16, BF16)],
        [_param((0, 4)), _param((3, 0), 1)],
        [_param((8, 4)), _param((2, 16), 1, bands=2), _param((4, 7), 1, F32, BF16, bands=2)],
    ],
)
def test_backward_gathers_the_same_bits(
    params: list[layouts.ParamShape], copies: int, size: int, coalesces: bool
) -> None:
    _round_trip(params, copies, size, coalesces)


def test_random_groups_make_the_round_trip() -> None:
    for seed in range(25):
        rng = random.Random(f"post forward {seed}")
        copies, size = rng.choice(((2, 2), (2, 3), (4, 2), (2, 4)))
        params = _random_params(rng, copies * size)
        _round_trip(params, copies, size, rng.random() < 0.7, pack_below=rng.choice((0, 64)))


def test_rows_that_are_kept_are_those_of_the_smaller_group() -> None:
    """With 4 ranks and groups of 2, ranks 0 and 2 hold the first half (the module's example)."""

    def body(
        neighbours: thread_ranks.ThreadCollectives, replicas: thread_ranks.ThreadReplicas
    ) -> list[float]:
        layout = layouts.build_layout([_param((8, 4))], 4, coalesces=True)
        (slot,) = layout.segments[0].slots
        full = KERNELS.transient(layout.full_bytes, "gathered")
        whole = torch.arange(8.0).repeat_interleave(4).view(8, 4)
        full.view(F32, slot.full_offset * 4, slot.shape).copy_(whole)
        param = Param("w")
        group = SmallerGroup(neighbours, None)  # type: ignore[arg-type]  # no mesh
        members: Any = [param]
        smaller = SmallerRows(group, layout, full, members, KERNELS, None, CPU)
        smaller.keep()
        ((_, _, rows),) = smaller.swaps
        return rows[:, 0].tolist()

    first, second = [0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]
    assert thread_ranks.run_mesh(2, 2, body) == [first, second, first, second]
