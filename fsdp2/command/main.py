"""`fsdp2 COMMAND …`: finds the subcommand, imports only its module, and calls it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from fsdp2.command.options import CODES, Parser

NAMES = ("plan", "calibrate", "trace", "checkpoint", "run", "doctor", "examples")
"""Modules of this room with a ``main(arguments)``, a ``SUMMARY``, and perhaps ``COMMANDS``."""

HANDS_ON = ("run", "examples")
"""Those that start the user's code: what that raises is left as it is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code; see `fsdp2.command.options`."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in NAMES:
        command: Callable[[Sequence[str]], int] = _module(given[0]).main
        return command(given[1:]) if given[0] in HANDS_ON else _guarded(command, given[1:])
    _parser().parse_args(given)
    return 0


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"fsdp2.command.{name}")


def _guarded(command: Callable[[Sequence[str]], int], given: Sequence[str]) -> int:
    """Run a command; no traceback if the reader of a pipe ends, or after Ctrl-C."""
    try:
        code = command(given)
        sys.stdout.flush()
    except BrokenPipeError:  # as by `| head`; Python would complain of it again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> Parser:
    """The parser that lists the commands; their options are in their own modules."""
    lines = ["commands:"]
    for name in NAMES:
        module = _module(name)
        below = getattr(module, "COMMANDS", {})
        lines += [] if below else [f"  {name:<20}{module.SUMMARY}"]
        lines += [f"  {f'{name} {each}':<20}{text}" for each, text in below.items()]
    lines += ["", "fsdp2 COMMAND --help shows the options of a command.", CODES]
    text = "Sharded training with PyTorch: plan steps, inspect timelines, manage checkpoints."
    parser = Parser("fsdp2", text, "\n".join(lines))
    parser.add_argument(
        "command", choices=NAMES, metavar="COMMAND", help="one of the commands below"
    )
    return parser
