"""What ran where and when, from paper, from a stand-in and from real runs: one format.

timeline   the data: slices and waits by lane, memory by category; as a file that Perfetto opens
summary    the same in numbers: exposed communication, idle time, overlap; two side by side
"""

from fsdp2.trace.summary import Difference, Summary, UnitTimes, diff, summary
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
    "Difference",
    "Memory",
    "Peak",
    "Slice",
    "Summary",
    "Timeline",
    "UnitTimes",
    "Wait",
    "diff",
    "summary",
]
