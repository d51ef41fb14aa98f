"""Transports on real tensors: every rank gathers every parameter, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fsdp2.core.device.kernels import Kernels
from fsdp2.core.gather.keeping import make_gathers
from fsdp2.core.gather.program import Gather, combined
from fsdp2.core.gather.segments import SegmentViews, packed
from fsdp2.core.layout.layout import Cut, GroupLayout, ParamShape, Transport, build_layout
from tests.common import cuts, thread_ranks

pytestmark = pytest.mark.alone

KERNELS = Kernels(torch.device("cpu"))
F32, BF16 = torch.float32, torch.bfloat16


def _param(
    shape: tuple[int, ...], cut: int | Cut = 0, shard: torch.dtype = F32, full: torch.dtype = F32
) -> ParamShape:
    return ParamShape("p", shape, cuts.as_cut(cut), shard, full)


def _wholes(params: list[ParamShape]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(-100, 100, p.shape, generator=generator).to(p.shard_dtype)  # type: ignore[call-overload]  # a dtype
        for p in params
    ]


def bound(
    layout: GroupLayout, wholes: list[torch.Tensor], collectives: thread_ranks.ThreadCollectives
) -> tuple[Gather, Any]:
    """One rank's all-gather of a flat shard that holds its pieces, and its gathered buffer."""
    rank = collectives.rank
    shard = KERNELS.flat(layout.shard_bytes, on_meta=False)
    full = KERNELS.transient(layout.full_bytes, "gathered")
    for segment in layout.segments:
        for slot in segment.slots:
            whole = wholes[slot.index]
            start = segment.shard_byte_offset + slot.shard_offset * whole.dtype.itemsize
            target = shard.view(whole.dtype, start, slot.local_shape(rank))
            target.copy_(slot.part(whole, rank))
    cpu = torch.device("cpu")
    parts = make_gathers(layout.segments, shard, full, collectives, KERNELS, None, cpu)
    return combined(parts), full


def run_gather(gather: Gather, full: Any) -> None:
    """The calls of `ParamGroup`, in its order."""
    for run in gather.acquire:
        run()
    if gather.early:
        full.acquire()
    for run in gather.copy_in:
        run()
    for launch in gather.collectives:
        assert launch() is None
    full.acquire()
    for run in gather.finish:
        run()


def _check(
    params: list[ParamShape], size: int, coalesces: bool, seed: int = 0, pack_below: int = 0
) -> list[str]:
    """Gather twice, the second time over zeros; returns rank 0's collectives."""
    layout = build_layout(params, size, coalesces, pack_below)
    wholes = _wholes(params)

    def body(collectives: thread_ranks.ThreadCollectives) -> list[str]:
        gather, full = bound(layout, wholes, collectives)
        parameters = {slot.index: gathered for slot, gathered in gather.parameters}
        full.release()
        for _ in range(2):
            run_gather(gather, full)
            for index, found in parameters.items():
                wanted = wholes[index].to(params[index].full_dtype)  # type: ignore[call-overload]
                assert tuple(found.shape) == params[index].shape
                assert found.is_contiguous()
                assert torch.equal(found, wanted), f"seed {seed}: parameter {index}"
                if collectives.size > 1:
                    found.zero_()  # what is left here must not look like the second gather
            full.release()
        return collectives.calls

    calls = thread_ranks.run_ranks(size, body, coalesces=coalesces)
    assert calls == [calls[0]] * size  # invariant I1
    return calls[0]


Shapes = list[tuple[tuple[int, ...], int | Cut]]
CASES: dict[str, tuple[Shapes, Sequence[int], Sequence[bool], list[str]]] = {
    "coalesced": (
        [((8, 8), 0), ((5, 16), 0), ((1, 8), 0)],
        *((2, 3, 4), [True], ["all_gather_many"]),
    ),
    "packed": (
        [((7, 3), 0), ((3, 5), 1), ((2, 3, 7), 2), ((1,), 0), ((0, 4), 0), ((4, 1, 2), 1)],
        *((2, 3, 4), [False], ["all_gather"]),
    ),
    "bands of one row": (
        [((2, 16, 8), Cut(1, 2)), ((8, 8), 0)],
        *([4], [True], ["all_gather_many"]),
    ),
    "bands that are packed": (
        [((2, 5, 3), Cut(1, 2)), ((4, 3, 5), Cut(2, 2)), ((7, 3), 0), ((6, 8), Cut(1, 2))],
        *([4], [True], ["all_gather"]),
    ),
    "empty": ([((0, 4), 0), ((3, 0), 1), ((0,), 0)], [4], [True, False], []),
    "local": ([((7, 3), 0), ((3, 5), 1), ((0,), 0)], [1], [True], []),
}


@pytest.mark.parametrize("full", [F32, BF16])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_gathers_every_parameter(case: str, full: torch.dtype) -> None:
    shapes, sizes, coalescing, calls = CASES[case]
    params = [_param(shape, cut, full=full) for shape, cut in shapes]
    for size, coalesces in itertools.product(sizes, coalescing):
        assert _check(params, size, coalesces) == calls * 2


def test_a_packed_segment_is_split_by_whole_rows_where_that_is_one_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On accelerators, ``split_with_sizes_copy`` is one kernel for a dense source alone."""
    params = [_param((31, 3)), _param((5, 7)), _param((9,))]
    split = type(KERNELS).split_copy
    dense = []

    def look(self: Any, source: torch.Tensor, sizes: Any, targets: Any) -> None:
        dense.append(source.is_contiguous())
        assert sum(sizes) == source.shape[1]
        split(self, source, sizes, targets)

    monkeypatch.setattr(type(KERNELS), "split_copy", look)
    _check(params, 2, coalesces=False)
    assert dense == []  # a split would make views, which are bound where no kernel fuses copies
    monkeypatch.setattr(KERNELS, "fuses", True)
    _check(params, 2, coalesces=False)
    assert set(dense) == {True}
    dense.clear()
    _check([*params, _param((2, 400), 1)], 2, coalesces=False)  # more than would be wasted
    assert set(dense) == {False}


@pytest.mark.parametrize(
    ("shapes", "copies"),
    [
        ([(16, 8)] * 9, 1),
        ([(8,), (8,), *[(8, 8)] * 4, (16, 8), (16, 8), (8, 16)], 3),  # a Llama block
        ([(8, 8), (4, 8), (4, 8), (8, 8)], 3),
        ([(7, 3), (8, 3), (7, 3)], 1),  # a last piece may be padded
        ([(4, 2), (0, 2), (4, 2)], 1),
    ],
)
def test_neighbours_of_one_size_are_copied_at_once(
    shapes: list[tuple[int, ...]], copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no kernel fuses copies, each of them is a kernel."""
    counted = []

    def look(targets: Any, sources: Any) -> None:
        counted.append(len(targets))
        torch._foreach_copy_(targets, sources)

    monkeypatch.setattr(Kernels, "copy_many", staticmethod(look))
    _check([_param(shape) for shape in shapes], 2, coalesces=False)
    assert set(counted) == {copies}


ONE_SLOT = [
    ([((8, 8), 0)], 64),
    ([((8, 8), 0), ((0, 4), 0)], 64),
    ([((5, 8), 0)], 40),  # its last piece is padded
    ([((1, 32), 1)], 32),  # columns of one row, one behind the other
]
COPIED = [[((5, 3), 0)], [((8, 8), 1)], [((8, 8), 0), ((8, 8), 0)]]


@pytest.mark.parametrize("full", [F32, BF16])
def test_one_parameter_is_gathered_straight_into_its_slot(
    full: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What travels packed otherwise: behind its collective nothing is copied."""
    copied = []

    def look(targets: Any, sources: Any) -> None:
        copied.append(len(targets))
        torch._foreach_copy_(targets, sources)

    monkeypatch.setattr(Kernels, "copy_many", staticmethod(look))
    for shapes, numel in ONE_SLOT:
        params = [_param(shape, cut, full=full) for shape, cut in shapes]
        layout = build_layout(params, 2, coalesces=False)
        assert layout.transports == "packed"
        assert (sum(slot.numel for slot in layout.slots), layout.copied_bytes) == (numel, 0)
        assert _check(params, 2, coalesces=False) == ["all_gather"] * 2
    assert copied == []
    # Of two dtypes both, or none: one has a buffer of its own
    other = torch.int64
    several = [_param((8, 8), full=full), _param((4, 4), shard=other, full=other)]
    assert build_layout(several, 2, coalesces=False).copied_bytes == 0
    assert _check(several, 2, coalesces=False) == ["all_gather"] * 4
    assert copied == []
    several.append(_param((2, 2), shard=other, full=other))
    copies = 64 * full.itemsize + (16 + 4) * other.itemsize
    assert build_layout(several, 2, coalesces=False).copied_bytes == copies
    assert _check(several, 2, coalesces=False) == ["all_gather"] * 4
    assert len(copied) == 2 * 2 * 2  # ranks, gathers, segments
    copied.clear()
    for shapes in COPIED:
        params = [_param(shape, cut, full=full) for shape, cut in shapes]
        assert build_layout(params, 2, coalesces=False).copied_bytes > 0
        _check(params, 2, coalesces=False)
        assert copied
        copied.clear()


def test_local_parameter_is_the_shard_itself() -> None:
    layout = build_layout([_param((4, 4))], 1, coalesces=True)
    weights = _wholes([_param((4, 4))])
    gather, _ = thread_ranks.run_ranks(1, lambda c: bound(layout, weights, c))[0]
    assert gather.aliases
    assert not gather.launches
    assert not gather.finish
    ((_, gathered),) = gather.parameters
    assert torch.equal(gathered, weights[0])


def test_segments_of_several_dtypes_and_transports() -> None:
    params = [
        _param((8, 8)),
        _param((3,)),
        _param((8, 8), full=BF16),
        _param((16, 4), shard=torch.int64, full=torch.int64),
        _param((6, 6), 1, shard=torch.uint8, full=torch.uint8),
    ]
    calls = _check(params, 2, coalesces=True)
    kinds = [segment.transport for segment in build_layout(params, 2, True).segments]
    assert kinds.count(Transport.COALESCED) == 3
    assert kinds.count(Transport.PACKED) == 2
    assert sorted(calls) == ["all_gather"] * 2 + ["all_gather_many"] * 6  # one goes along


@pytest.mark.parametrize("full", [F32, BF16])
@pytest.mark.parametrize("size", [2, 4])
def test_small_ones_go_along_with_large_ones(size: int, full: torch.dtype) -> None:
    shapes = [((32, 8), 0), ((16,), 0), ((7, 3), 0), ((32, 8), 0), ((8, 4), 0), ((3, 5), 1)]
    params = [_param(shape, dim, full=full) for shape, dim in shapes]
    layout = build_layout(params, size, coalesces=True, pack_below=100)
    assert [{slot.index for slot in s.slots} for s in layout.segments] == [{0, 3}, {1, 2, 4, 5}]
    assert layout.copied_bytes == (16 + 21 + 32 + 15) * full.itemsize
    assert _check(params, size, coalesces=True, pack_below=100) == ["all_gather_many"] * 2
    assert _check(params, size, coalesces=True, pack_below=1 << 20) == ["all_gather"] * 2


def test_a_small_one_alone_is_not_packed() -> None:
    for alone in ([_param((64, 8)), _param((16,))], [_param((16,)), _param((16,), full=BF16)]):
        layout = build_layout(alone, 2, coalesces=True, pack_below=100)
        assert {segment.transport for segment in layout.segments} == {Transport.COALESCED}
        assert layout.copied_bytes == 0


@pytest.mark.parametrize(("coalesces", "wire"), [(True, "float8_e4m3fn"), (False, "uint8")])
def test_what_goes_along_has_the_dtype_of_the_others(coalesces: bool, wire: str) -> None:
    """Backends that coalesce want one dtype in a call; gloo knows no 8-bit floats."""
    f8 = torch.float8_e4m3fn
    params = [_param(shape, shard=f8, full=f8) for shape in ((64, 16), (5, 3), (7,))]
    layout = build_layout(params, 2, coalesces)

    def dtypes(collectives: thread_ranks.ThreadCollectives) -> set[torch.dtype]:
        shard = KERNELS.flat(layout.shard_bytes, on_meta=False)
        full = KERNELS.transient(layout.full_bytes, "gathered")
        places = [SegmentViews(s, shard, full, collectives, KERNELS) for s in layout.segments]
        pairs = [packed(p)[1] for p in places if p.segment.transport is Transport.PACKED]
        return {tensor.dtype for pair in pairs for tensor in pair}

    assert thread_ranks.run_ranks(2, dtypes, coalesces=coalesces)[0] == {getattr(torch, wire)}


@pytest.mark.parametrize("block", range(3))
def test_random_groups(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        rng = random.Random(seed)
        size, params = rng.choice((1, 2, 3, 4, 4)), []
        for _ in range(rng.randint(1, 5)):
            shape = tuple(rng.choice((0, 1, 2, 3, 5, 8)) for _ in range(rng.randint(1, 3)))
            cut = cuts.random_cut(rng, shape, size)
            params.append(_param(shape, cut, full=rng.choice((F32, F32, BF16))))
        _check(params, size, rng.random() < 0.5, seed, rng.choice((0, 64)))
