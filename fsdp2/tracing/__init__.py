"""Timelines of operations, from paper, from a stand-in and from real runs, in one format.

timeline   the data: slices and waits by lane, memory by category; as a file that Perfetto opens
summaries  the same in numbers: exposed communication, idle time, overlap; two side by side
recording  what a real step runs, and when
seams      the reporters: streams, kernels, collectives, groups and units, while a trace is on
drawing    a recorded step whose times are known, as a timeline
states     the optimizer states on the device
page       an HTML file that shows timelines
reports    `fsdp2.report`: units, bytes and memory of a model, without a step
context    ``with fsdp2.trace(path):`` around real steps
record     notes of operations, and their replay in time
paper      a device without memory, on which a step is rehearsed

``fsdp2 trace`` does the same from the command line.
"""

from fsdp2.tracing.context import trace
from fsdp2.tracing.page import show
from fsdp2.tracing.record.categories import CATEGORIES
from fsdp2.tracing.reports import GroupReport, Report, report
from fsdp2.tracing.summaries import Difference, Summary, UnitTimes, diff, summary
from fsdp2.tracing.timeline import (
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
    "GroupReport",
    "Memory",
    "Peak",
    "Report",
    "Slice",
    "Summary",
    "Timeline",
    "UnitTimes",
    "Wait",
    "diff",
    "report",
    "show",
    "summary",
    "trace",
]
