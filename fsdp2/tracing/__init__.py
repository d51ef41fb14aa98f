"""Timelines of operations, from paper, from a stand-in and from real runs, in one format.

timeline   the data: slices and waits by lane, memory by category; as a file that Perfetto opens
summaries  the same in numbers: exposed communication, idle time, overlap; two side by side
recording  what a real step runs, and when
seams      the reporters: streams, kernels, collectives, groups and units, while a trace is on
page       an HTML file that shows timelines
reports    `fsdp2.report`: units, bytes and memory of a model, without a step
context    ``with fsdp2.trace(path):`` around real steps
record     notes of operations, and their replay in time
paper      a device without memory, on which a step is rehearsed

``fsdp2 trace`` does the same from the command line. Files are read and shown without torch: `trace`
and the reports of models load it, when they are first used.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from fsdp2.tracing.page import show
from fsdp2.tracing.record.categories import CATEGORIES
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

if TYPE_CHECKING:
    from fsdp2.tracing.context import trace
    from fsdp2.tracing.reports import GroupReport, Report, report

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


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # with a ``__getattr__``, type checkers would take any name for one of ours

    def __getattr__(name: str) -> object:
        if name not in __all__:
            return object.__getattribute__(sys.modules[__name__], name)  # which raises
        home = "context" if name == "trace" else "reports"
        return getattr(import_module(f"{__name__}.{home}"), name)
