"""What torch's caching allocator would hold for a log of allocations: rounding and fragmentation.

    allocator = CachingAllocator()
    allocator.replay(log)      (address, bytes or 0 where it is freed, stream)
    allocator.reserved         bytes of its segments

The rules are those of CUDACachingAllocator (torch 2.11 to 2.15, c10/cuda/CUDACachingAllocator.cpp)
as it comes, without expandable segments:

- Sizes are rounded up to 512 bytes. Those up to 1 MiB are cut from segments of 2 MiB; those below
  10 MiB from segments of 20 MiB; a larger one gets a segment of its size, rounded up to 2 MiB.
- Each stream has a pool of small and a pool of large blocks. A block comes from its own pool alone:
  the smallest free one that is large enough, at the lowest address among equals.
- What is left of a block stays free where it is at least 512 bytes (small) or more than 1 MiB.
- A freed block joins its free neighbours in the segment.

Memory is never exhausted, so that no segment goes back. No block waits for another stream, since
neither runtime calls `record_stream` (a count of the stand-in's shows it).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

MIB = 1 << 20
ALIGNMENT = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
LARGE_SEGMENT, OWN_SEGMENT, ROUND = 20 * MIB, 10 * MIB, 2 * MIB


@dataclass(eq=False)
class Block:
    """A piece of a segment; its neighbours are pieces of the same one."""

    address: int
    nbytes: int
    free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass
class Pool:
    """Free blocks by size and address."""

    small: bool
    blocks: list[tuple[int, int, Block]] = field(default_factory=list)

    def put(self, block: Block) -> None:
        block.free = True
        bisect.insort(self.blocks, (block.nbytes, block.address, block), key=_place)

    def drop(self, block: Block) -> None:
        block.free = False
        del self.blocks[bisect.bisect_left(self.blocks, (block.nbytes, block.address), key=_place)]

    def best(self, nbytes: int) -> Block | None:
        """Takes the smallest that is large enough."""
        at = bisect.bisect_left(self.blocks, (nbytes, 0), key=_place)
        if at == len(self.blocks):
            return None
        block = self.blocks[at][2]
        self.drop(block)
        return block

    def splits(self, rest: int) -> bool:
        return rest >= ALIGNMENT if self.small else rest > SMALL


def _place(item: tuple[int, int, Block]) -> tuple[int, int]:
    return item[:2]


class CachingAllocator:
    """Replays a log.

    Args:
        scale: each size is multiplied by it.

    Attributes:
        reserved: bytes of all segments.
        allocated: bytes of blocks that are in use, rounded.
        peak: the most that was ``allocated``.
    """

    def __init__(self, scale: int = 1) -> None:
        self.reserved = self.allocated = self.peak = 0
        self._scale = scale
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._blocks: dict[int, tuple[Block, Pool]] = {}  # in use, by the log's address
        self._end = 0

    def replay(self, log: Iterable[tuple[int, int, int]]) -> None:
        for address, nbytes, stream in log:
            if nbytes:
                self._blocks[address] = self._allocate(nbytes * self._scale, stream)
            else:
                self._free(*self._blocks.pop(address))

    def _allocate(self, nbytes: int, stream: int) -> tuple[Block, Pool]:
        size = _rounded(nbytes, ALIGNMENT)
        small = size <= SMALL
        pool = self._pools.setdefault((stream, small), Pool(small))
        block = pool.best(size) or self._segment(_segment_size(size))
        if pool.splits(block.nbytes - size):
            rest = Block(block.address + size, block.nbytes - size, False, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.nbytes, block.after = size, rest
            pool.put(rest)
        self.allocated += block.nbytes
        self.peak = max(self.peak, self.allocated)
        return block, pool

    def _segment(self, nbytes: int) -> Block:
        block = Block(self._end, nbytes)
        self._end += nbytes
        self.reserved += nbytes
        return block

    def _free(self, block: Block, pool: Pool) -> None:
        self.allocated -= block.nbytes
        before, after = block.before, block.after
        if before is not None and before.free:
            pool.drop(before)
            block.address, block.nbytes = before.address, before.nbytes + block.nbytes
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            pool.drop(after)
            block.nbytes += after.nbytes
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        pool.put(block)


def _rounded(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


def _segment_size(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else _rounded(size, ROUND)
