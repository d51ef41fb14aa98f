"""One parser for all subcommands: the same options, complaints and exit codes everywhere.

Exit codes: `DONE` 0; `PROBLEM` 1, the command ran and found something wrong, such as a plan that
does not fit or a changed file; `USAGE` 2, the command could not do what it was asked.
"""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from typing import NoReturn

import fsdp2

DONE, PROBLEM, USAGE = 0, 1, 2

CODES = "exit codes: 0 done, 1 a problem was found, 2 wrong usage"


class Parser(argparse.ArgumentParser):
    """argparse that complains in one sentence, and takes no beginnings of options."""

    def __init__(self, prog: str, description: str = "", epilog: str = CODES) -> None:
        super().__init__(
            prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        version = f"fsdp2 {fsdp2.__version__}"
        self.add_argument(
            "--version", action="version", version=version, help="print the version and exit"
        )

    def error(self, message: str) -> NoReturn:
        """Leave with `USAGE`, a sentence on stderr."""
        self.exit(USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")

    def add_json(self) -> None:
        """Add ``--json``."""
        self.add_argument("--json", action="store_true", help="print JSON, for scripts")


def subparsers(parser: Parser, commands: Mapping[str, str]) -> dict[str, Parser]:
    """A parser for each subcommand, with ``--json``; ``command`` of the arguments says which."""
    adding = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND", parser_class=_Sub
    )
    made: dict[str, Parser] = {}
    for name, text in commands.items():
        made[name] = adding.add_parser(name, help=text, description=sentence(text))
        made[name].add_json()
    return made


class _Sub(Parser):
    """The parser of a subcommand, as argparse calls it."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description)


def sentence(text: str) -> str:
    """A phrase with its capital letter and its full stop."""
    return f"{text[0].upper()}{text[1:]}."


def complain(prog: str, problem: object) -> int:
    """Say on stderr what is wrong; returns `USAGE`."""
    print(f"{prog}: {problem}", file=sys.stderr)
    return USAGE


def count(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    return int(_number(text, int, 1, "a whole number of at least 1"))


def step(text: str) -> int:
    """An argument that is the number of a step."""
    return int(_number(text, int, 0, "the number of a step"))


def positive(text: str) -> float:
    """An argument that is a number above 0."""
    return _number(text, float, 1e-300, "a number above 0")


def _number(text: str, kind: Callable[[str], float], least: float, wanted: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = least - 1
    if not value >= least:
        from fsdp2.core.errors import coded

        raise coded(
            ArgumentTypeError, "command-argument", f"the option takes {wanted}, not '{text}'"
        )
    return value
