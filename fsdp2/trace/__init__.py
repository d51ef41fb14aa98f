"""What ran where and when, from paper, from a stand-in and from real runs: one format.

timeline   the data: slices and waits by lane, memory by category
chrome     the same as a file, which Perfetto opens
"""

from fsdp2.trace.timeline import (
    CATEGORIES,
    COLLECTIVES,
    LANES,
    Memory,
    Peak,
    Slice,
    Timeline,
    Wait,
)

__all__ = [
    "CATEGORIES",
    "COLLECTIVES",
    "LANES",
    "Memory",
    "Peak",
    "Slice",
    "Timeline",
    "Wait",
]
