"""`fsdp2 trace`: timelines that `fsdp2.trace` or a plan has written."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fsdp2.command.options import DONE, Parser, complain, subparsers
from fsdp2.command.output import ProgressLine, print_json, print_text

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
        return {"view": _view, "summary": _summary, "diff": _diff}[given.command](given)
    except (OSError, ValueError) as error:
        return complain(f"{PROG} {given.command}", error)


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


def _view(given: argparse.Namespace) -> int:
    import webbrowser

    from fsdp2.tracing.page import show

    with ProgressLine("trace view"):
        page = show(*given.files, to=given.to)
    if given.json:
        print_json({"page": page})
    else:
        print(page)
    if given.open:
        webbrowser.open(page.resolve().as_uri())
    return DONE


def _summary(given: argparse.Namespace) -> int:
    from fsdp2.tracing.summaries import summary

    with ProgressLine("trace summary"):
        found = summary(given.file)
    return _print(found, given)


def _diff(given: argparse.Namespace) -> int:
    from fsdp2.tracing.summaries import diff

    with ProgressLine("trace diff"):
        found = diff(given.first, given.second)
    return _print(found, given)


def _print(found: object, given: argparse.Namespace) -> int:
    if given.json:
        print_json(found)
    else:
        print_text(found)
    return DONE
