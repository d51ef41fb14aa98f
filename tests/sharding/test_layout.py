"""Where every element of a group lives: plain integers, checked against brute force."""

from __future__ import annotations

import math
import random
from itertools import groupby

import pytest
import torch

from fsdp2.core.layout import layout as layouts
from tests.common import cases, cuts

pytestmark = pytest.mark.alone

F64, F32, BF16, U8 = torch.float64, torch.float32, torch.bfloat16, torch.uint8
RANDOM_GROUPS = 400


def _param(
    shape: tuple[int, ...],
    cut: int | layouts.Cut = 0,
    shard: torch.dtype = F32,
    full: torch.dtype | None = None,
) -> layouts.ParamShape:
    full = full or shard
    return layouts.ParamShape(f"p{shape}", shape, cuts.as_cut(cut), shard, full)


def _slot(shape: tuple[int, ...], cut: int | layouts.Cut, world_size: int) -> layouts.Slot:
    return layouts.Slot(0, shape, cuts.as_cut(cut), world_size, 0, 0)


def _only_segment(layout: layouts.GroupLayout) -> layouts.Segment:
    (segment,) = layout.segments
    return segment


# ---- the shard dim


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((128, 2880, 5760), 128, 0),  # no padding
        ((128, 2880, 5760), 256, 2),  # 100 %, 7 % and 2 %
        ((128, 2880, 2880), 256, 1),  # two dims pad alike: the first
        ((2880,), 256, 0),  # no other dim
        ((33, 400_000), 32, 1),  # 94 %, none
        ((1025, 4096), 8, 0),  # 0.7 %, 112 KiB
        ((3, 4), 2, 0),  # 33 %, but 16 bytes
        ((3, 262_144), 2, 0),  # 33 %: 1 MiB, not more
        ((3, 262_145), 2, 1),
        ((0, 4), 2, 0),
        ((9, 0), 2, 0),
        ((2, 400_000), 1, 0),
    ],
)
def test_default_cut(shape: tuple[int, ...], ranks: int, dim: int) -> None:
    assert layouts.default_cut(shape, ranks, 4) == layouts.Cut(dim)


@pytest.mark.parametrize(
    ("shape", "ranks", "dims", "cut"),
    [
        ((128, 5760, 2880), 128, (0, 1), layouts.Cut(0)),  # no padding
        ((128, 5760, 2880), 96, (0, 1), layouts.Cut(1)),  # 50 %, none
        ((128, 5760, 2880), 256, (0, 1), layouts.Cut(1, 128)),  # 100 %, 2.2 %; none and no copies
        ((256, 5760, 2880), 768, (0, 1), layouts.Cut(1, 256)),
        ((384, 5760, 2880), 256, (0, 1), layouts.Cut(1)),  # 33 %, 2.2 %; none, but copies too
        ((128, 5760, 2880), 1024, (0, 1), layouts.Cut(1, 128)),  # 700 %, 7 %; none
        ((128, 2880, 2880), 1024, (0, 2), layouts.Cut(2, 128)),
        ((128, 2880, 2880), 1024, (1, 2), layouts.Cut(1)),  # 7 % either: dim 0 is not named
        ((128, 2880, 2880), 1024, (2,), layouts.Cut(2)),
        ((128, 5761, 1), 1024, (0, 1), layouts.Cut(1, 128)),  # 720 of 8 pieces and one more: 0.1 %
        ((128, 3, 2880), 1024, (0, 1), layouts.Cut(1, 128)),  # 700 %, 34,033 %; 167 %
        ((128, 3, 2880), 1024, (0, 1, 2), layouts.Cut(2, 128)),
        ((3, 1_000_000), 1024, (0, 1), layouts.Cut(1)),  # 3 and 1024 share no divisor
        ((2, 1024), 1024, (0, 1), layouts.Cut(0)),  # 51,100 %, but 1 MiB and no more
        ((4, 262_144), 2, (1, 0), layouts.Cut(1)),
    ],
)
def test_named_dims(
    shape: tuple[int, ...], ranks: int, dims: tuple[int, ...], cut: layouts.Cut
) -> None:
    assert layouts.default_cut(shape, ranks, 1, dims) == cut


def test_bands_are_cut_like_parameters_of_their_own() -> None:
    """What each rank of a band holds is what it would hold of the band alone."""
    whole = torch.arange(4 * 5 * 3).view(4, 5, 3)
    slot = _slot((4, 5, 3), layouts.Cut(1, 2), 6)
    alone = _slot((2, 5, 3), 1, 3)
    for rank in range(6):
        band = whole.narrow(0, rank // 3 * 2, 2)
        part = slot.part(whole, rank)
        assert torch.equal(part, alone.part(band, rank % 3))
        assert tuple(part.shape) == slot.local_shape(rank) == alone.local_shape(rank % 3)
    assert slot.shard_numel == alone.shard_numel
    assert not slot.even


@pytest.mark.parametrize(
    ("shape", "cut", "ranks", "in_order"),
    [
        ((7, 3), layouts.ROWS, 4, True),  # padding at the end alone
        ((7, 4), layouts.Cut(1), 4, False),
        ((1, 8), layouts.Cut(1), 4, True),
        ((1, 7), layouts.Cut(1), 4, False),  # a piece is short
        ((2, 8, 3), layouts.Cut(1, 2), 4, True),
        ((2, 7, 3), layouts.Cut(1, 2), 4, False),
        ((4, 8, 3), layouts.Cut(1, 2), 4, False),  # two rows a band
        ((2, 8, 4), layouts.Cut(2, 2), 4, False),
        ((2, 1, 4), layouts.Cut(2, 2), 4, True),
    ],
)
def test_in_order(shape: tuple[int, ...], cut: layouts.Cut, ranks: int, in_order: bool) -> None:
    assert _slot(shape, cut, ranks).in_order is in_order
    whole = torch.arange(1, math.prod(shape) + 1).view(shape)
    pieces = [_slot(shape, cut, ranks).part(whole, rank).flatten() for rank in range(ranks)]
    joined = torch.cat(pieces)
    if cut.dim == 0 or in_order:
        assert torch.equal(joined, whole.flatten())


# ---- one parameter


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@cases.each("length", range(18))
def test_rows_are_those_of_torch_chunk(length: int, world_size: int) -> None:
    """And blocks cover the ranks that hold rows."""
    slot = _slot((2, length, 3), 1, world_size)
    chunks = [len(chunk) for chunk in torch.empty(length).chunk(world_size)] if length else []
    rows = [slot.rows(rank) for rank in range(world_size)]
    assert rows == chunks + [0] * (world_size - len(chunks))
    assert slot.local_shape(0) == (2, rows[0], 3)
    assert slot.whole_ranks() == (rows.count(slot.chunk) if length else 0)
    expected = []
    first = 0
    for held, run in groupby(rows):
        ranks = len(list(run))
        if held:
            expected.append((ranks, first, held))
        first += ranks
    assert slot.blocks() == expected


# ---- which transport


@pytest.mark.parametrize(
    ("param", "world_size", "transport"),
    [
        (_param((8, 8)), 1, layouts.Transport.LOCAL),
        (_param((3, 5), 1), 1, layouts.Transport.LOCAL),
        (_param((0, 4)), 1, layouts.Transport.LOCAL),
        (_param((8, 8)), 4, layouts.Transport.COALESCED),
        (_param((5, 4)), 4, layouts.Transport.COALESCED),  # uneven: only padding after the last row
        (_param((1, 4)), 4, layouts.Transport.COALESCED),  # fewer rows than ranks
        (_param((4,)), 4, layouts.Transport.PACKED),  # 4 bytes a rank
        (_param((16,)), 4, layouts.Transport.COALESCED),  # 16 bytes a rank
        (_param((20,)), 4, layouts.Transport.PACKED),  # 20 bytes a rank
        (_param((8, 8), 1), 4, layouts.Transport.PACKED),  # not dim 0
        (_param((1, 16), 1), 4, layouts.Transport.COALESCED),  # but its pieces follow one another
        (_param((2, 8), layouts.Cut(1, 2)), 4, layouts.Transport.COALESCED),
        (_param((2, 4), layouts.Cut(1, 2)), 4, layouts.Transport.PACKED),  # 8 bytes a rank
        (_param((4, 8), layouts.Cut(1, 2)), 4, layouts.Transport.PACKED),  # two rows a band
        (_param((0, 8)), 4, layouts.Transport.PACKED),
        (_param((8, 0)), 4, layouts.Transport.PACKED),
        # Sixteen bytes a rank in both dtypes, of the shard and on the wire.
        (_param((16,), 0, F64), 4, layouts.Transport.COALESCED),
        (_param((16,), 0, F32, BF16), 4, layouts.Transport.PACKED),
        (_param((16,), 0, BF16, F32), 4, layouts.Transport.PACKED),
        (_param((16,), 0, BF16), 4, layouts.Transport.PACKED),
    ],
)
def test_transport(
    param: layouts.ParamShape, world_size: int, transport: layouts.Transport
) -> None:
    assert layouts.pick_transport(param, world_size, coalesces=True) is transport
    if world_size > 1:
        assert (
            layouts.pick_transport(param, world_size, coalesces=False) is layouts.Transport.PACKED
        )


# ---- one group


def test_packed_order_and_single_tail() -> None:
    shapes = [((3,), 0), ((4, 8), 1), ((8, 4), 0), ((2, 3), 1), ((5,), 0), ((16,), 0)]
    params = [_param(shape, dim) for shape, dim in shapes]
    segment = _only_segment(layouts.build_layout(params, 2, coalesces=False))
    # Dim 0 before dim 1; within each, those of whole 16 bytes before the others.
    assert [slot.index for slot in segment.slots] == [2, 5, 0, 4, 1, 3]
    offset = 0
    for slot in segment.slots:  # no gap between any two
        assert slot.shard_offset == offset
        offset += slot.shard_numel
    assert offset == 16 + 8 + 2 + 3 + 16 + 4
    assert segment.tail == 3
    assert segment.shard_numel * 4 % layouts.COLLECTIVE_ALIGN_BYTES == 0


def test_segments_by_transport_and_dtypes() -> None:
    params = [
        _param((8, 8), 0, F32, BF16),
        _param((8, 8), 0, U8),
        _param((3,), 0, F32, BF16),
        _param((8, 16), 0, F32, BF16),
        _param((8, 8), 0, F32),
    ]
    layout = layouts.build_layout(params, 2, coalesces=True)
    found = [
        (s.transport, s.shard_dtype, s.full_dtype, [slot.index for slot in s.slots])
        for s in layout.segments
    ]
    assert found == [
        (layouts.Transport.COALESCED, F32, BF16, [0, 3]),
        (layouts.Transport.COALESCED, U8, U8, [1]),
        (layouts.Transport.PACKED, F32, BF16, [2]),
        (layouts.Transport.COALESCED, F32, F32, [4]),
    ]
    _check_disjoint(layout)


@pytest.mark.parametrize("full", [F32, BF16])
def test_world_size_one_needs_a_gathered_buffer_for_casts_alone(full: torch.dtype) -> None:
    """Slot for slot."""
    params = [_param((3, 5), 0, F32, full), _param((7,), 0, F32, full)]
    layout = layouts.build_layout(params, 1, coalesces=True)
    segment = _only_segment(layout)
    assert segment.transport is layouts.Transport.LOCAL
    assert all(slot.shard_offset * 4 % layouts.SLOT_ALIGN_BYTES == 0 for slot in segment.slots)
    assert layout.full_bytes * 2 == (0 if full is F32 else layout.shard_bytes)
    if full is BF16:
        assert segment.full_numel == segment.shard_numel
        assert [s.full_offset for s in segment.slots] == [s.shard_offset for s in segment.slots]


@pytest.mark.parametrize(
    ("params", "world_size", "padding"),
    [
        ([_param((8, 4))], 4, 0),
        ([_param((5, 4))], 4, 32 - 20),  # 2 rows a rank of 4 x 4 bytes, 80 bytes in all
        ([_param((1, 4))], 4, 16 - 4),
        ([_param((3,)), _param((5,))], 2, 32 - 16),  # 2 + 3 elements a rank, rounded up to 8
        ([_param((0, 4))], 4, 0),
    ],
)
def test_padding_bytes(params: list[layouts.ParamShape], world_size: int, padding: int) -> None:
    layout = layouts.build_layout(params, world_size, coalesces=True)
    assert layout.payload_bytes == sum(4 * math.prod(p.shape) for p in params)
    assert layout.padding_bytes == padding


# ---- brute force


def _random_group(rng: random.Random) -> tuple[list[layouts.ParamShape], int, bool]:
    world_size = rng.choice((1, 2, 3, 4, 8))
    params = []
    for _ in range(rng.randint(1, 6)):
        lengths = (0, 1, 2, 3, 4, 5, 7, 8, 16)
        shape = tuple(rng.choice(lengths[rng.random() < 0.9 :]) for _ in range(rng.randint(1, 3)))
        cut = cuts.random_cut(rng, shape, world_size)
        shard, full = rng.choice(((F32, F32), (F32, F32), (F32, BF16), (U8, U8)))
        params.append(_param(shape, cut, shard, full))
    return params, world_size, rng.random() < 0.5


def _numbered(params: list[layouts.ParamShape]) -> list[torch.Tensor]:
    """Parameters whose elements are all different, counted from 1; 0 is padding."""
    start = 1
    tensors = []
    for param in params:
        numel = math.prod(param.shape)
        tensors.append(torch.arange(start, start + numel).view(param.shape))
        start += numel
    return tensors


def _shard(segment: layouts.Segment, wholes: list[torch.Tensor], rank: int) -> torch.Tensor:
    """One rank's part of the flat shard."""
    flat = torch.zeros(segment.shard_numel, dtype=torch.long)
    for slot in segment.slots:
        whole = wholes[slot.index]
        piece = slot.part(whole, rank)
        assert tuple(piece.shape) == slot.local_shape(rank)
        flat[slot.shard_offset : slot.shard_offset + piece.numel()] = piece.flatten()
    return flat


def _gather(segment: layouts.Segment, shards: list[torch.Tensor]) -> torch.Tensor:
    """What the segment's transport leaves in the gathered buffer."""
    full = torch.full((segment.full_numel,), -1)
    for slot in segment.slots:
        start, width = slot.full_offset, slot.shard_numel
        pieces = [shard[slot.shard_offset : slot.shard_offset + width] for shard in shards]
        if slot.in_order:
            for rank, piece in enumerate(pieces):
                full[start + rank * width : start + (rank + 1) * width] = piece
            continue
        whole = full[start : start + slot.numel].view(slot.shape)
        for ranks, first, length in slot.blocks():
            for band in range(slot.cut.bands):
                for rank in range(first, first + ranks):
                    rank += band * slot.per_band
                    rows = pieces[rank][: slot.outer * length * slot.inner]
                    target = slot.part(whole, rank)
                    target.copy_(rows.view(target.shape))
    return full


def _check_disjoint(layout: layouts.GroupLayout) -> None:
    """No two parameters share a byte, and each lies inside its buffer, aligned."""
    shard_end = full_end = 0
    for segment in layout.segments:
        shard_size, full_size = segment.shard_dtype.itemsize, segment.full_dtype.itemsize
        assert segment.shard_byte_offset >= shard_end
        assert segment.full_byte_offset >= full_end
        assert segment.shard_byte_offset % layouts.COLLECTIVE_ALIGN_BYTES == 0
        assert segment.full_byte_offset % layouts.SLOT_ALIGN_BYTES == 0
        for size in (shard_size, full_size):
            assert segment.shard_numel * size % layouts.COLLECTIVE_ALIGN_BYTES == 0
        shard_end = segment.shard_byte_offset + segment.shard_numel * shard_size
        full_end = segment.full_byte_offset + segment.full_numel * full_size
        offset = 0
        for slot in segment.slots:
            assert slot.shard_offset >= offset
            offset = slot.shard_offset + slot.shard_numel
        assert offset <= segment.shard_numel
        if segment.full_numel == 0:
            continue
        offset = 0
        for slot in segment.slots:
            assert slot.full_offset >= offset
            assert slot.full_offset * full_size % layouts.SLOT_ALIGN_BYTES == 0
            offset = slot.full_offset + slot.full_numel
        assert offset <= segment.full_numel
    assert shard_end <= layout.shard_bytes
    assert full_end <= layout.full_bytes


def _check_members(
    layout: layouts.GroupLayout, params: list[layouts.ParamShape], coalesces: bool
) -> None:
    """Every parameter has one slot, in a segment of its transport and dtypes."""
    indices = [slot.index for segment in layout.segments for slot in segment.slots]
    assert sorted(indices) == list(range(len(params)))
    for segment in layout.segments:
        for slot in segment.slots:
            param = params[slot.index]
            assert layouts.pick_transport(param, layout.world_size, coalesces) is segment.transport
            assert (param.shard_dtype, param.full_dtype) == (
                segment.shard_dtype,
                segment.full_dtype,
            )
    kinds = {(s.transport, s.shard_dtype, s.full_dtype) for s in layout.segments}
    assert len(kinds) == len(layout.segments)


@pytest.mark.parametrize("block", range(4))
def test_random_groups_are_recovered_exactly(block: int) -> None:
    count = RANDOM_GROUPS // 4
    for seed in range(block * count, (block + 1) * count):
        params, world_size, coalesces = _random_group(random.Random(seed))
        layout = layouts.build_layout(params, world_size, coalesces)
        _check_disjoint(layout)
        _check_members(layout, params, coalesces)
        wholes = _numbered(params)
        for segment in layout.segments:
            shards = [_shard(segment, wholes, rank) for rank in range(world_size)]
            local = segment.transport is layouts.Transport.LOCAL
            full = shards[0] if local else _gather(segment, shards)
            for slot in segment.slots:
                start = slot.shard_offset if local else slot.full_offset
                found = full[start : start + slot.numel].view(slot.shape)
                assert torch.equal(found, wholes[slot.index]), f"seed {seed}: {slot}"
