"""The docstrings of fsdp2 as Markdown, for mkdocstrings: what reStructuredText writes otherwise.

Example::                  a fenced block of Python under "Example"
    fully_shard(block)
`fully_shard`              a link to the name's entry, where the API reference has one
====  ====                 a table
``param.grad``             code: Markdown reads it alike
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

API = Path(__file__).parents[1] / "api"

_BLOCK = re.compile(
    r"^(?P<indent> *)(?P<text>[^\n]*?)(?P<colons>::)\n(?P<code>(?:\n|(?P=indent) +[^\n]*\n?)+)",
    re.MULTILINE,
)
_NAME = re.compile(r"(?<![`\w])`(?P<name>[A-Za-z_][\w.]*)`(?!`)")


_TABLE = re.compile(
    r"^(?P<rule> *=+(?: +=+)+)\n(?P<head>.*?)\n(?P=rule)\n(?P<body>.*?)\n(?P=rule)$",
    re.MULTILINE | re.DOTALL,
)


def documented() -> dict[str, str]:
    """Every name of the API pages, by its last part and in full: name -> full name."""
    found: dict[str, str] = {}
    for page in sorted(API.glob("*.md")):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            found[name] = name
            found.setdefault(name.removeprefix("fsdp2."), name)
            found.setdefault(name.rpartition(".")[2], name)
    return found


def _fenced(match: re.Match[str]) -> str:
    indent, text = match["indent"], match["text"]
    code = textwrap.dedent(match["code"]).strip("\n")
    head = f"**{text}**" if text == "Example" else f"{text}:"
    kind = "python" if text.startswith("Example") else "text"
    block = f"{head}\n\n```{kind}\n{code}\n```\n\n"
    return textwrap.indent(block, indent, lambda line: line.strip() != "")


def _table(match: re.Match[str]) -> str:
    """A table whose columns are where the rule is; a line without a first cell goes on."""
    rule = match["rule"]
    starts = [column.start() for column in re.finditer("=+", rule)]
    ends = [*starts[1:], None]

    def rows(text: str) -> list[list[str]]:
        found: list[list[str]] = []
        for line in text.splitlines():
            cells = [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
            if cells[0] or not found:
                found.append(cells)
            else:
                found[-1] = [f"{a} {b}".strip() for a, b in zip(found[-1], cells, strict=True)]
        return found

    (head,) = rows(match["head"])
    lines = [head, ["---"] * len(head), *rows(match["body"])]
    indent = " " * starts[0]
    return "\n".join(f"{indent}| {' | '.join(cells)} |" for cells in lines)


def as_markdown(text: str, names: dict[str, str]) -> str:
    """A docstring's text, as Markdown.

    Args:
        text: of the docstring, without its indentation.
        names: those that the reference has (`documented`).
    """
    text = _TABLE.sub(_table, _BLOCK.sub(_fenced, text + "\n"))
    return _NAME.sub(
        lambda match: (
            f"[`{match['name']}`][{names[match['name']]}]" if match["name"] in names else match[0]
        ),
        text,
    )


class Docstrings(griffe.Extension):
    """Rewrites each docstring before griffe parses it."""

    def __init__(self) -> None:
        self._names = documented()

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, self._names)
