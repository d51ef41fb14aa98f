"""`fsdp2 trace`: timelines that `fsdp2.trace` or a plan has written."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp2.command.options import DONE, Parser, complain, subparsers
from fsdp2.command.output import ProgressLine, tell

if TYPE_CHECKING:
    from fsdp2.tracing import Difference, Summary

PROG = "fsdp2 trace"

SUMMARY = "inspect timelines of steps"

COMMANDS = {
    "view": "write an HTML page that shows timelines on one axis, and print its path",
    "summary": "print a timeline in numbers: compute, exposed communication, peak memory",
    "diff": "print two timelines side by side, unit by unit",
}


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 done, 2 wrong usage or no timeline."""
    given = parser().parse_args(arguments)
    try:
        with ProgressLine(f"trace {given.command}"):
            found = _run(given)
    except (OSError, ValueError) as error:
        return complain(f"{PROG} {given.command}", error)
    tell(given.json, {"page": found} if isinstance(found, Path) else found, found)
    if isinstance(found, Path) and given.open:
        webbrowser.open(found.resolve().as_uri())
    return DONE


def _run(given: argparse.Namespace) -> Path | Summary | Difference:
    from fsdp2.tracing import diff, show, summary

    if given.command == "view":
        return show(*given.files, to=given.to)
    if given.command == "summary":
        return summary(given.file)
    return diff(given.first, given.second)


def parser() -> Parser:
    """The options of `fsdp2 trace`."""
    made = Parser(PROG, "Timelines of steps, planned or measured.")
    below = subparsers(made, COMMANDS)
    below["view"].add_argument("files", nargs="+", metavar="FILE", help="a timeline")
    below["view"].add_argument("--to", metavar="PAGE", help="the page (the first file, as .html)")
    below["view"].add_argument("--open", action="store_true", help="open it in a browser")
    below["summary"].add_argument("file", metavar="FILE", help="a timeline")
    below["diff"].add_argument("first", metavar="FILE", help="a timeline, such as the planned one")
    below["diff"].add_argument("second", metavar="FILE", help="another, such as the measured one")
    return made
