"""The page of errors for users, of the catalogue that tests read and of what is written by hand.

docs/errors.md             id, exception, test and message of every error   ──┐
docs/errors_explained.md   cause, example and fix of the most likely ones   ──┴──> `page`

Every error is a heading of its own: its id is the anchor, and the site's search finds its message.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

DOCS = Path(__file__).parents[1]

_ENTRY = re.compile(
    r"^- \*\*(?P<id>[a-z0-9-]+)\*\* · `(?P<exception>\w+)` · `[^`]+`(?P<torch> · [^\n]+)?\n"
    r"  > (?P<message>[^\n]+)\n",
    re.MULTILINE,
)
_LINES = re.MULTILINE | re.DOTALL
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")

INTRODUCTION = """\
# Errors

A message ends in the code of its error in brackets, such as `[child-after-parent]`. The exception
has it as `error.code`, and it is the address of the entry here: `errors/#child-after-parent`. If
you have no code, search for a part of the message without names. Slanted words stand for what
varies.

- A message names the parameter or the module, and says after the semicolon what to do.
- When an error is raised, fsdp2 has not changed or sent anything. There are three exceptions:
  errors of a collective, errors of values such as NaN, and errors during initialization.
- If all ranks share the cause of an error, all of them raise.
- `ShardingStateError` is a `RuntimeError`.

Two operations look like misuse but are supported. You may change `requires_grad` at any time: the
next forward follows it. A forward inside backward is a recomputation, which activation checkpointing
needs.

## The most likely errors

"""


def explanations() -> dict[str, str]:
    """Id -> cause, example and fix, as Markdown."""
    text = (DOCS / "errors_explained.md").read_text(encoding="utf-8")
    _, *sections = re.split(r"^## (?=[a-z0-9-]+$)", text, flags=re.MULTILINE)
    return {head: body.strip() for head, _, body in (part.partition("\n") for part in sections)}


def page() -> str:
    """The whole page, as Markdown."""
    catalogue = (DOCS / "errors.md").read_text(encoding="utf-8")
    explained = explanations()
    entries = {entry["id"]: entry for entry in _ENTRY.finditer(catalogue)}
    likely = "\n\n".join(
        f"{_heading(entries[id_])}{_explained(text)}" for id_, text in explained.items()
    )
    _, *sections = re.split(r"^(?=## )", catalogue, flags=re.MULTILINE)

    def listed(entry: re.Match[str]) -> str:
        if entry["id"] in explained:
            return f"\n- [{entry['id']}](#{entry['id']}) is explained above.\n\n"
        return f"\n{_heading(entry)}"

    return INTRODUCTION + likely + "\n\n" + "".join(_ENTRY.sub(listed, part) for part in sections)


def _heading(entry: re.Match[str]) -> str:
    """An error's id, its exception and its message."""
    message = html.escape(entry["message"], quote=False)
    message = _PLACEHOLDER.sub(r"<var>\1</var>", message)
    words = " in torch's own words" if entry["torch"] else ""
    return (
        f"### {entry['id']} {{ #{entry['id']} .error }}\n\n"
        f'<p class="error-message"><code>{entry["exception"]}</code>{words}: {message}</p>\n\n'
    )


def _explained(text: str) -> str:
    """Names for the two parts of an explanation: what fails, and what does not."""
    cause, example, rest = re.split(r"(^```python\n.*?^```\n)", text, maxsplit=1, flags=_LINES)
    return f"**Cause.** {cause}{example}\n**Fix.** {rest.strip()}\n"
