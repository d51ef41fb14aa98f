"""benchmarks/caching.py: segments, blocks and pools as torch's caching allocator has them."""

from __future__ import annotations

import random

import pytest

from benchmarks.caching import MIB, CachingAllocator

Log = list[tuple[int, int, int]]


def replayed(log: Log, scale: int = 1) -> CachingAllocator:
    allocator = CachingAllocator(scale)
    allocator.replay(log)
    return allocator


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (23 * MIB, 24 * MIB, 24 * MIB),  # 1 MiB that is left is not split off
    ],
)
def test_a_block_of_a_new_segment(nbytes: int, allocated: int, reserved: int) -> None:
    found = replayed([(1, nbytes, 0)])
    assert (found.allocated, found.reserved) == (allocated, reserved)


def test_a_freed_block_is_used_again_by_its_own_stream_alone() -> None:
    log = [(1, 12 * MIB, 0), (1, 0, 0), (2, 12 * MIB, 0)]
    assert replayed(log).reserved == 12 * MIB
    assert replayed([*log, (3, 12 * MIB, 1)]).reserved == 24 * MIB


def test_the_smallest_block_that_fits_is_taken_and_split() -> None:
    log = [(1, 40 * MIB, 0), (2, 20 * MIB, 0), (1, 0, 0), (2, 0, 0), (3, 12 * MIB, 0)]
    found = replayed([*log, (4, 40 * MIB, 0), (5, 8 * MIB, 0)])
    assert found.reserved == 60 * MIB  # 3 and 5 share the segment of 2


def test_free_neighbours_become_one_block() -> None:
    cut = [(1, 8 * MIB, 0), (2, 8 * MIB, 0)]  # of one segment of 20 MiB
    assert replayed([*cut, (1, 0, 0), (2, 0, 0), (3, 20 * MIB, 0)]).reserved == 20 * MIB
    assert replayed([*cut, (1, 0, 0), (3, 20 * MIB, 0)]).reserved == 40 * MIB


def test_a_scale_multiplies_sizes() -> None:
    found = replayed([(1, MIB, 0), (2, 3, 0)], scale=16)
    assert (found.allocated, found.reserved) == (16 * MIB + 512, 18 * MIB)


def test_nothing_is_lost() -> None:
    """What was allocated and freed at random comes to nothing in use, in one block per segment."""
    chance = random.Random(0)
    live: dict[int, int] = {}
    log: Log = []
    for address in range(2000):
        stream = chance.randrange(2)
        log.append((address, chance.choice((100, 5000, 3 * MIB, 11 * MIB)), stream))
        live[address] = stream
        if chance.random() < 0.6:
            gone = chance.choice(list(live))
            log.append((gone, 0, live.pop(gone)))
    log += [(address, 0, stream) for address, stream in live.items()]
    found = replayed(log)
    assert found.allocated == 0
    free = [block for pool in found._pools.values() for block in pool.blocks]
    assert sum(nbytes for nbytes, _, _ in free) == found.reserved
    assert all(block.before is None and block.after is None for _, _, block in free)
