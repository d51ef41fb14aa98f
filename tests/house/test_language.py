"""Pages, docstrings and messages: how a sentence starts, and "per" for rates.

`make lint` runs proselint for general English. Two rules of this project are not among its checks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.site import catalogue

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]

START = (
    r"(?:^|(?<=[a-zX][.!?] ))(?:Of|Who|Whom|What|Where|Not|Nor)\b(?! (?:only|yet)\b)(?![^.!?]*\?)"
)
COUNTED = r"(?:(?:\d|two|three|four) \w+s|once|twice|ms|µs|bytes?|[kMGT]i?B|GB/s|FLOPs|tokens)"
COUNTED_BY = r"(?:step|unit|rank|parameter|block|layer|gather|second|call|GPU|backward|forward)s?"
RULES = {
    "begin with the subject, or with If, When, Because, For": re.compile(START),
    "write bitwise identical": re.compile(r"\b(?:to the bit|bit (?:for|by) bit)\b"),
    "write per": re.compile(rf"\b{COUNTED} an? {COUNTED_BY}\b(?! (?:of|that|which|from)\b)"),
}


def _paragraphs(text: str) -> Iterator[str]:
    """Prose in one line each: without code, headings, quotes, tables and addresses."""
    text = re.sub(r"^```.*?^```|<!--.*?-->|(?<=::\n)(?:\n| +.*\n)+", "", text, flags=re.M | re.S)
    text = re.sub(r"``.+?``|`[^`]*`|\"[^\"]*\"", "X", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. ))|\n(?=\s+\w+: )", text):
        words = re.sub(r"^\s*(?:[-*]|\d+\.) |^\s+\w+: ", "", part)
        if not re.match(r"\s*[#>|!]", words) and not re.search(r"──|│|--->|\^\^", words):
            yield re.sub(r"\s+", " ", words).strip()


def _texts() -> Iterator[tuple[str, str]]:
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for path in ROOT.glob("fsdp2/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", str(node.value.value)
    for name, entry in catalogue.catalogue().items():
        if not entry.from_torch:
            yield name, entry.message[0].upper() + entry.message[1:]


def _broken(text: str) -> list[str]:
    found = ((rule, part) for part in _paragraphs(text) for rule in RULES)
    return [f"{rule}: {part[:80]}" for rule, part in found if RULES[rule].search(part)]


def test_no_text_breaks_a_rule() -> None:
    assert [f"{where}: {said}" for where, text in _texts() for said in _broken(text)] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Where a device has no streams, lanes are one.\n\n- It is. Not\n  so.", 2),
        ("This takes 3 µs a step.", 1),
        ("This takes 3 µs per step. What does it cost?\n\n```\nNot prose.\n```\n", 0),
    ],
)
def test_rules_are_noticed(text: str, count: int) -> None:
    assert len(_broken(text)) == count
