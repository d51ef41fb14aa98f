"""The catalogue of errors that the docs site reads from the sources, as tests use it.

    with raises("scalar-parameter"):      the exception, and the message with anything for {…}
        fully_shard(model)

`tests/house/test_error_catalogue.py` shows that the catalogue is whole, and that some test asserts
each entry.
"""

from __future__ import annotations

import builtins
import re
from typing import Any

import pytest

import fsdp2
from docs.site.catalogue import PLACEHOLDER, Entry, entry

LISTED = {"plain-state-dict"}
"""Messages of which torch makes one exception for several keys: it has none of the codes."""


def raises(entry_id: str) -> Any:
    """``pytest.raises`` for the exception, the whole message of an entry, and its code."""
    found = entry(entry_id)
    kind = getattr(fsdp2.errors, found.exception, None) or getattr(builtins, found.exception)
    code = None if found.from_torch or entry_id in LISTED else entry_id
    return pytest.raises(
        kind, match=_pattern(found), check=lambda error: getattr(error, "code", None) == code
    )


def assert_said(entry_id: str, text: str) -> None:
    """That ``text``, which an exception of the entry said, is the whole message of an entry."""
    assert re.fullmatch(_pattern(entry(entry_id)), text), text


def _pattern(found: Entry) -> str:
    parts = PLACEHOLDER.split(found.message)
    code = "" if found.from_torch else re.escape(f" [{found.id}]")
    code += "" if found.from_torch or found.id in LISTED else "$"
    return "(?s)" + ".*?".join(re.escape(part) for part in parts) + code
