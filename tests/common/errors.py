"""The catalogue of errors, docs/errors.md, as tests use it.

    - **scalar-parameter** · `ValueError` · `sharding/test_misuses.py::test_at_fully_shard`
      > parameter '{name}' is a scalar and has no dim to shard; make it …

    with raises("scalar-parameter"):      the exception, and the message with anything for {…}
        fully_shard(model)

`tests/house/test_error_catalogue.py` compares the entries with the sources, and looks for the id in
the test that is named.
"""

from __future__ import annotations

import builtins
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fsdp2

CATALOGUE = Path(__file__).parents[2] / "docs" / "errors.md"

_ENTRY = re.compile(
    r"^- \*\*(?P<id>[a-z0-9-]+)\*\* · `(?P<exception>\w+)` · `(?P<test>[\w/.]+::\w+)`"
    r"(?P<torch> · torch's own words)?\n  > (?P<message>.+)$",
    re.MULTILINE,
)

LISTED = {"plain-state-dict"}
"""Messages of which torch makes one exception for several keys: it has none of the codes."""

PLACEHOLDER = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True)
class Entry:
    """One error.

    Attributes:
        id: its name in the catalogue.
        exception: name of the class.
        test: path below ``tests`` and function that shows it.
        message: the text, with ``{…}`` for what varies.
        from_torch: whether torch raises it.
    """

    id: str
    exception: str
    test: str
    message: str
    from_torch: bool


@functools.cache
def catalogue() -> dict[str, Entry]:
    """The entries of docs/errors.md by id."""
    text = CATALOGUE.read_text(encoding="utf-8")
    entries = [
        Entry(m["id"], m["exception"], m["test"], m["message"], m["torch"] is not None)
        for m in _ENTRY.finditer(text)
    ]
    assert len({entry.id for entry in entries}) == len(entries), "an id is there twice"
    return {entry.id: entry for entry in entries}


def raises(entry_id: str) -> Any:
    """``pytest.raises`` for the exception, the whole message of an entry, and its code."""
    entry = catalogue()[entry_id]
    kind = getattr(fsdp2, entry.exception, None) or getattr(builtins, entry.exception)
    code = None if entry.from_torch or entry_id in LISTED else entry_id
    return pytest.raises(
        kind, match=_pattern(entry), check=lambda error: getattr(error, "code", None) == code
    )


def assert_said(entry_id: str, text: str) -> None:
    """That ``text``, which an exception of the entry said, is the whole message of an entry."""
    assert re.fullmatch(_pattern(catalogue()[entry_id]), text), text


def _pattern(entry: Entry) -> str:
    parts = PLACEHOLDER.split(entry.message)
    code = "" if entry.from_torch else re.escape(f" [{entry.id}]")
    code += "" if entry.from_torch or entry.id in LISTED else "$"
    return "(?s)" + ".*?".join(re.escape(part) for part in parts) + code
