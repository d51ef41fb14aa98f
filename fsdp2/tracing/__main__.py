"""Timelines from the command line.

python -m fsdp2.tracing view step.json                  writes step.html
python -m fsdp2.tracing view plan.json step.json        both on one axis
python -m fsdp2.tracing summary step.json               prints tables
python -m fsdp2.tracing diff plan.json step.json        prints them side by side
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fsdp2.tracing.page import show
from fsdp2.tracing.summaries import diff, summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 wrong usage or no timeline."""
    parser = argparse.ArgumentParser(prog="python -m fsdp2.tracing")
    commands = parser.add_subparsers(dest="command", required=True)
    view = commands.add_parser("view", help="write an HTML page that shows timelines")
    view.add_argument("files", nargs="+", metavar="FILE")
    view.add_argument("--to", metavar="PAGE", help="the page (default: the first file, .html)")
    alone = commands.add_parser("summary", help="print a timeline in numbers")
    alone.add_argument("file", metavar="FILE")
    both = commands.add_parser("diff", help="print two timelines side by side")
    both.add_argument("first", metavar="FILE")
    both.add_argument("second", metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        if options.command == "view":
            print(show(*options.files, to=options.to))
        elif options.command == "summary":
            print(summary(options.file))
        else:
            print(diff(options.first, options.second))
    except (OSError, ValueError) as error:
        print(f"fsdp2.trace: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
