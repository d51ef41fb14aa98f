"""The page of errors: `docs/errors.md`, and below it all errors of the sources (`catalogue`).

Every error is a heading of its own: its id is the anchor, and the site's search finds its message.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

import catalogue

_LINES = re.MULTILINE | re.DOTALL
_SECTION = re.compile(r"^## (?=[a-z0-9-]+$)", re.MULTILINE)
_EXAMPLE = re.compile(r"(^```python\n.*?^```\n)", _LINES)

PAGE = Path(__file__).parents[1] / "errors.md"


def page() -> str:
    """The whole page, as Markdown."""
    head, *sections = _SECTION.split(PAGE.read_text(encoding="utf-8"))
    # Readers of the site see the examples as they are; the lines before them are for the test.
    head = head.partition("\nThe first block of Python")[0]
    explained = dict(section.split("\n", 1) for section in sections)
    entries = catalogue.catalogue()
    parts = [head, "## The most likely errors\n"]
    parts += [_heading(entries[id_]) + _explained(text) for id_, text in explained.items()]
    for title in dict.fromkeys(entry.section for entry in entries.values()):
        parts.append(f"## {title}\n")
        for entry in entries.values():
            if entry.section == title:
                above = f"- [{entry.id}](#{entry.id}) is explained above.\n"
                parts.append(above if entry.id in explained else _heading(entry))
    return "\n".join(parts)


def _heading(entry: catalogue.Entry) -> str:
    """An error's id, its exception and its message."""
    escaped = html.escape(entry.message, quote=False)
    message = catalogue.PLACEHOLDER.sub(lambda varies: f"<var>{varies[0][1:-1]}</var>", escaped)
    words = " in torch's own words" if entry.from_torch else ""
    return (
        f"### {entry.id} {{ #{entry.id} .error }}\n\n"
        f'<p class="error-message"><code>{entry.exception}</code>{words}: {message}</p>\n\n'
    )


def _explained(text: str) -> str:
    """Names for the two parts of an explanation: what fails, and what does not."""
    cause, example, rest = _EXAMPLE.split(text.strip() + "\n", maxsplit=1)
    return f"**Cause.** {cause}{example}\n**Fix.** {rest.strip()}\n"
