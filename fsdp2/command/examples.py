"""`fsdp2 examples`: what they are; with a name, the example itself, with its own options."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp2.command.options import DONE, Parser
from fsdp2.command.output import tell

PROG = "fsdp2 examples"

SUMMARY = "list the examples, or run one"

FOLDER = Path(__file__).parents[1] / "examples"


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 listed, 2 wrong usage; or the example's."""
    name = arguments[0].replace("-", "_") if arguments else ""
    found = known()
    if name in found:
        sys.argv = [f"{PROG} {arguments[0]}", *arguments[1:]]
        runpy.run_module(f"fsdp2.examples.{name}", run_name="__main__", alter_sys=True)
        return DONE
    given = parser(found).parse_args(arguments)
    lines = [f"{name:<18}{text}" for name, text in found.items()]
    lines += ["", f"{PROG} NAME --help has the options of an example."]
    tell(given.json, found, "\n".join(lines))
    return DONE


def parser(found: dict[str, str]) -> Parser:
    """The options of `fsdp2 examples`; those of an example are its own."""
    lines = [f"  {name:<18}{text}" for name, text in found.items()]
    made = Parser(
        PROG, "List the examples; with a name, run one.", "\n".join(["examples:", *lines])
    )
    made.add_argument(
        "name", nargs="?", choices=list(found), metavar="NAME", help="the example to run"
    )
    made.add_argument(
        "arguments",
        nargs="*",
        metavar="ARGUMENT",
        help="arguments of the example, including --help",
    )
    made.add_json()
    return made


def known() -> dict[str, str]:
    """The first sentence of each example that is a program, by its name."""
    found = {}
    for path in sorted(FOLDER.glob("[a-z]*.py")):
        text = path.read_text(encoding="utf-8")
        if 'if __name__ == "__main__":' in text:
            said = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            found[path.stem] = said.replace("``", "")
    return found
