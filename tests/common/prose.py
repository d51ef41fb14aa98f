"""The language of pages and docstrings: rules, and what breaks them.

    python -m tests.common.prose                    # every finding, as file:line
    python -m tests.common.prose docs/guide.md      # of these files

The rules are `RULES`. Code, links' addresses, quoted messages, headings, drawings, and tables that
a command writes (between ``<!-- name -->`` and ``<!-- end -->``) are not prose. No file may have a
finding.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Rule:
    """A pattern that plain technical English does not need.

    Attributes:
        name: what a finding is called.
        pattern: searched in each paragraph, in which code is replaced by ``X``.
        advice: what to write.
        bad: a sentence that breaks the rule.
        good: the same in other words, which breaks no rule.
    """

    name: str
    pattern: re.Pattern[str]
    advice: str
    bad: str
    good: str


def _rule(name: str, pattern: str, advice: str, bad: str, good: str) -> Rule:
    return Rule(name, re.compile(pattern), advice, bad, good)


_START = r"(?:^|(?<=[.!?] )|(?<=[.!?]\*\* ))"
_COUNTED = (
    r"(?:(?:\d|two|three|four) \w+s|one (?:launch|call|copy)|one|once|twice|ms|µs|bytes?"
    r"|[kMGT]i?B|GB/s|FLOPs|tokens|instructions|kernels?|copies|launches|allocations?|all-gathers|collectives|microseconds"
    r"|events|graphs?|pieces?|entries|numbers?|optimizers?|DTensors?|rows?)"
)
_PER = (
    r"(?:step|unit|rank|parameter|block|layer|gather|all-gather|reduction|number|second|node|token"
    r"|call|dtype|group|forward|backward|operator|tensor|mesh|micro-batch|root|iteration|GPU|slice"
    r"|line|module|message|sample|row)"
)

RULES = (
    _rule(
        "sentence start",
        _START + r"(?:Of|Who|Whom|Where|Not|Nor)\b(?! (?:only|yet)\b)(?![^.!?]*\?)",
        "begin with the subject, or with If, When, Because, For",
        "Where a device has no streams, lanes are one.",
        "If a device has no streams, lanes are one.",
    ),
    _rule(
        "what as a subject",
        _START + r"What\b(?![^.!?]*\?)",
        "name the thing",
        "What is not used costs nothing.",
        "Unused features cost nothing.",
    ),
    _rule(
        "rate with a",
        r"\b" + _COUNTED + r" an? " + _PER + r"s?\b(?! (?:of|that|which|whose|from)\b)",
        "per",
        "This takes 3 µs a step.",
        "This takes 3 µs per step.",
    ),
    _rule(
        "behind, beside",
        r"\b(?:behind|beside)\b",
        "after, during, in addition to, next to",
        "The copy runs beside the forward.",
        "The copy runs during the forward.",
    ),
    _rule(
        "alone",
        r"\balone\b",
        "only",
        "Rank 0 alone has it.",
        "Only rank 0 has it.",
    ),
    _rule(
        "travel",
        r"\btravel(?:s|led|ling)?\b",
        "is sent, is gathered, is packed",
        "Gradients travel in bf16.",
        "Gradients are sent in bf16.",
    ),
    _rule(
        "no actor",
        r"\b(?:[Nn]obody|[Ss]omebody|[Ww]hoever)\b",
        "name the actor: you, fsdp2, a rank, code that …",
        "Nobody waits for it.",
        "No rank waits for it.",
    ),
    _rule(
        "old words",
        r"\b(?:for ever|as ever|for want of|till|(?<![Tt]here )is no (?!longer|more|less)(?:\w+)"
        r"|(?<![Tt]here )are no (?!longer|more|less)(?:\w+)|anew|takes? place of)\b",
        "for as long as, as before, because … is missing, until, is not a, again",
        "The root is no unit.",
        "The root is not a unit.",
    ),
    _rule(
        "old phrase",
        r"\bunder way\b|\b(?:go(?:es)?|went) on\b(?! to)|\bas of X|\bfor good\b"
        r"|\b[Mm]end(?:s|ed)?\b|\bbut for\b(?! (?:any|the|an?)\b)|\bthread\(s\)",
        "is running, continues, as in, permanently, except, correct",
        "An all-gather is under way.",
        "An all-gather is running.",
    ),
    _rule(
        "dropped verb",
        r"\bnext to none\b"
        r"|\bor cannot do without\b|\bas a `?\w+`? does that\b|\bnewer than its\.",
        "say the verb and its object",
        "It costs none, and next to none.",
        "It costs almost nothing.",
    ),
    _rule(
        "riddle",
        r"\b(?:differ in effect|figures do not exist|cannot be told|can hold a store"
        r"|come to [\d.]+ % alike|is a model of its rule|are first made what|in silence"
        r"|so to say|house of rooms)\b",
        "say what happens",
        "Which number is whose cannot be told.",
        "The numbers cannot be matched with names.",
    ),
)


@dataclass(frozen=True)
class Finding:
    """A place that breaks a rule."""

    path: str
    line: int
    rule: Rule
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule.name}: …{self.text}… ({self.rule.advice})"


# ---- what is prose

_CODE = re.compile(r"``.+?``|`[^`]*`")
_QUOTED = re.compile(r"“[^”]*”|\"[^\"]*\"")
_ADDRESS = re.compile(r"\]\([^)]*\)")
_DRAWING = re.compile(r"──|══|│|┌|└|--->|\^\^")
_ITEM = re.compile(r"\s*(?:[-*] |\d+\. )")

Paragraph = tuple[int, str]
"""The line on which it begins, and its text in one line."""


def _plain(text: str) -> str:
    """Without code, quotes, addresses and the mark of a list's item."""
    text = _CODE.sub("X", _ITEM.sub("", text, count=1))
    return re.sub(r"\s+", " ", _QUOTED.sub("X", _ADDRESS.sub("]", text))).strip()


def _joined(lines: Sequence[Paragraph]) -> Iterator[Paragraph]:
    """Lines as paragraphs: an empty line and an item of a list end one; a cell is one."""
    part: list[str] = []
    start = 0
    for number, line in (*lines, (0, "")):
        ends = not line.strip() or line.lstrip().startswith("|") or _ITEM.match(line)
        if ends and part:
            yield start, _plain(" ".join(part))
            part = []
        if line.lstrip().startswith("|"):
            cells = _CODE.sub("X", line).strip().strip("|").split("|")
            yield from ((number, _plain(cell)) for cell in cells)
        elif line.strip():
            start = start if part else number
            part.append(line if not part else line.strip())


def of_page(text: str) -> Iterator[Paragraph]:
    """The prose of a page in Markdown."""
    lines: list[Paragraph] = []
    fenced = generated = False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("```"):
            fenced = not fenced
        elif stripped.startswith("<!--") and not fenced:
            generated = stripped != "<!-- end -->"
        elif not (fenced or generated or _is_no_prose(line)):
            lines.append((number, line))
            continue
        lines.append((number, ""))
    return _joined(lines)


def _is_no_prose(line: str) -> bool:
    quoted = line.lstrip().startswith((">", "#", "!["))
    return quoted or line.startswith("    ") or bool(_DRAWING.search(line))


def of_source(text: str) -> Iterator[Paragraph]:
    """The docstrings of a module, of what it defines, and below what it assigns."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            yield from _of_docstring(node.lineno, value) if isinstance(value, str) else ()


def _of_docstring(first: int, text: str) -> Iterator[Paragraph]:
    lines: list[Paragraph] = []
    code_from: int | None = None  # the indent of the line that announced code
    for number, line in enumerate(text.splitlines(), first):
        indent = len(line) - len(line.lstrip())
        if code_from is not None and line.strip() and indent <= code_from:
            code_from = None
        shown = code_from is None and not _DRAWING.search(line) and ">>>" not in line
        named = re.sub(r"^(\s+)\*{0,2}\w+: ", r"\1- ", line)  # an argument's name
        lines.append((number, named if shown else ""))
        if code_from is None and line.rstrip().endswith("::"):
            code_from = indent
    return _joined(lines)


# ---- what breaks the rules


def findings(path: str, text: str) -> list[Finding]:
    """All of one file.

    Args:
        path: from the root of the repository; its ending says how it is read.
        text: its contents.
    """
    paragraphs = of_page(text) if path.endswith(".md") else of_source(text)
    return [
        Finding(path, line, rule, paragraph[max(0, found.start() - 30) : found.end() + 40])
        for line, paragraph in sorted(paragraphs)
        for rule in RULES
        for found in rule.pattern.finditer(paragraph)
    ]


def checked_files() -> list[Path]:
    """All pages and all modules of the package."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted([*pages, *ROOT.glob("fsdp2/**/*.py")])


def found_in(paths: Sequence[Path]) -> dict[str, list[Finding]]:
    """By file, for those that have any."""
    found = {}
    for path in paths:
        name = path.resolve().relative_to(ROOT).as_posix()
        found[name] = findings(name, path.read_text(encoding="utf-8"))
    return {name: those for name, those in found.items() if those}


def main() -> int:
    """Print findings; returns whether there are any."""
    parser = argparse.ArgumentParser(description="The language of pages and docstrings")
    parser.add_argument("files", nargs="*", type=Path, help="default: all that are checked")
    options = parser.parse_args()
    found = found_in(options.files or checked_files())
    for those in found.values():
        print(*those, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
