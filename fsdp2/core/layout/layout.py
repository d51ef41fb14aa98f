"""The position of every element of a group, as plain integers.

A group's shards are one flat, persistent buffer; its gathered form is another, parameter-major one
(docs/design.md has a picture). A *segment* is a run of parameters that share dtypes and a transport
(coded ones: kin, too). The segment of a parameter depends only on global shapes, dtypes and the
backend, never on the rank, so that every rank decides alike (invariant I1 in docs/invariants.md).
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar, cast

import torch

from fsdp2.core.device.buffers import Strided, row_major
from fsdp2.core.pieces import ceil_div, round_up

T = TypeVar("T")

COLLECTIVE_ALIGN_BYTES = 16
"""NCCL moves chunks of a multiple of 16 bytes with vector loads, others element by element."""

SLOT_ALIGN_BYTES = 256
"""Gathered parameters start at a multiple of this, so that no two share a cache line, and cuBLAS,
which checks pointers for alignment up to 256 bytes, selects its usual kernels."""


@dataclass(frozen=True)
class Cut:
    """How a parameter is split into equal pieces, one per rank; last ones may be short or empty.

        Cut(0), 2 ranks        rows of [4, 6] in pieces of 2:               0-1 | 2-3
        Cut(1), 2 ranks        columns in pieces of 3:                      0-2 | 3-5
        Cut(1, 2), 4 ranks     of [2, 6]: 2 bands of a row, each of them    0, 0-2 | 0, 3-5
                               in pieces of 3 columns                       1, 0-2 | 1, 3-5

    Dim ``dim`` is split into pieces of ``ceil(length / ranks)``. Dim 0, if that is another, is
    first split into equal ``bands``, with equal numbers of ranks; they divide the ranks and dim 0's
    length (decision 18).
    """

    dim: int = 0
    bands: int = 1

    def __str__(self) -> str:
        return f"dim {self.dim}" if self.bands == 1 else f"dims 0 (in {self.bands}) and {self.dim}"

    @property
    def dims(self) -> tuple[int, ...]:
        return (self.dim,) if self.bands == 1 else (0, self.dim)

    def piece(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Shape of a whole piece of a parameter of ``shape``."""
        lengths = list(shape)
        lengths[0] //= self.bands
        lengths[self.dim] = ceil_div(shape[self.dim], ranks // self.bands)
        return tuple(lengths)

    def padded(self, shape: Sequence[int], ranks: int) -> int:
        """Elements of all ranks' pieces."""
        return ranks * math.prod(self.piece(shape, ranks))

    def in_order(self, shape: Sequence[int], ranks: int) -> bool:
        """Whether the pieces, one after another, are exactly the parameter."""
        if self.dim == 0:
            return True
        before = math.prod(self.piece(shape, ranks)[: self.dim])
        return before == 1 and self.padded(shape, ranks) == math.prod(shape)


ROWS = Cut()
"""The cut of torch's FSDP2."""


SMALL_PADDING = 0.03
"""Padding of the first dim, as a share of a parameter, up to which no other is looked at."""

SMALL_PADDING_BYTES = 1 << 20
"""The same in bytes, over all ranks."""


def default_cut(
    shape: Sequence[int],
    ranks: int,
    itemsize: int,
    dims: Sequence[int] | None = None,
    in_bands: bool = True,
) -> Cut:
    """The cut that is taken where several will do (decision 14).

    On the first dim, unless equal pieces of it pad more than 3 % of the parameter and more than 1
    MiB over all ranks. Then, of all ``dims`` (default: any) and, where dim 0 and others were named
    and ``in_bands``, of dim 0 in as many bands as can be with another: one that pads no more than 3
    %, rather one that needs no copies, rather on one dim, rather one that pads less; if there is
    none, the one that pads least.

    Example::

        >>> default_cut((128, 5760, 2880), 256, 4)  # on dim 0, half of all ranks would be empty
        Cut(dim=1, bands=1)
        >>> default_cut((128, 5760, 2880), 256, 4, dims=(0, 1))
        Cut(dim=1, bands=128)
    """
    numel = math.prod(shape)
    first = 0 if dims is None else dims[0]
    length = shape[first]
    small = SMALL_PADDING * numel
    # As `Cut.padded`, without calls: most parameters need no more than this.
    padding = -length % ranks * (numel // length) if length else 0
    if padding <= small or padding * itemsize <= SMALL_PADDING_BYTES:
        return Cut(first)
    cuts = [Cut(dim) for dim in (range(len(shape)) if dims is None else dims)]
    # The most equal bands: each has the fewest rows, and one row needs no copies (decision 18).
    bands = math.gcd(shape[0], ranks)
    # As many bands as ranks would be `Cut(0)`.
    if in_bands and dims is not None and 0 in dims and 1 < bands < ranks:
        cuts += [Cut(dim, bands) for dim in dims if dim]

    def cost(cut: Cut) -> tuple[float, bool, int, int]:
        padding = cut.padded(shape, ranks) - numel
        return max(padding - small, 0), not cut.in_order(shape, ranks), cut.bands, padding

    return min(cuts, key=cost)


class Transport(Enum):
    """How a segment's shards become its gathered parameters."""

    COALESCED = "coalesced"
    PACKED = "packed"
    LOCAL = "local"
    EXTENSION = "extension"
    CODED = "coded"


COPIED_OUT = (Transport.PACKED, Transport.CODED)
"""Those whose gathers put pieces into their slots by a copy."""


@dataclass(frozen=True)
class ParamShape:
    """The properties of a parameter that the layout needs; parameters of other names may be equal.

    ``extended``: its tensor subclass has all-gather hooks. ``coded`` ones, in a format with fewer
    bytes, may share a message if of equal ``kin`` (`fsdp2.core.params.param.shapes_of`).
    """

    name: str = field(compare=False)
    shape: tuple[int, ...]
    cut: Cut
    shard_dtype: torch.dtype
    full_dtype: torch.dtype
    extended: bool = False
    coded: bool = False
    kin: int = 0


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its segment's parts of the flat shard and of the gathered buffer, in
    elements; its ``index`` is in the group, its ``shape`` global.
    """

    index: int
    shape: tuple[int, ...]
    cut: Cut
    world_size: int
    shard_offset: int
    full_offset: int

    @functools.cached_property
    def dim(self) -> int:
        """The dim that is cut into pieces; besides, dim 0 may be cut into bands."""
        return self.cut.dim

    @functools.cached_property
    def per_band(self) -> int:
        """Ranks that share a band; all, if there is one."""
        return self.world_size // self.cut.bands

    @functools.cached_property
    def piece(self) -> tuple[int, ...]:
        return self.cut.piece(self.shape, self.world_size)

    @functools.cached_property
    def chunk(self) -> int:
        return self.piece[self.dim]

    @functools.cached_property
    def inner(self) -> int:
        """Elements per index of the sharded dim: the product of the later dims."""
        return math.prod(self.shape[self.dim + 1 :])

    @functools.cached_property
    def outer(self) -> int:
        """The product of a band's dims before the sharded one (1 for dim 0)."""
        return math.prod(self.piece[: self.dim])

    @functools.cached_property
    def shard_numel(self) -> int:
        """Elements of one rank's piece, padding included; the same on every rank."""
        return math.prod(self.piece)

    @functools.cached_property
    def full_numel(self) -> int:
        """Elements of the gathered slot: whole pieces for dim 0, else the parameter itself."""
        if self.dim == 0:
            return self.world_size * self.shard_numel
        return self.numel

    @functools.cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @functools.cached_property
    def even(self) -> bool:
        """Whether every rank holds a whole piece."""
        return self.chunk * self.per_band == self.shape[self.dim]

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether the ranks' pieces are contiguous in the parameter, one after another."""
        return self.cut.in_order(self.shape, self.world_size)

    def aligned(self, itemsize: int) -> bool:
        """Whether every rank's piece is a multiple of 16 bytes, in elements of ``itemsize``."""
        return self.shard_numel * itemsize % COLLECTIVE_ALIGN_BYTES == 0

    def rows(self, rank: int) -> int:
        """Length of ``rank``'s piece of the sharded dim (0 for a rank beyond the end)."""
        return max(0, min(self.chunk, self.shape[self.dim] - rank % self.per_band * self.chunk))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of ``rank``'s shard, without padding."""
        return (*self.piece[: self.dim], self.rows(rank), *self.shape[self.dim + 1 :])

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """``rank``'s shard, without padding: a view of the whole parameter, a tensor."""
        if self.cut.bands > 1:
            height = self.piece[0]
            whole = whole.narrow(0, rank // self.per_band * height, height)
        length = self.shape[self.dim]
        # Ranks after the last row have an empty piece at the end.
        start = min(rank % self.per_band * self.chunk, length)
        return whole.narrow(self.dim, start, min(self.chunk, length - start))

    def whole_ranks(self) -> int:
        """How many ranks of a band hold a whole piece; at most one further holds a part of one."""
        return self.shape[self.dim] // self.chunk if self.chunk else 0

    def blocks(self) -> list[tuple[int, int, int]]:
        """(number of ranks, first rank, rows) of a band's ranks that hold equally much.

        Example: dim of 5 on 4 ranks, pieces 2 2 1 0: [(2, 0, 2), (1, 2, 1)].
        """
        if not self.outer * self.inner:
            return []
        blocks = []
        whole = self.whole_ranks()
        if whole:
            blocks.append((whole, 0, self.chunk))
        rest = self.shape[self.dim] - whole * self.chunk
        if rest:
            blocks.append((1, whole, rest))
        return blocks


@dataclass(frozen=True)
class Segment:
    """A run of parameters with the same dtypes and transport.

    The segment of extended parameters has no position in the buffers, and its dtypes are unused:
    its slots only determine how the parameters are cut.

    Attributes:
        slots: in the order of both buffers; of packed ones, those whose pieces are in order come
            first.
        shard_numel: elements of one rank's part, padded to 16 bytes in either dtype.
        full_numel: elements of the gathered part, alignment included.
        shard_byte_offset: start in the group's flat shard; ``full_byte_offset`` when gathered.
    """

    transport: Transport
    shard_dtype: torch.dtype
    full_dtype: torch.dtype
    slots: tuple[Slot, ...]
    shard_numel: int
    full_numel: int
    shard_byte_offset: int
    full_byte_offset: int

    @functools.cached_property
    def gathered_places(self) -> list[Strided]:
        """The position of each gathered parameter in the segment's part of the gathered buffer."""
        return [row_major(slot.shape, slot.full_offset) for slot in self.slots]

    @functools.cached_property
    def slot_places(self) -> list[Strided]:
        """The same of whole slots, padding included, in one dim."""
        return [((slot.full_numel,), (1,), slot.full_offset) for slot in self.slots]

    def piece_places(self, rank: int) -> list[Strided]:
        """The same of a rank's pieces, where pieces are in order."""
        return [
            ((slot.shard_numel,), (1,), slot.full_offset + rank * slot.shard_numel)
            for slot in self.slots
        ]

    @functools.cached_property
    def tail(self) -> int:
        """Elements of padding after the last slot of the shard."""
        return self.shard_numel - sum(slot.shard_numel for slot in self.slots)

    @property
    def is_one_slot(self) -> bool:
        """Whether the pieces of all ranks, one after another, are the slot of one parameter."""
        # Empty parameters need no memory, so the pieces of the other one still fill its slot.
        filled = [slot for slot in self.slots if slot.shard_numel]
        return len(filled) == 1 and filled[0].in_order and not self.tail


def straight_into_slots(segments: Sequence[Segment]) -> bool:
    """Whether packed segments are gathered directly into their slots, with no copy afterwards.

    It holds for all or none of a group: the gathered buffer is then allocated before the
    collective, and together with that of a segment which needs its own, a prefetch would hold both.
    """
    copied = [s for s in segments if s.transport in COPIED_OUT]
    return all(s.transport is Transport.PACKED and s.is_one_slot for s in copied)


@dataclass(frozen=True)
class GroupLayout:
    """The plan of one group: a value that can be printed, compared and tested on its own.

    Equal groups share one layout (`layout_of`). Other values that they have in common are stored
    with it: the first group creates them, and they are freed with the last (`once`).

    Attributes:
        shard_bytes: bytes of one rank's flat shard, padding included; ``full_bytes`` when gathered.
        payload_bytes: bytes of the parameters in flat shards, in the shards' dtypes, without
            padding.
        pieces: the positions of a rank's own pieces in its rows, if masters are sharded over two
            levels (`fsdp2.core.layout.levels`).
    """

    world_size: int
    segments: tuple[Segment, ...]
    shard_bytes: int
    full_bytes: int
    payload_bytes: int
    pieces: GroupLayout | None = None
    # A cache: which facts were asked for so far makes no difference.
    _common: dict[Hashable, object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """A fact that groups of this layout share, which refers to none; ``key`` has its owner."""
        if key not in self._common:
            self._common[key] = make()
        return cast(T, self._common[key])

    def rows_of(self, rank: int) -> list[list[tuple[int, tuple[int, ...]]]]:
        """Starts and shapes of a rank's rows, in each segment's part of its shard."""
        return self.once(
            ("rows", rank),
            lambda: [
                [(slot.shard_offset, slot.local_shape(rank)) for slot in segment.slots]
                for segment in self.segments
            ],
        )

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(itertools.chain.from_iterable(segment.slots for segment in self.segments))

    @property
    def gathered_bytes(self) -> int:
        """Bytes while it is gathered: those of the shard, if that is the gathered form."""
        return self.full_bytes or self.shard_bytes

    @property
    def transports(self) -> str:
        """How it is gathered, for people: "coalesced", "coalesced+packed" …"""
        return "+".join(dict.fromkeys(segment.transport.value for segment in self.segments))

    @property
    def copied_bytes(self) -> int:
        """Bytes that a gather copies into place after its collective: packed ones, and coded."""
        if straight_into_slots(self.segments):
            return 0
        copied = [s for s in self.segments if s.transport in COPIED_OUT]
        return sum(slot.numel * s.full_dtype.itemsize for s in copied for slot in s.slots)

    @property
    def padding_bytes(self) -> int:
        """Bytes of the flat shard, over all ranks, that hold no parameter, divided by ranks."""
        return self.shard_bytes - ceil_div(self.payload_bytes, self.world_size)


def repacked(
    slots: Iterable[Slot], itemsize: int, coalesces: bool
) -> tuple[Transport, tuple[Slot, ...], int]:
    """Slots that are cut anew, with offsets, those in order first; how they are gathered; and the
    elements of all, padded to 16 bytes.
    """
    placed: list[Slot] = []
    offset = 0
    # As in `build_layout`: one fused kernel then copies all of those out.
    for slot in sorted(slots, key=lambda slot: not slot.in_order):
        placed.append(replace(slot, shard_offset=offset))
        offset += slot.shard_numel
    straight = all(slot.in_order and slot.shard_numel and slot.aligned(itemsize) for slot in placed)
    transport = Transport.COALESCED if coalesces and straight else Transport.PACKED
    return transport, tuple(placed), round_up(offset, max(COLLECTIVE_ALIGN_BYTES // itemsize, 1))


def pick_transport(param: ParamShape, world_size: int, coalesces: bool) -> Transport:
    """The transport of a single parameter, only from global facts (invariant I1)."""
    if param.extended:
        return Transport.EXTENSION
    if world_size == 1:
        return Transport.LOCAL
    if not math.prod(param.shape):  # nothing to encode: the packed transport sends nothing then
        return Transport.PACKED
    if param.coded:
        return Transport.CODED
    fits = param.cut.in_order(param.shape, world_size) and not _misaligned(param, world_size)
    return Transport.COALESCED if coalesces and fits else Transport.PACKED


def _pick_transports(
    params: Sequence[ParamShape], world_size: int, coalesces: bool, pack_below: int
) -> list[Transport]:
    """The transports of a group's parameters: several small ones are packed (decision 24)."""
    picked = [pick_transport(param, world_size, coalesces) for param in params]
    small: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index, (param, transport) in enumerate(zip(params, picked, strict=True)):
        numel = math.prod(param.cut.piece(param.shape, world_size))
        if transport is Transport.PACKED or (
            transport is Transport.COALESCED and numel * param.full_dtype.itemsize < pack_below
        ):
            # Only parameters of equal dtypes share a segment, and so a message.
            small.setdefault((param.shard_dtype, param.full_dtype), []).append(index)
    for together in small.values():
        if len(together) > 1:  # one alone saves nothing
            for index in together:
                picked[index] = Transport.PACKED
    return picked


def _build_segment(
    transport: Transport,
    members: Sequence[tuple[int, ParamShape]],
    world_size: int,
    shard_byte_offset: int,
    full_byte_offset: int,
) -> Segment:
    first = members[0][1]
    align = max(SLOT_ALIGN_BYTES // first.full_dtype.itemsize, 1)
    slots: list[Slot] = []
    shard_offset = full_offset = 0
    for index, param in members:
        # The local transport casts or aliases the flat shard as a whole: same offsets in both.
        start = shard_offset if transport is Transport.LOCAL else full_offset
        slot = Slot(index, param.shape, param.cut, world_size, shard_offset, start)
        slots.append(slot)
        if transport is Transport.EXTENSION:  # in memory of its own
            continue
        shard_offset += slot.shard_numel
        # Kernels read these parameters in the shard itself: aligned as gathered ones are.
        if transport is Transport.LOCAL:
            shard_offset = round_up(shard_offset, align)
        full_offset = round_up(full_offset + slot.full_numel, align)
    # A multiple of 16 bytes in the smaller dtype is one in the other, too.
    itemsize = min(first.shard_dtype.itemsize, first.full_dtype.itemsize)
    shard_numel = round_up(shard_offset, max(COLLECTIVE_ALIGN_BYTES // itemsize, 1))
    if transport is Transport.LOCAL:  # the shard itself is the gathered form, unless it is cast
        full_offset = 0 if first.shard_dtype == first.full_dtype else shard_numel
    return Segment(
        transport=transport,
        shard_dtype=first.shard_dtype,
        full_dtype=first.full_dtype,
        slots=tuple(slots),
        shard_numel=shard_numel,
        full_numel=full_offset,
        shard_byte_offset=shard_byte_offset,
        full_byte_offset=full_byte_offset,
    )


def build_layout(
    params: Sequence[ParamShape], world_size: int, coalesces: bool, pack_below: int = 0
) -> GroupLayout:
    """Lay out a group; several parameters of the same dtypes with gathered pieces of fewer than
    ``pack_below`` bytes are packed.

    Example::

        >>> weight = ParamShape("w", (4, 8), ROWS, torch.float32, torch.float32)
        >>> build_layout([weight], world_size=2, coalesces=True).shard_bytes
        64
    """
    families: dict[
        tuple[Transport, tuple[torch.dtype | None, ...], int], list[tuple[int, ParamShape]]
    ] = {}
    picked = _pick_transports(params, world_size, coalesces, pack_below)
    for index, (param, transport) in enumerate(zip(params, picked, strict=True)):
        dtypes: tuple[torch.dtype | None, ...] = (param.shard_dtype, param.full_dtype)
        if transport is Transport.EXTENSION:  # of any dtype: they travel as bytes
            dtypes = (None, None)
        families.setdefault((transport, dtypes, param.kin), []).append((index, param))

    segments: list[Segment] = []
    shard_bytes = full_bytes = payload = 0
    for (transport, _, _), members in families.items():
        if transport in COPIED_OUT:
            # Pieces in order first, so that one fused kernel copies all of those out; aligned
            # shards before the others, whose padding then comes once, at the end.
            members = sorted(
                members,
                key=lambda m: (
                    not m[1].cut.in_order(m[1].shape, world_size),
                    _misaligned(m[1], world_size),
                ),
            )
        segment = _build_segment(transport, members, world_size, shard_bytes, full_bytes)
        segments.append(segment)
        first = members[0][1]
        if transport is not Transport.EXTENSION:
            payload += sum(math.prod(p.shape) * p.shard_dtype.itemsize for _, p in members)
        shard_bytes = round_up(
            shard_bytes + segment.shard_numel * first.shard_dtype.itemsize, SLOT_ALIGN_BYTES
        )
        full_bytes = round_up(
            full_bytes + segment.full_numel * first.full_dtype.itemsize, SLOT_ALIGN_BYTES
        )
    if len(segments) == 1:  # nothing follows: no need to align what comes after
        shard_bytes = segments[0].shard_numel * params[0].shard_dtype.itemsize
    return GroupLayout(world_size, tuple(segments), shard_bytes, full_bytes, payload)


# A model's blocks are alike: laying out the first one serves all, and their bindings share it.
_layouts: weakref.WeakValueDictionary[Hashable, GroupLayout] = weakref.WeakValueDictionary()


def layout_of(
    params: Sequence[ParamShape], world_size: int, coalesces: bool, pack_below: int
) -> GroupLayout:
    """As `build_layout`; the same object for all groups that are alike, as long as one has it."""
    key = (tuple(params), world_size, coalesces, pack_below)
    found = _layouts.get(key)
    if found is None:
        found = _layouts[key] = build_layout(params, world_size, coalesces, pack_below)
    return found


def _misaligned(param: ParamShape, world_size: int) -> bool:
    numel = math.prod(param.cut.piece(param.shape, world_size))
    return (
        numel * min(param.shard_dtype.itemsize, param.full_dtype.itemsize) % COLLECTIVE_ALIGN_BYTES
        != 0
    )
